"""What experts do with rows between their grouped GEMMs: spread tokens, activate, sum over choices.

Done operator by operator, these steps move more bytes than the GEMMs of a small expert do, so each is one
:class:`torch.autograd.Function` with one pass over memory and one rounding in either direction:

* :func:`dispatch` copies a token to the rows of its choices; its gradient sums them.
* :func:`gated_silu` is the activation of a gated expert with the routing weight multiplied in.
* :func:`combine` sums the rows of each token; its gradient copies.

The formulas are written in PyTorch. Where plain CUDA tensors are computed and nothing records or traces,
Triton kernels compute the same (``_triton_rows``). Elsewhere (a CPU, ``torch.compile``, which fuses
the formulas itself, dispatch modes, a backward that is itself differentiated) the formulas run. Sums are
FP32 or wider and in a fixed order, without atomics.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["combine", "dispatch", "gated_silu"]


def dispatch(x: Tensor, source: Tensor, inverse: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Tokens -> rows sorted by expert.

    Args:
        x: [T, D].
        source: [T * top_k] int64, the token of each row.
        inverse: [T * top_k] int64, the row of each choice, those of a token side by side.
        top_k: choices of a token.
        dtype: of the rows.

    Returns:
        [T * top_k, D] in ``dtype``.
    """
    return _Dispatch.apply(x, source, inverse, top_k, dtype)


def combine(
    rows: Tensor, source: Tensor, inverse: Tensor, top_k: int, dtype: torch.dtype
) -> Tensor:
    """Rows [T * top_k, D] -> the sum of each token's rows, [T, D] in ``dtype``; see :func:`dispatch`.

    It saves nothing that a checkpoint would have to recompute the GEMM in front of it for.
    """
    return _Combine.apply(rows, source, inverse, top_k, dtype)


def gated_silu(y: Tensor, weight: Tensor) -> Tensor:
    """``silu(y[r, :I]) * y[r, I:] * weight[r]``, rounded once.

    Args:
        y: [R, 2 I].
        weight: [R, 1], of y's dtype or FP32.

    Returns:
        [R, I] in y's dtype. It saves y and weight, and nothing between them and the result.
    """
    return _GatedSilu.apply(y, weight)


@cache
def _triton_rows() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from . import _triton_rows

    return _triton_rows


def _kernels(*tensors: Tensor) -> ModuleType | None:
    """The Triton kernels, if they may compute here."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_in_torch_dispatch_mode():
        return None
    if not all(t.is_cuda and type(t) in (Tensor, nn.Parameter) for t in tensors):
        return None
    return _triton_rows()


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _sum_rows(rows: Tensor, inverse: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    if top_k == 1:
        return rows[inverse].to(dtype)
    kernels = _kernels(rows)
    if kernels is not None:
        return kernels.sum_rows(rows, inverse, top_k, dtype)
    r, d = rows.shape
    return rows[inverse].view(r // top_k, top_k, d).sum(1, dtype=dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, inverse, top_k, dtype):  # type: ignore[override]
        ctx.save_for_backward(inverse)
        ctx.top_k, ctx.dtype = top_k, x.dtype
        return x.to(dtype)[source]

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return _sum_rows(g, inverse, ctx.top_k, ctx.dtype), None, None, None, None


class _Combine(torch.autograd.Function):
    """``source`` is an attribute and not a saved tensor: a save behind the down projection would make a
    checkpoint recompute that projection to get there. It costs 8 bytes a row until the graph is freed.
    """

    @staticmethod
    def forward(ctx, rows, source, inverse, top_k, dtype):  # type: ignore[override]
        ctx.source, ctx.dtype = source, rows.dtype
        return _sum_rows(rows, inverse, top_k, dtype)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g.to(ctx.dtype)[ctx.source], None, None, None, None


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weight):  # type: ignore[override]
        ctx.save_for_backward(y, weight)
        kernels = _kernels(y, weight)
        if kernels is not None:
            return kernels.gated_silu(y, weight)
        gate, up = _wide(y).chunk(2, -1)
        return (F.silu(gate) * up * weight).to(y.dtype)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        y, weight = ctx.saved_tensors
        kernels = _kernels(g, y, weight)
        if kernels is not None:
            return kernels.gated_silu_backward(g, y, weight)
        gate, up = _wide(y).chunk(2, -1)
        g, sigmoid = _wide(g), torch.sigmoid(gate)
        silu, weighted = gate * sigmoid, g * weight
        dgate = weighted * up * sigmoid * (1 + gate * (1 - sigmoid))
        dy = torch.cat([dgate, weighted * silu], -1).to(y.dtype)
        return dy, (g * silu * up).sum(-1, keepdim=True).to(weight.dtype)
