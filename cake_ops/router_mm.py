"""FP32 router GEMM: the logits of a MoE gate, in FP32 quality whatever torch's precision switches say.

Rules of all functions here:
    * operands are FP32 or BF16 in any mix, [T, H] tokens and [N, H] expert weights, of any strides;
      logits are FP32, gradients have the dtype asked for (autograd: that of their operand).
    * accuracy: relative Frobenius error of at most 5e-7 against FP64, also row by row with rows scaled by
      2**-60 to 2**30, for sums of up to 2**17 terms (2**14 in a data gradient); finite results stay finite up
      to FP32's maximum.
    * subnormal numbers: what is left of a number below 2**-126 may be flushed to zero. Documented bound: each
      operand adds to a result an absolute error of at most 2**-126 times the sum of the magnitudes of the
      other operand's numbers in it.
    * T = 0 and N = 0 give empty results, an empty contraction zeros.
    * ``torch.set_float32_matmul_precision``, TF32 and autocast change nothing. Inf and NaN behave as in
      an FP32 product of torch.
    * the forward is bitwise the same from run to run in both modes, so that a recomputed forward picks
      the same experts; ``deterministic=False`` allows gradients that add in arrival order.
    * bad arguments raise ``RuntimeError`` and nothing is written.
    * ``out`` (for calls that need no gradient) receives the result and is returned.

The CPU and GPUs without a kernel compute in FP64 and round once. On Hopper (sm_90a) a kernel of this package computes
in 3xTF32, the method of Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing
the FP32 theoretical peak performance" (2022). Measured on an H200, from 64 to 1024 tokens: 1.3e-7 to 1.7e-7.

On sm_90a:
    * an FP32 number becomes two TF32 parts, and three of the four products of parts are computed. Tensor cores
      sum 32 steps of the contraction at a time; these sums are added in FP32.
    * operands with unit stride and 16-byte rows are read in place, FP32 ones and a BF16 x, which needs two
      products; other operands are copied first. In a data gradient both are read as FP32.
    * the contraction of a forward is split over a cluster of 8 CTAs for every T, and their sums are added in
      the order of their ranks. So the bits of a row of logits depend neither on T nor on the other rows.
    * no gradient adds in arrival order, whatever ``deterministic`` says.
    * Inf, NaN, numbers that round to Inf in TF32 and sums that overflow make the kernel compute the affected
      sums again by FP32 multiply-adds. The others keep their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_out_dtype
from ._eager import by_out_dtype, eager
from ._library import OPS

__all__ = ["router_mm", "router_mm_dgrad", "router_mm_wgrad", "router_mm_wgrad_", "split_bf16x3"]

_fwd = eager("router_mm")
_dgrad, _wgrad = by_out_dtype("router_mm_dgrad"), by_out_dtype("router_mm_wgrad")


def router_mm(
    x: Tensor, w: Tensor, *, deterministic: bool = True, out: Tensor | None = None
) -> Tensor:
    """Forward: ``x @ w.T`` in FP32.

    Args:
        x: [T, H] FP32 or BF16.
        w: [N, H] FP32 or BF16, N experts.
        deterministic: handed to the gradients; the logits are repeatable either way.
        out: [T, N] FP32, receives the result.

    Returns:
        logits [T, N], FP32, contiguous. Differentiable in x and w, any number of times.
    """
    if out is not None:
        OPS["router_mm_out"].overload(x, w, deterministic=deterministic, out=out)
        return out
    if deterministic:
        return _fwd(x, w)
    return OPS["router_mm"].overload(x, w, deterministic=False)


def router_mm_dgrad(
    g: Tensor,
    w: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Data gradient: ``g @ w``.

    Args:
        g: [T, N], the gradient of the logits.
        w: [N, H].
        out_dtype: FP32 (default) or BF16.
        deterministic: see the module.
        out: [T, H] FP32 or BF16, receives the result.

    Returns:
        dx [T, H], contiguous.
    """
    if out is not None:
        check_out_dtype("router_mm_dgrad_out", out, out_dtype)
        OPS["router_mm_dgrad_out"].overload(g, w, deterministic=deterministic, out=out)
        return out
    if deterministic:
        return _dgrad(out_dtype)(g, w)
    return OPS["router_mm_dgrad"].overload(g, w, out_dtype=out_dtype, deterministic=False)


def router_mm_wgrad(
    g: Tensor,
    x: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Weight gradient: ``g.T @ x``.

    Args:
        g: [T, N], the gradient of the logits.
        x: [T, H].
        out_dtype: FP32 (default) or BF16.
        deterministic: see the module.
        out: [N, H] FP32 or BF16, receives the result.

    Returns:
        dw [N, H], contiguous.
    """
    if out is not None:
        check_out_dtype("router_mm_wgrad_out", out, out_dtype)
        OPS["router_mm_wgrad_out"].overload(g, x, deterministic=deterministic, out=out)
        return out
    if deterministic:
        return _wgrad(out_dtype)(g, x)
    return OPS["router_mm_wgrad"].overload(g, x, out_dtype=out_dtype, deterministic=False)


def router_mm_wgrad_(out: Tensor, g: Tensor, x: Tensor, *, deterministic: bool = True) -> Tensor:
    """Accumulating weight gradient: ``out += g.T @ x``, rounded once to out's dtype.

    Args:
        out: [N, H] FP32 or BF16, row-major.
        g: [T, N], the gradient of the logits.
        x: [T, H].
        deterministic: see the module.

    Returns:
        ``out``.
    """
    OPS["router_mm_wgrad_"].overload(out, g, x, deterministic=deterministic)
    return out


def split_bf16x3(x: Tensor) -> Tensor:
    """Splits FP32 numbers exactly into three BF16 parts: ``x == parts.double().sum(0)``.

    Exact for zero, for every finite x with abs(x) >= 2**-110 up to FP32's maximum, and below that for
    every x that is a multiple of 2**-133 (BF16's smallest subnormal). Parts fall in magnitude. Inf and NaN stand
    in the first part, the others are then zero. Not differentiable. The split is that of Henry, Tang and
    Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations" (2019).

    Args:
        x: FP32, any shape.

    Returns:
        parts [3, *x.shape], BF16, contiguous.
    """
    return OPS["split_bf16x3"].overload(x)
