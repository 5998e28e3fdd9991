"""Dense and batched projection GEMM on the CPU, in FP32 (FP64 for FP64 operands)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._serve import serve

HOW = "one FP32 product"


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _rows(t: Tensor) -> Tensor:
    """[.., C] as [M, C]; also when C or a leading dimension is zero."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def dense_mm(op: str, y: Tensor, accumulate: bool, x: Tensor, w: Tensor) -> None:
    y.copy_(torch.mm(_wide(_rows(x)), _wide(w).t()).view(y.shape))


def dense_mm_dgrad(op: str, dx: Tensor, accumulate: bool, g: Tensor, w: Tensor) -> None:
    dx.copy_(torch.mm(_wide(_rows(g)), _wide(w)).view(dx.shape))


def dense_mm_wgrad(op: str, dw: Tensor, accumulate: bool, g: Tensor, x: Tensor) -> None:
    dw.copy_(torch.mm(_wide(_rows(g)).t(), _wide(_rows(x))))


def batched_mm(op: str, y: Tensor, accumulate: bool, x: Tensor, w: Tensor) -> None:
    y.copy_(torch.bmm(_wide(x), _wide(w).mT))


def batched_mm_dgrad(op: str, dx: Tensor, accumulate: bool, g: Tensor, w: Tensor) -> None:
    dx.copy_(torch.bmm(_wide(g), _wide(w)))


def batched_mm_wgrad(op: str, dw: Tensor, accumulate: bool, g: Tensor, x: Tensor) -> None:
    dw.copy_(torch.bmm(_wide(g).mT, _wide(x)))


serve("CPU", "dense_mm", dense_mm, HOW)
serve("CPU", "dense_mm_dgrad", dense_mm_dgrad, HOW)
serve("CPU", "dense_mm_wgrad", dense_mm_wgrad, HOW)
serve("CPU", "batched_mm", batched_mm, HOW)
serve("CPU", "batched_mm_dgrad", batched_mm_dgrad, HOW)
serve("CPU", "batched_mm_wgrad", batched_mm_wgrad, HOW)
