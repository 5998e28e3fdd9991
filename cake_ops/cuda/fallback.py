"""Right results through torch, for GPUs without kernels of their own; announced once by a warning.

The router multiplies in FP64 there, as on the CPU; the grouped GEMMs are here. Nothing here reads ``offs``
on the host, but on GPUs that torch has no grouped kernel for (other than sm_90 and sm_100) its own fallback
does: the forward and the data gradient then wait for the device and cannot be captured in a CUDA graph. A
weight gradient costs a whole GEMM for each expert, since torch has no grouped GEMM with an FP32 result.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from .device import no_kernels_reason


@functools.cache
def announce(device: int) -> None:
    """Warns at the first call on a device that torch serves, of whichever family it is."""
    warnings.warn(
        f"cake_ops: {no_kernels_reason(device)}; grouped and router GEMMs run through torch there",
        stacklevel=2,
    )


def pad8(t: Tensor, *dims: int) -> Tensor:
    """``t`` with zeros up to the next multiple of 8 in the given dimensions, contiguous."""
    padding = [0, 0] * t.dim()
    for dim in dims:
        padding[2 * (t.dim() - 1 - dim) + 1] = -t.shape[dim] % 8
    return F.pad(t, padding).contiguous()


def _ends(offs: Tensor, rows: int) -> Tensor:
    """``offs`` as the kernels take it: bad values are clamped, so nothing outside the operands is touched."""
    return offs.clamp(0, rows).cummax(0).values


def ragged_m(y: Tensor, a: Tensor, b: Tensor, offs: Tensor) -> None:
    """y [M, N] = a [M, K] times b [E, N, K] transposed, for the rows of each group."""
    announce(y.get_device())
    ends = _ends(offs, a.shape[0])
    product = torch._grouped_mm(pad8(a, 1), pad8(b, 1, 2).transpose(1, 2), offs=ends)
    y.copy_(product[:, : y.shape[1]])
    row = torch.arange(y.shape[0], device=y.device)
    y.masked_fill_((row >= ends[-1]).unsqueeze(1), 0)


def ragged_k(dw: Tensor, g: Tensor, x: Tensor, offs: Tensor, accumulate: bool) -> None:
    """dw [E, N, K] (+)= g [M, N] transposed times x [M, K], for the rows of each group."""
    announce(dw.get_device())
    row = torch.arange(g.shape[0], device=g.device).unsqueeze(1)
    start = offs.new_zeros(())
    for e, end in enumerate(_ends(offs, g.shape[0]).unbind()):
        inside = (row >= start) & (row < end)
        product = torch.mm(
            torch.where(inside, g, 0).t(), torch.where(inside, x, 0), out_dtype=torch.float32
        )
        if accumulate:  # an empty group keeps its bits: -0 + 0 is 0
            product = torch.where(end > start, (dw[e] + product).to(dw.dtype), dw[e])
        dw[e] = product
        start = end
