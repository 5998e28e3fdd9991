"""What the tests of the eager fast path share: operands of any product, and a fast path that is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cake_ops import _eager
from cake_ops._library import OPS

Watch = Callable[..., tuple[Callable[..., Tensor], list[int]]]


def operands(
    name: str, rows: int = 5, *, dtype=torch.float32, grad=False, device: object = "cpu"
) -> tuple[Tensor, ...]:
    e, n, k = 2, 8, 16
    family, _, form = name.partition("_mm")
    if torch.device(device).type == "cuda" and family != "router":
        dtype = torch.bfloat16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_(grad)

    x, g = normal(rows, k), normal(rows, n)
    weight = normal(n, k) if family in ("router", "dense") else normal(e, n, k)
    if family == "batched":
        x, g = normal(e, rows, k), normal(e, rows, n)
    a, b = {"": (x, weight), "_dgrad": (g, weight), "_wgrad": (g, x)}[form]
    if family == "grouped":
        return a, b, torch.tensor([rows // 2, rows], dtype=torch.int32, device=device)
    return a, b


def watcher(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Makes the fast path of an operator, new, and a list that grows when a call takes the dispatcher."""

    def watched(name: str, **options: Any) -> tuple[Callable[..., Tensor], list[int]]:
        op, dispatched = OPS[name], []

        def overload(*tensors, **options):
            dispatched.append(1)
            return op.overload(*tensors, **options)

        class Watched:
            def __getattr__(self, attribute):
                return overload if attribute == "overload" else getattr(op, attribute)

        monkeypatch.setitem(OPS, name, Watched())
        call = _eager.eager.__wrapped__(name, **options)
        monkeypatch.setitem(OPS, name, op)
        return call, dispatched

    return watched
