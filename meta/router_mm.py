"""What an FP32 router GEMM call means: argument rules, result shape and dtype, fakes.

Operands are FP32 or BF16 in any mix; products and sums have FP32 quality or better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import (
    check_router_float,
    check_size,
    check_tensor,
    require,
)
from .._problem import Problem, Shape, bfloat16_only, float32_only, float32_or_bfloat16


def router_mm(op: str, x: Tensor, w: Tensor) -> Shape:
    """x [T, H], w [N, H] -> [T, N] in FP32."""
    check_tensor(op, "x", x, "T H", x.device)
    check_tensor(op, "w", w, "N H", x.device)
    check_router_float(op, "x", x)
    check_router_float(op, "w", w)
    check_size(op, "w", w, 1, x.shape[1], "H = x.shape[1]")
    return (x.shape[0], w.shape[0])


def router_mm_dgrad(op: str, g: Tensor, w: Tensor) -> Shape:
    """g [T, N], w [N, H] -> [T, H]."""
    check_tensor(op, "g", g, "T N", g.device)
    check_tensor(op, "w", w, "N H", g.device)
    check_router_float(op, "g", g)
    check_router_float(op, "w", w)
    check_size(op, "w", w, 0, g.shape[1], "N = g.shape[1]")
    return (g.shape[0], w.shape[1])


def router_mm_wgrad(op: str, g: Tensor, x: Tensor) -> Shape:
    """g [T, N], x [T, H] -> [N, H]."""
    check_tensor(op, "g", g, "T N", g.device)
    check_tensor(op, "x", x, "T H", g.device)
    check_router_float(op, "g", g)
    check_router_float(op, "x", x)
    check_size(op, "x", x, 0, g.shape[0], "T = g.shape[0]")
    return (g.shape[1], x.shape[1])


def split_bf16x3(op: str, x: Tensor) -> Shape:
    """x (any shape) -> [3, *x.shape]."""
    require(
        x.dtype == torch.float32,
        lambda: f"cake::{op}: x must be float32, got {x.dtype}; cast it with .float()",
    )
    return (3, *x.shape)


Problem("router_mm", ("x", "w"), router_mm, float32_only)
Problem("router_mm_dgrad", ("g", "w"), router_mm_dgrad, float32_or_bfloat16)
Problem("router_mm_wgrad", ("g", "x"), router_mm_wgrad, float32_or_bfloat16)
Problem("split_bf16x3", ("x",), split_bf16x3, bfloat16_only)
