"""One small problem for each differentiable operator, for the tests that hold for all of them.

Every operator is bilinear in two operands. The grouped problem has an empty group and two rows behind the
last one. ``reference`` is written with torch's own differentiable operators and nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FAMILIES = ("grouped_mm", "router_mm", "dense_mm", "batched_mm")
SUFFIXES = ("", "_dgrad", "_wgrad")
OPERATORS = tuple(family + suffix for family in FAMILIES for suffix in SUFFIXES)
"""Every differentiable operator: the forward, the data gradient and the weight gradient of each family."""

ENDS = (3, 3, 8)
SHAPES = {  # x, w, g of y = x w^T; g has the shape of y
    "grouped_mm": ((10, 6), (3, 5, 6), (10, 5)),
    "router_mm": ((10, 6), (5, 6), (10, 5)),
    "dense_mm": ((2, 4, 6), (5, 6), (2, 4, 5)),
    "batched_mm": ((3, 4, 6), (3, 5, 6), (3, 4, 5)),
}


class SmallProblem(NamedTuple):
    """An operator, the shapes of its two operands and of its result, and ``offs`` if it takes one."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    result: tuple[int, ...]
    offs: tuple[Tensor, ...]

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.cake, self.name).default

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype that the operator takes."""
        return torch.float32 if self.name.startswith("router") else torch.float64

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return self.overload(a, b, *self.offs)

    def operands(
        self,
        dtype: torch.dtype | None = None,
        *,
        a_grad: bool = True,
        b_grad: bool = True,
    ) -> tuple[Tensor, Tensor]:
        dtype = dtype or self.dtype
        return (
            torch.randn(self.a, dtype=dtype, requires_grad=a_grad),
            torch.randn(self.b, dtype=dtype, requires_grad=b_grad),
        )

    def reference(self, a: Tensor, b: Tensor) -> Tensor:
        if self.name.startswith("grouped_mm"):
            return _grouped_reference(self.name, a, b)
        if self.name.endswith("_dgrad"):
            return a @ b
        if self.name.endswith("_wgrad"):
            if self.name.startswith("batched"):
                return a.mT @ b
            return a.flatten(0, -2).t() @ b.flatten(0, -2)
        return a @ b.mT


def problem(name: str) -> SmallProblem:
    family, _, form = name.partition("_mm")
    x, w, g = SHAPES[f"{family}_mm"]
    a, b, result = {"": (x, w, g), "_dgrad": (g, w, x), "_wgrad": (g, x, w)}[form]
    offs = (torch.tensor(ENDS, dtype=torch.int32),) if family == "grouped" else ()
    return SmallProblem(name, a, b, result, offs)


def _grouped_reference(name: str, a: Tensor, b: Tensor) -> Tensor:
    groups = list(zip((0, *ENDS[:-1]), ENDS, strict=True))
    if name.endswith("_wgrad"):
        return torch.stack([a[i:j].t() @ b[i:j] for i, j in groups])
    product: Callable[[Tensor, Tensor], Tensor] = (
        torch.matmul if name.endswith("_dgrad") else lambda s, t: s @ t.t()
    )
    rows = [product(a[i:j], b[e]) for e, (i, j) in enumerate(groups)]
    tail = rows[0].new_zeros(a.shape[0] - ENDS[-1], rows[0].shape[1])
    return torch.cat([*rows, tail])
