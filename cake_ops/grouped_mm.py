"""Ragged grouped GEMM: the products of E experts with the rows that were routed to them.

The M rows of ``x`` lie in E consecutive groups of any size. ``offs`` (int32, [E], on the operands' device)
holds the cumulative ends of the groups; a CSR ``indptr`` [E + 1] is passed as its view ``indptr[1:]``,
without a copy. On CUDA ``offs`` is never read on the host: its values may change between CUDA-graph
replays. Rows at or past ``offs[-1]`` belong to no group.

Rules of all functions here:
    * dtypes: BF16 on CUDA; BF16, FP16, FP32 or FP64 on the CPU, the same for all operands. Sums are FP32
      or wider and rounded once.
    * strides: any. ``w`` may be a transposed view; its gradient then has the same memory order.
    * rows of a result at or past ``offs[-1]`` are zero; the weight gradient of an empty group is exactly
      zero; NaN or Inf in one group never reaches another.
    * results are bitwise the same from run to run. ``deterministic=False`` allows weight gradients that
      are not, where that is faster; ``torch.use_deterministic_algorithms(True)`` overrules it.
    * on CUDA a row of y or dx has the same bits whatever rows are beside it, and a weight gradient
      depends on its group's rows alone. On the CPU this holds for groups of one size.
    * bad arguments raise ``RuntimeError`` and nothing is written. Values of ``offs`` that decrease or
      leave [0, M] raise on the CPU.
    * ``out`` (for calls that need no gradient) receives the result and is returned: the result's shape
      and dtype, row-major, no overlap with an input.

The three products are those of the Cake kernels of FlashInfer (pull requests 8247 and 8269).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_out_dtype
from ._eager import by_out_dtype, eager
from ._library import OPS

__all__ = ["grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad", "grouped_mm_wgrad_"]

_fwd, _dgrad = eager("grouped_mm"), eager("grouped_mm_dgrad")
_wgrad = by_out_dtype("grouped_mm_wgrad")


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    *,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Forward: ``y[m] = x[m] @ w[e].T`` for the rows m of each group e.

    Args:
        x: [M, K].
        w: [E, N, K].
        offs: [E] int32, cumulative ends.
        deterministic: handed to the weight gradient of the backward; y has the same bits either way.
        out: [M, N], receives the result.

    Returns:
        y [M, N], contiguous, in x's dtype. Differentiable in x and w, any number of times.
    """
    if out is not None:
        OPS["grouped_mm_out"].overload(x, w, offs, out=out)
        return out
    if deterministic:
        return _fwd(x, w, offs)
    return OPS["grouped_mm"].overload(x, w, offs, deterministic=False)


def grouped_mm_dgrad(g: Tensor, w: Tensor, offs: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Data gradient: ``dx[m] = g[m] @ w[e]`` for the rows m of each group e; w is read in place.

    Args:
        g: [M, N], the gradient of y.
        w: [E, N, K].
        offs: [E] int32, cumulative ends.
        out: [M, K], receives the result.

    Returns:
        dx [M, K], contiguous, in g's dtype.
    """
    if out is not None:
        OPS["grouped_mm_dgrad_out"].overload(g, w, offs, out=out)
        return out
    return _dgrad(g, w, offs)


def grouped_mm_wgrad(
    g: Tensor,
    x: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Weight gradient: ``dw[e] = g_e.T @ x_e``, contracted over the rows of group e.

    Args:
        g: [M, N], the gradient of y.
        x: [M, K].
        offs: [E] int32, cumulative ends.
        out_dtype: the operands' dtype (default), or ``torch.float32`` for BF16 and FP16 operands.
        deterministic: see the module.
        out: [E, N, K] of a dtype that ``out_dtype`` may name, receives the result.

    Returns:
        dw [E, N, K], contiguous. Empty groups give exact zeros.
    """
    if out is not None:
        check_out_dtype("grouped_mm_wgrad_out", out, out_dtype)
        OPS["grouped_mm_wgrad_out"].overload(g, x, offs, deterministic=deterministic, out=out)
        return out
    if deterministic:
        return _wgrad(out_dtype)(g, x, offs)
    return OPS["grouped_mm_wgrad"].overload(g, x, offs, out_dtype=out_dtype, deterministic=False)


def grouped_mm_wgrad_(
    out: Tensor, g: Tensor, x: Tensor, offs: Tensor, *, deterministic: bool = True
) -> Tensor:
    """Accumulating weight gradient: ``out[e] += g_e.T @ x_e``, each sum rounded once to out's dtype.

    Args:
        out: [E, N, K], the operands' dtype or FP32 (such as Megatron's ``main_grad``), row-major.
        g: [M, N], the gradient of y.
        x: [M, K].
        offs: [E] int32, cumulative ends.
        deterministic: see the module.

    Returns:
        ``out``. Slices of empty groups keep their bits.
    """
    OPS["grouped_mm_wgrad_"].overload(out, g, x, offs, deterministic=deterministic)
    return out
