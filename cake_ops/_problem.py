"""A problem: what one call of an operator means, apart from how it is computed.

:mod:`cake_ops.meta` declares one :class:`Problem` for each operator. The backends ask it to check real
tensors and to allocate the result; the fakes are the same functions on fake tensors. That is why a bad
call gets the same message in eager, under ``torch.compile`` and on the meta device, and why a fake's
shape, dtype and strides are the real ones. The forms ``_out`` and ``_`` of an operator share its problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _checks as check
from ._library import LIB, NAMESPACE, OPS
from ._sharding import register_sharding_once

Shape = tuple[Any, ...]
Dtypes = tuple[torch.dtype, ...]

PROBLEMS: dict[str, Problem] = {}


def operand_dtype(a: Tensor) -> Dtypes:
    """The result has the operands' dtype."""
    return (a.dtype,)


def operand_dtype_or_float32(a: Tensor) -> Dtypes:
    """The operands' dtype, or on request FP32 for BF16 and FP16 operands."""
    low = a.dtype in (torch.bfloat16, torch.float16)
    return (a.dtype, torch.float32) if low else (a.dtype,)


def float32_only(a: Tensor) -> Dtypes:
    return (torch.float32,)


def float32_or_bfloat16(a: Tensor) -> Dtypes:
    return (torch.float32, torch.bfloat16)


def bfloat16_only(a: Tensor) -> Dtypes:
    return (torch.bfloat16,)


class Problem:
    """The rules of one operator.

    Args:
        name: the operator.
        arguments: the names of its input tensors, in order.
        shape: ``(op, *tensors) -> shape`` checks the tensors and returns the result's shape.
        dtypes: ``(first tensor) -> dtypes`` the result may have; the first one is the default.
    """

    __slots__ = ("arguments", "dtypes", "name", "shape")

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        shape: Callable[..., Shape],
        dtypes: Callable[[Tensor], Dtypes],
    ) -> None:
        self.name, self.arguments, self.shape, self.dtypes = name, arguments, shape, dtypes
        PROBLEMS[name] = self
        self._register_fakes()

    def result(
        self, *tensors: Tensor, out_dtype: torch.dtype | None = None
    ) -> tuple[Shape, torch.dtype]:
        """Checks a call and returns its result's shape and dtype."""
        shape = self.shape(self.name, *tensors)
        dtypes = self.dtypes(tensors[0])
        if out_dtype is not None and out_dtype not in dtypes:
            raise RuntimeError(
                f"cake::{self.name}: out_dtype must be {_either(dtypes)} for"
                f" {tensors[0].dtype} operands, got {out_dtype}"
            )
        return shape, out_dtype or dtypes[0]

    def allocate(self, *tensors: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Checks a call and returns its uninitialised, contiguous result."""
        shape, dtype = self.result(*tensors, out_dtype=out_dtype)
        return tensors[0].new_empty(shape, dtype=dtype)

    def check_out(self, op: str, out: Tensor, *tensors: Tensor) -> None:
        """Checks a call of the form ``op`` that writes (or adds) into ``out``."""
        check.check_out(op, out, self.shape(op, *tensors), self.dtypes(tensors[0]))
        check.check_device(op, "out", out, tensors[0].device)

    def check_no_overlap(self, op: str, out: Tensor, *tensors: Tensor) -> None:
        """``out`` shares no memory with an input; for real tensors, after :meth:`check_out`."""
        check.check_no_overlap(op, out, **dict(zip(self.arguments, tensors, strict=True)))

    def _register_fakes(self) -> None:
        def fake(*tensors, out_dtype=None, deterministic=True):
            register_sharding_once()
            return self.allocate(*tensors, out_dtype=out_dtype)

        def fake_out(*tensors, out, deterministic=True):
            self.check_out(f"{self.name}_out", out, *tensors)

        def fake_accumulate(out, *tensors, deterministic=True):
            self.check_out(f"{self.name}_", out, *tensors)

        for suffix, function in (("", fake), ("_out", fake_out), ("_", fake_accumulate)):
            if self.name + suffix in OPS:
                torch.library.register_fake(f"{NAMESPACE}::{self.name}{suffix}", function, lib=LIB)


def _either(dtypes: Dtypes) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
