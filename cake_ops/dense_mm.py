"""Dense and batched projection GEMM, with the same options and rules as the grouped one.

Rules of all functions here:
    * dtypes: BF16 on CUDA; BF16, FP16, FP32 or FP64 on the CPU, the same for both operands; sums are FP32
      or wider and rounded once. ``out_dtype`` is the operands' dtype (default), or FP32 for lower ones.
    * strides: any; head views such as ``[T, L, K].permute(1, 0, 2)`` are read in place.
    * zero-size dimensions give results of the right shape; an empty contraction gives zeros.
    * ``deterministic=False`` allows sums in arrival order where that is faster;
      ``torch.use_deterministic_algorithms(True)`` overrules it.
    * bad arguments raise ``RuntimeError`` and nothing is written.
    * ``out`` (for calls that need no gradient) receives the result and is returned.
    * Differentiable any number of times; an FP32 gradient of a BF16 product is cast to BF16 first, as
      ``torch.mm`` with ``out_dtype`` does.

Shapes: x [.., K] or [L, M, K], w [N, K] or [L, N, K], g [.., N] or [L, M, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_out_dtype
from ._eager import by_out_dtype
from ._library import OPS

__all__ = [
    "batched_mm",
    "batched_mm_dgrad",
    "batched_mm_wgrad",
    "dense_mm",
    "dense_mm_dgrad",
    "dense_mm_wgrad",
    "linear",
]

_EAGER = {
    family + suffix: by_out_dtype(family + suffix)
    for family in ("dense_mm", "batched_mm")
    for suffix in ("", "_dgrad", "_wgrad")
}


def _call(
    name: str,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    out: Tensor | None,
) -> Tensor:
    if out is not None:
        check_out_dtype(f"{name}_out", out, out_dtype)
        OPS[f"{name}_out"].overload(a, b, deterministic=deterministic, out=out)
        return out
    if deterministic:
        return _EAGER[name](out_dtype)(a, b)
    return OPS[name].overload(a, b, out_dtype=out_dtype, deterministic=False)


def dense_mm(
    x: Tensor,
    w: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w.T``: x [.., K], w [N, K] -> [.., N]."""
    return _call("dense_mm", x, w, out_dtype, deterministic, out)


def dense_mm_dgrad(
    g: Tensor,
    w: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """``g @ w``: g [.., N], w [N, K] -> dx [.., K]."""
    return _call("dense_mm_dgrad", g, w, out_dtype, deterministic, out)


def dense_mm_wgrad(
    g: Tensor,
    x: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """``g.T @ x`` over the flattened leading dimensions: g [.., N], x [.., K] -> dw [N, K]."""
    return _call("dense_mm_wgrad", g, x, out_dtype, deterministic, out)


def batched_mm(
    x: Tensor,
    w: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w.mT``: x [L, M, K], w [L, N, K] -> [L, M, N]."""
    return _call("batched_mm", x, w, out_dtype, deterministic, out)


def batched_mm_dgrad(
    g: Tensor,
    w: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """``g @ w``: g [L, M, N], w [L, N, K] -> dx [L, M, K]."""
    return _call("batched_mm_dgrad", g, w, out_dtype, deterministic, out)


def batched_mm_wgrad(
    g: Tensor,
    x: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """``g.mT @ x``: g [L, M, N], x [L, M, K] -> dw [L, N, K]."""
    return _call("batched_mm_wgrad", g, x, out_dtype, deterministic, out)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` on :func:`dense_mm`: x [.., K], w [N, K], bias [N] -> [.., N].

    The product is rounded to its dtype (under autocast BF16) before the bias, in that dtype, is added.
    """
    y = dense_mm(x, w)
    return y if bias is None else y + bias.to(y.dtype)
