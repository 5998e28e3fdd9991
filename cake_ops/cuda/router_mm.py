"""FP32 router GEMM on CUDA: FP64 products through torch, until it has kernels of its own.

FP64 meets every rule of the operator (precision switches, finite range, repeatable routing). It reads each
operand once more than a kernel would.
"""

from __future__ import annotations

from .._serve import serve
from ..cpu import router_mm as double

HOW = "FP64 products, rounded once"

serve("CUDA", "router_mm", double.router_mm, HOW)
serve("CUDA", "router_mm_dgrad", double.router_mm_dgrad, HOW)
serve("CUDA", "router_mm_wgrad", double.router_mm_wgrad, HOW)
serve("CUDA", "split_bf16x3", double.split_bf16x3, "bit operations")
