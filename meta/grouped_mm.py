"""What a grouped GEMM call means: its argument rules, the shape and dtype of its result, and the fakes.

M rows lie in E consecutive groups; ``offs[e]`` is the end of group e. Rows at or past ``offs[-1]`` belong to
no group. No rule depends on the values of ``offs``.
"""

from __future__ import annotations

from torch import Tensor

from .._checks import (
    check_float,
    check_offs,
    check_same_dtype,
    check_size,
    check_tensor,
    require,
    shape_of,
    transpose_hint,
)
from .._problem import Problem, Shape, operand_dtype, operand_dtype_or_float32


def grouped_mm(op: str, x: Tensor, w: Tensor, offs: Tensor) -> Shape:
    """x [M, K], w [E, N, K], offs [E] -> [M, N]."""
    check_tensor(op, "x", x, "M K", x.device)
    check_tensor(op, "w", w, "E N K", x.device)
    check_float(op, "x", x)
    check_same_dtype(op, "x", x, "w", w)
    require(
        w.shape[2] == x.shape[1],
        lambda: (
            f"cake::{op}: w must have shape [E, N, K] with K = x.shape[1] = {x.shape[1]},"
            f" got {shape_of(w)}{transpose_hint('[E, K, N]', w.shape[1], x.shape[1])}"
        ),
    )
    check_offs(op, offs, w.shape[0], x.device)
    return (x.shape[0], w.shape[1])


def grouped_mm_dgrad(op: str, g: Tensor, w: Tensor, offs: Tensor) -> Shape:
    """g [M, N], w [E, N, K], offs [E] -> [M, K]."""
    check_tensor(op, "g", g, "M N", g.device)
    check_tensor(op, "w", w, "E N K", g.device)
    check_float(op, "g", g)
    check_same_dtype(op, "g", g, "w", w)
    check_size(op, "w", w, 1, g.shape[1], "N = g.shape[1]")
    check_offs(op, offs, w.shape[0], g.device)
    return (g.shape[0], w.shape[2])


def grouped_mm_wgrad(op: str, g: Tensor, x: Tensor, offs: Tensor) -> Shape:
    """g [M, N], x [M, K], offs [E] -> [E, N, K]."""
    check_tensor(op, "g", g, "M N", g.device)
    check_tensor(op, "x", x, "M K", g.device)
    check_float(op, "g", g)
    check_same_dtype(op, "g", g, "x", x)
    check_size(op, "x", x, 0, g.shape[0], "M = g.shape[0]")
    check_offs(op, offs, offs.shape[0] if offs.dim() else 0, g.device)
    return (offs.shape[0], g.shape[1], x.shape[1])


Problem("grouped_mm", ("x", "w", "offs"), grouped_mm, operand_dtype)
Problem("grouped_mm_dgrad", ("g", "w", "offs"), grouped_mm_dgrad, operand_dtype)
Problem("grouped_mm_wgrad", ("g", "x", "offs"), grouped_mm_wgrad, operand_dtype_or_float32)
