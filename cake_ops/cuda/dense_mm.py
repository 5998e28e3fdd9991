"""Dense and batched projection GEMM on CUDA: cuBLAS through torch, with FP32 results where asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from .._serve import serve
from ..cpu.dense_mm import OPERANDS, Operands


def _serve_cublas(name: str, operands: Operands) -> None:
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


for _name, _operands in OPERANDS.items():
    _serve_cublas(_name, _operands)
