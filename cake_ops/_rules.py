"""What else an operator tells PyTorch: autocast casts, FLOP counts and vmap.

Autocast casts the operands of the GEMMs to BF16, whatever dtype the region asks for: it is what the GPU
kernels take. The router is not cast down; it computes in FP32 quality from FP32 or BF16 as they come.
A kernel of our own does this rather than ``torch.library.register_autocast``, which costs 17 us a call.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.utils.flop_counter import register_flop_formula

from ._library import LIB, NAMESPACE, OPS, Op


def _register_autocast(op: Op, device: str) -> None:
    exclude = DispatchKeySet(getattr(DispatchKey, f"Autocast{device}"))
    to = torch.float32 if op.name.startswith("router") else torch.bfloat16

    def cast(t):
        applies = isinstance(t, Tensor) and t.device.type == device.lower()
        return t.to(to) if applies and t.dtype in op.autocasts else t

    def kernel(*args, **kwargs):
        with _ExcludeDispatchKeyGuard(exclude):
            return op.overload(*map(cast, args), **kwargs)

    LIB.impl(op.name, kernel, f"Autocast{device}")


def _register_flops(op: Op) -> None:
    """2 M N K: every row counts, also those behind ``offs[-1]``, for the offsets are not read."""
    base = op.name.removesuffix("_out").removesuffix("_")
    accumulates = op.name.endswith("_wgrad_")  # out is the first argument
    last = -1 if base.endswith(("_dgrad", "_wgrad")) else -2

    def formula(*shapes, out_shape=None, **kwargs) -> int:
        a, b = shapes[accumulates : accumulates + 2]
        return 2 * prod(a) * b[last]

    register_flop_formula(op.overload.overloadpacket)(formula)


def _register_vmap(op: Op) -> None:
    """One call for each slice, stacked: the sizes of a batch of ragged problems have nothing in common.

    An empty batch takes the shape of its result from a call on zeros, which is its sum.
    """

    def rule(info, in_dims, *args, **kwargs):
        def at(i: int, t: Tensor, dim: int | None) -> Tensor:
            if dim is None:
                return t
            return t.select(dim, i) if info.batch_size else t.sum(dim, dtype=t.dtype)

        slices = (map(partial(at, i), args, in_dims) for i in range(max(info.batch_size, 1)))
        result = torch.stack([op.overload(*s, **kwargs) for s in slices])
        return (result if info.batch_size else result[:0]), 0

    torch.library.register_vmap(f"{NAMESPACE}::{op.name}", rule, lib=LIB)


for _op in OPS.values():
    if _op.name == "split_bf16x3":
        continue
    _register_flops(_op)
    if not _op.mutates:
        _register_vmap(_op)
        for _device in ("CPU", "CUDA"):
            _register_autocast(_op, _device)
