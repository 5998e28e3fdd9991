"""FP32 router GEMM on the CPU: products and sums in FP64, rounded once.

FP64 keeps the result out of reach of every precision switch of torch (those change FP32 products), and
its rounding error is so far below FP32's that a row's logits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._serve import serve

HOW = "FP64 products, rounded once"


def router_mm(op: str, y: Tensor, accumulate: bool, x: Tensor, w: Tensor) -> None:
    y.copy_(torch.mm(x.double(), w.double().t()))


def router_mm_dgrad(op: str, dx: Tensor, accumulate: bool, g: Tensor, w: Tensor) -> None:
    dx.copy_(torch.mm(g.double(), w.double()))


def router_mm_wgrad(op: str, dw: Tensor, accumulate: bool, g: Tensor, x: Tensor) -> None:
    product = torch.mm(g.double().t(), x.double())
    dw.copy_(product.add_(dw) if accumulate else product)


def split_bf16x3(op: str, parts: Tensor, accumulate: bool, x: Tensor) -> None:
    """Each part is the rounded rest of the ones before it.

    The first part is rounded toward zero where rounding to nearest would overflow. Inf and NaN stand in
    the first part alone.
    """
    finite = x.isfinite()
    rest = x
    for part in parts.unbind(0):
        rounded = rest.bfloat16()
        toward_zero = (rest.view(torch.int32) & -65536).view(torch.float32).bfloat16()
        part.copy_(torch.where(rounded.isinf() & finite, toward_zero, rounded))
        rest = torch.where(finite, rest - part.float(), 0.0)


serve("CPU", "router_mm", router_mm, HOW)
serve("CPU", "router_mm_dgrad", router_mm_dgrad, HOW)
serve("CPU", "router_mm_wgrad", router_mm_wgrad, HOW)
serve("CPU", "split_bf16x3", split_bf16x3, "bit operations")
