"""What a dense or batched projection GEMM call means: argument rules, result shape and dtype, fakes."""

from __future__ import annotations

from torch import Tensor

from .._checks import (
    check_device,
    check_float,
    check_same_dtype,
    check_size,
    check_tensor,
    require,
    shape_of,
)
from .._problem import Problem, Shape, operand_dtype_or_float32


def dense_mm(op: str, x: Tensor, w: Tensor) -> Shape:
    """x [.., K], w [N, K] -> [.., N]."""
    require(x.dim() >= 1, lambda: f"cake::{op}: x must have shape [.., K], got a scalar")
    check_tensor(op, "w", w, "N K", x.device)
    check_float(op, "x", x)
    check_same_dtype(op, "x", x, "w", w)
    check_size(op, "w", w, 1, x.shape[-1], "K = x.shape[-1]")
    return (*x.shape[:-1], w.shape[0])


def dense_mm_dgrad(op: str, g: Tensor, w: Tensor) -> Shape:
    """g [.., N], w [N, K] -> [.., K]."""
    require(g.dim() >= 1, lambda: f"cake::{op}: g must have shape [.., N], got a scalar")
    check_tensor(op, "w", w, "N K", g.device)
    check_float(op, "g", g)
    check_same_dtype(op, "g", g, "w", w)
    check_size(op, "w", w, 0, g.shape[-1], "N = g.shape[-1]")
    return (*g.shape[:-1], w.shape[1])


def dense_mm_wgrad(op: str, g: Tensor, x: Tensor) -> Shape:
    """g [.., N], x [.., K] with equal leading dimensions -> [N, K]."""
    require(
        g.dim() >= 1 and g.dim() == x.dim(),
        lambda: (
            f"cake::{op}: g [.., N] and x [.., K] must have the same number of dimensions, one at"
            f" least, got {shape_of(g)} and {shape_of(x)}"
        ),
    )
    check_device(op, "x", x, g.device)
    check_float(op, "g", g)
    check_same_dtype(op, "g", g, "x", x)
    for dim in range(g.dim() - 1):
        check_size(op, "x", x, dim, g.shape[dim], f"g.shape[{dim}]")
    return (g.shape[-1], x.shape[-1])


def batched_mm(op: str, x: Tensor, w: Tensor) -> Shape:
    """x [L, M, K], w [L, N, K] -> [L, M, N]."""
    check_tensor(op, "x", x, "L M K", x.device)
    check_tensor(op, "w", w, "L N K", x.device)
    check_float(op, "x", x)
    check_same_dtype(op, "x", x, "w", w)
    check_size(op, "w", w, 0, x.shape[0], "L = x.shape[0]")
    check_size(op, "w", w, 2, x.shape[2], "K = x.shape[2]")
    return (x.shape[0], x.shape[1], w.shape[1])


def batched_mm_dgrad(op: str, g: Tensor, w: Tensor) -> Shape:
    """g [L, M, N], w [L, N, K] -> [L, M, K]."""
    check_tensor(op, "g", g, "L M N", g.device)
    check_tensor(op, "w", w, "L N K", g.device)
    check_float(op, "g", g)
    check_same_dtype(op, "g", g, "w", w)
    check_size(op, "w", w, 0, g.shape[0], "L = g.shape[0]")
    check_size(op, "w", w, 1, g.shape[2], "N = g.shape[2]")
    return (g.shape[0], g.shape[1], w.shape[2])


def batched_mm_wgrad(op: str, g: Tensor, x: Tensor) -> Shape:
    """g [L, M, N], x [L, M, K] -> [L, N, K]."""
    check_tensor(op, "g", g, "L M N", g.device)
    check_tensor(op, "x", x, "L M K", g.device)
    check_float(op, "g", g)
    check_same_dtype(op, "g", g, "x", x)
    check_size(op, "x", x, 0, g.shape[0], "L = g.shape[0]")
    check_size(op, "x", x, 1, g.shape[1], "M = g.shape[1]")
    return (g.shape[0], g.shape[2], x.shape[2])


Problem("dense_mm", ("x", "w"), dense_mm, operand_dtype_or_float32)
Problem("dense_mm_dgrad", ("g", "w"), dense_mm_dgrad, operand_dtype_or_float32)
Problem("dense_mm_wgrad", ("g", "x"), dense_mm_wgrad, operand_dtype_or_float32)
Problem("batched_mm", ("x", "w"), batched_mm, operand_dtype_or_float32)
Problem("batched_mm_dgrad", ("g", "w"), batched_mm_dgrad, operand_dtype_or_float32)
Problem("batched_mm_wgrad", ("g", "x"), batched_mm_wgrad, operand_dtype_or_float32)
