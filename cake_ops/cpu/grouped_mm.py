"""Ragged grouped GEMM on the CPU: one ``torch.mm`` for each group, in FP32 (FP64 for FP64 operands).

On the CPU the offsets can be read for nothing, so bad values raise and name the group. All of them are
read before anything is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import check_offs_values
from .._serve import serve

HOW = "one FP32 product for each group"


def _group_ranges(op: str, offs: Tensor, rows: int) -> list[tuple[int, int]]:
    """``(start, end)`` of every group."""
    ends = offs.tolist()
    check_offs_values(op, ends, rows)
    return list(zip([0, *ends], ends))  # noqa: B905  (the last end starts nothing)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    acc = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a.to(acc), b.to(acc))


def _ragged_m(op: str, y: Tensor, a: Tensor, w: Tensor, offs: Tensor) -> None:
    """y[m] = a[m] w[e]^T for the rows m of each group e; the rows behind the last group are zero."""
    end = 0
    for e, (start, end) in enumerate(_group_ranges(op, offs, a.shape[0])):
        if end > start:
            y[start:end] = _mm(a[start:end], w[e].t())
    y[end:].zero_()


def grouped_mm(op: str, y: Tensor, accumulate: bool, x: Tensor, w: Tensor, offs: Tensor) -> None:
    _ragged_m(op, y, x, w, offs)


def grouped_mm_dgrad(
    op: str, dx: Tensor, accumulate: bool, g: Tensor, w: Tensor, offs: Tensor
) -> None:
    _ragged_m(op, dx, g, w.transpose(1, 2), offs)


def grouped_mm_wgrad(
    op: str, dw: Tensor, accumulate: bool, g: Tensor, x: Tensor, offs: Tensor
) -> None:
    """dw[e] (+)= g_e^T x_e; an empty group gives zeros, or leaves the accumulator as it is."""
    for e, (start, end) in enumerate(_group_ranges(op, offs, g.shape[0])):
        if end > start:
            product = _mm(g[start:end].t(), x[start:end])
            dw[e] = dw[e] + product if accumulate else product
        elif not accumulate:
            dw[e].zero_()


serve("CPU", "grouped_mm", grouped_mm, HOW)
serve("CPU", "grouped_mm_dgrad", grouped_mm_dgrad, HOW)
serve("CPU", "grouped_mm_wgrad", grouped_mm_wgrad, HOW)
