"""Dense and batched projection GEMM on the CPU, in FP32 (FP64 for FP64 operands).

``OPERANDS`` says for each operator which two matrices, or batches of them, are multiplied; the CUDA backend
multiplies the same ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._serve import serve

Operands = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _rows(t: Tensor) -> Tensor:
    """[.., C] as [M, C]; also when C or a leading dimension is zero."""
    return t.reshape(t.shape[:-1].numel(), t.shape[-1])


OPERANDS: dict[str, Operands] = {
    "dense_mm": lambda x, w: (_rows(x), w.t()),
    "dense_mm_dgrad": lambda g, w: (_rows(g), w),
    "dense_mm_wgrad": lambda g, x: (_rows(g).t(), _rows(x)),
    "batched_mm": lambda x, w: (x, w.mT),
    "batched_mm_dgrad": lambda g, w: (g, w),
    "batched_mm_wgrad": lambda g, x: (g.mT, x),
}


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _serve(name: str, operands: Operands) -> None:
    def compute(op: str, out: Tensor, accumulate: bool, a: Tensor, b: Tensor) -> None:
        a, b = map(_wide, operands(a, b))
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        out.copy_(multiply(a, b).view(out.shape))

    serve("CPU", name, compute, "one FP32 product")


for _name, _operands in OPERANDS.items():
    _serve(_name, _operands)
