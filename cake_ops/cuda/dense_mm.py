"""Dense and batched projection GEMM on CUDA: cuBLAS through torch, with FP32 results where asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._serve import serve


def _rows(t: Tensor) -> Tensor:
    """[.., C] as [M, C]; also when C or a leading dimension is zero."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


def _serve_cublas(name: str, operands: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    def compute(op: str, out: Tensor, accumulate: bool, a: Tensor, b: Tensor) -> None:
        a, b = operands(a, b)
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        if out.dtype != a.dtype:
            out.copy_(multiply(a, b, out_dtype=out.dtype).view(out.shape))
        elif out.is_contiguous():
            multiply(a, b, out=out.view(*a.shape[:-1], b.shape[-1]))
        else:
            out.copy_(multiply(a, b).view(out.shape))

    serve("CUDA", name, compute, "cuBLAS")


_serve_cublas("dense_mm", lambda x, w: (_rows(x), w.t()))
_serve_cublas("dense_mm_dgrad", lambda g, w: (_rows(g), w))
_serve_cublas("dense_mm_wgrad", lambda g, x: (_rows(g).t(), _rows(x)))
_serve_cublas("batched_mm", lambda x, w: (x, w.mT))
_serve_cublas("batched_mm_dgrad", lambda g, w: (g, w))
_serve_cublas("batched_mm_wgrad", lambda g, x: (g.mT, x))
