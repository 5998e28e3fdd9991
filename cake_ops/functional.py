"""A drop-in for ``torch.nn.functional.grouped_mm``: the same signature, forms and operand layout.

``from cake_ops.functional import grouped_mm`` is meant to replace torch's import and nothing else. Beyond
torch's: any size and stride, rows past ``offs[-1]`` are zero, an FP32 ``out_dtype`` where the ragged
dimension is contracted, defined gradients for expanded incoming gradients, double backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import require, transpose_hint
from ._eager import eager
from .dense_mm import batched_mm
from .grouped_mm import grouped_mm_wgrad

__all__ = ["grouped_mm"]

_fwd = eager("grouped_mm")
_FORMS = {  # dimensions of mat_a and mat_b -> their shapes
    (2, 3): ("[M, K]", "[E, K, N]"),
    (2, 2): ("[N, M]", "[M, K]"),
    (3, 2): ("[E, N, K]", "[K, M]"),
    (3, 3): ("[E, M, K]", "[E, K, N]"),
}


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Grouped GEMM with torch's operand layout; ``offs`` [E] int32 holds cumulative ends.

    =============  =============  ==========================  ============
    mat_a          mat_b          offs along                  result
    =============  =============  ==========================  ============
    [M, K]         [E, K, N]      the rows of mat_a           [M, N]
    [N, M]         [M, K]         the contraction             [E, N, K]
    [E, N, K]      [K, M]         the columns of mat_b        [N, M]
    [E, M, K]      [E, K, N]      must be None (a batch)      [E, M, N]
    =============  =============  ==========================  ============

    Args:
        mat_a, mat_b: one dtype, any strides; BF16 on CUDA. ``w.transpose(-2, -1)`` of a weight
            [E, N, K] is the usual mat_b and is read in place.
        bias: not supported, as in torch.
        out_dtype: the operands' dtype; FP32 also where the result is [E, ., .].

    Returns:
        The product, row-major except for the third form, whose result is stored column-major.
        Differentiable in both operands; in the ragged forms the gradient of a 3-D operand (the weights)
        has its operand's memory order.
    """
    if bias is not None:
        raise RuntimeError(
            "cake_ops.functional.grouped_mm: bias is not supported; add it to the result"
        )
    forms = (mat_a.dim(), mat_b.dim())
    if forms not in _FORMS:
        raise RuntimeError(
            "cake_ops.functional.grouped_mm: mat_a and mat_b must have 2 or 3 dimensions, got"
            f" {list(mat_a.shape)} and {list(mat_b.shape)}"
        )
    if (offs is None) != (forms == (3, 3)):
        raise RuntimeError(
            "cake_ops.functional.grouped_mm: offs is needed unless both operands have 3 dimensions,"
            f" got offs = {'None' if offs is None else list(offs.shape)} with mat_a"
            f" {list(mat_a.shape)} and mat_b {list(mat_b.shape)}"
        )
    _check_contraction(mat_a, mat_b)
    if forms == (3, 3):
        return batched_mm(mat_a, mat_b.transpose(-2, -1), out_dtype=out_dtype)
    if forms == (2, 2):
        return grouped_mm_wgrad(mat_a.t(), mat_b, offs, out_dtype=out_dtype)
    if out_dtype not in (None, mat_a.dtype):
        raise RuntimeError(
            "cake_ops.functional.grouped_mm: out_dtype must be that of the operands"
            f" ({mat_a.dtype}) where the ragged dimension is not contracted, got {out_dtype}"
        )
    if forms == (2, 3):
        return _fwd(mat_a, mat_b.transpose(-2, -1), offs)
    return _fwd(mat_b.t(), mat_a, offs).t()


def _check_contraction(mat_a: Tensor, mat_b: Tensor) -> None:
    k, b_k = mat_a.shape[-1], mat_b.shape[-2]
    form_a, form_b = _FORMS[mat_a.dim(), mat_b.dim()]
    hint = transpose_hint("[E, N, K]", mat_b.shape[-1], k) if mat_b.dim() == 3 else ""
    require(
        k == b_k,
        lambda: (
            f"cake_ops.functional.grouped_mm: mat_b must have {form_a[-2]} = mat_a.shape[-1] = {k} in"
            f" dimension -2 (mat_a {form_a}, mat_b {form_b}), got {list(mat_b.shape)}{hint}"
        ),
    )
