"""The Triton kernels of :mod:`cake_ops.integrations.expert_rows`: one pass over memory for each step.

Between their GEMMs the experts only move rows, so bytes are the cost. A program makes one row of one
result: it reads each operand once, computes in FP32 and rounds once. Nothing is added atomically, so the
results are bitwise the same from run to run. Operands are row-major.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gated_silu", "gated_silu_backward", "sum_rows"]

BLOCK = 1024  # columns at a time: with the 128 threads of a program, one 16-byte load of BF16 each


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


@triton.jit
def _gated_silu(y, weight, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(weight + row).to(tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        gate = tl.load(y + row * 2 * columns + column, inside, 0.0).to(tl.float32)
        up = tl.load(y + row * 2 * columns + columns + column, inside, 0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * factor
        tl.store(out + row * columns + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def _gated_silu_backward(g, y, weight, dy, dweight, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(weight + row).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        there = row * 2 * columns + column
        gate = tl.load(y + there, inside, 0.0).to(tl.float32)
        up = tl.load(y + there + columns, inside, 0.0).to(tl.float32)
        grad = tl.load(g + row * columns + column, inside, 0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        total += grad * gate * sigmoid * up
        grad *= factor
        dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(dy + there, dgate.to(dy.dtype.element_ty), inside)
        tl.store(dy + there + columns, (grad * gate * sigmoid).to(dy.dtype.element_ty), inside)
    tl.store(dweight + row, tl.sum(total, 0).to(dweight.dtype.element_ty))


@triton.jit
def _sum_rows(rows, inverse, out, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(TOP_K):  # unrolled, so that the loads are in flight together
            row = tl.load(inverse + token * TOP_K + i)
            total += tl.load(rows + row * columns + column, inside, 0.0).to(tl.float32)
        tl.store(out + token * columns + column, total.to(out.dtype.element_ty), inside)


def gated_silu(y: Tensor, weight: Tensor) -> Tensor:
    """y [R, 2 I], weight [R, 1] -> [R, I]."""
    r, columns = y.shape[0], y.shape[1] // 2
    out = y.new_empty(r, columns)
    if out.numel():
        with torch.cuda.device_of(y):
            _gated_silu[(r,)](y.contiguous(), weight.contiguous(), out, columns, _block(columns))
    return out


def gated_silu_backward(g: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """g [R, I], y [R, 2 I], weight [R, 1] -> gradients of y and weight."""
    r, columns = g.shape
    dy, dweight = y.new_empty(y.shape), weight.new_empty(weight.shape)
    if g.numel():
        with torch.cuda.device_of(y):
            _gated_silu_backward[(r,)](
                g.contiguous(),
                y.contiguous(),
                weight.contiguous(),
                dy,
                dweight,
                columns,
                _block(columns),
            )
    return dy, dweight


def sum_rows(rows: Tensor, inverse: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """rows [T * top_k, D] -> [T, D], the sum over each token's rows ``inverse[t * top_k + i]``."""
    tokens, columns = len(inverse) // top_k, rows.shape[1]
    out = rows.new_empty(tokens, columns, dtype=dtype)
    if out.numel():
        with torch.cuda.device_of(rows):
            _sum_rows[(tokens,)](
                rows.contiguous(), inverse.contiguous(), out, columns, top_k, _block(columns)
            )
    return out
