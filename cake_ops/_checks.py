"""The rules for arguments, each stated once and used by the real operators and the fakes alike.

Every function either raises ``RuntimeError`` (the class torch's own operators raise) with one sentence
that names the operator, the argument, the value and the rule, or returns the problem's sizes. Sizes may
be symbolic: a comparison of unbacked sizes becomes a run-time assertion through ``torch._check`` and
never a branch. No function reads tensor data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROUTER_FLOATS = (torch.float32, torch.bfloat16)


def require(condition: Any, message: Callable[[], str]) -> None:
    """Raises ``RuntimeError(message())`` unless ``condition``, which may be symbolic, holds."""
    if condition is True:
        return
    if condition is False:
        raise RuntimeError(message())
    torch._check(condition, message)


def shape_of(t: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in t.shape) + "]"


def transpose_hint(stored: str, size: Any, wanted: Any) -> str:
    """What to add to a message about the weight ``w`` if its other dimension has the size wanted."""
    if type(size) is type(wanted) is int and size == wanted:  # symbolic sizes are not asked
        return f"; a weight stored as {stored} is passed as w.transpose(-2, -1)"
    return ""


def check_tensor(op: str, arg: str, t: Tensor, letters: str, device: torch.device) -> None:
    """``t`` has as many dimensions as ``letters`` (such as "E N K") and lies on ``device``."""
    dims = letters.split()
    require(
        t.dim() == len(dims),
        lambda: f"cake::{op}: {arg} must have shape [{', '.join(dims)}], got {shape_of(t)}",
    )
    check_device(op, arg, t, device)


def check_device(op: str, arg: str, t: Tensor, device: torch.device) -> None:
    require(
        t.device == device,
        lambda: (
            f"cake::{op}: all tensors must be on one device; {arg} is on {t.device},"
            f" the first argument on {device}"
        ),
    )


def check_size(op: str, arg: str, t: Tensor, dim: int, size: Any, rule: str) -> None:
    """Dimension ``dim`` of ``t`` equals ``size``; ``rule`` says where the size comes from."""
    require(
        t.shape[dim] == size,
        lambda: (
            f"cake::{op}: {arg} must have {rule} = {size} in dimension {dim}, got {shape_of(t)}"
        ),
    )


def check_float(op: str, arg: str, t: Tensor) -> None:
    """GEMM operands: BF16 on CUDA; BF16, FP16, FP32 or FP64 elsewhere."""
    if t.device.type == "cuda":
        require(
            t.dtype == torch.bfloat16,
            lambda: (
                f"cake::{op}: {arg} must be bfloat16 on CUDA, got {t.dtype}; cast it"
                " (x.bfloat16()) or call under torch.autocast('cuda', dtype=torch.bfloat16)"
            ),
        )
    require(
        t.dtype in FLOATS,
        lambda: (
            f"cake::{op}: {arg} must be bfloat16, float16, float32 or float64, got {t.dtype}; cast it"
        ),
    )


def check_same_dtype(op: str, a: str, s: Tensor, b: str, t: Tensor) -> None:
    require(
        s.dtype == t.dtype,
        lambda: (
            f"cake::{op}: {a} and {b} must have one dtype, got {s.dtype} and {t.dtype};"
            " cast one of them or call under torch.autocast"
        ),
    )


def check_router_float(op: str, arg: str, t: Tensor) -> None:
    require(
        t.dtype in ROUTER_FLOATS,
        lambda: (
            f"cake::{op}: {arg} must be float32 or bfloat16, got {t.dtype}; cast it with .float()"
        ),
    )


def check_out_dtype(op: str, out: Tensor, out_dtype: torch.dtype | None) -> None:
    """``out_dtype``, where it is given beside ``out``, is the dtype of ``out``."""
    require(
        out_dtype is None or out_dtype == out.dtype,
        lambda: f"cake::{op}: out_dtype {out_dtype} contradicts out, which is {out.dtype}",
    )


def check_offs(op: str, offs: Tensor, experts: Any, device: torch.device) -> None:
    """``offs`` is int32 with one cumulative end for each expert, on the operands' device."""
    require(
        offs.dtype == torch.int32,
        lambda: (
            f"cake::{op}: offs must be int32 (cumulative ends of the groups), got {offs.dtype};"
            " use torch.cumsum(counts, 0, dtype=torch.int32)"
        ),
    )
    require(
        offs.dim() == 1,
        lambda: f"cake::{op}: offs must have shape [E], got {shape_of(offs)}",
    )
    require(
        offs.shape[0] == experts,
        lambda: (
            f"cake::{op}: offs must have one end for each expert: w has E = {experts}, offs has"
            f" {offs.shape[0]} entries; pass a CSR indptr [E + 1] as its view indptr[1:]"
        ),
    )
    check_device(op, "offs", offs, device)


def check_offs_values(op: str, ends: list[int], rows: int) -> None:
    """The values of ``offs`` (read on the host) do not decrease and stay within [0, M]."""
    start = 0
    for e, end in enumerate(ends):
        if not start <= end <= rows:
            raise RuntimeError(
                f"cake::{op}: offs must satisfy 0 <= offs[0] <= .. <= offs[E-1] <= M = {rows};"
                f" group {e} ends at {end}, the group before it at {start}"
            )
        start = end


def check_out(op: str, out: Tensor, shape: Sequence[Any], dtypes: Sequence[torch.dtype]) -> None:
    """``out`` has the result's shape, one of ``dtypes``, and strides a kernel can write: row-major
    matrices (unit stride on the last dimension) that do not overlap. Their outer dimensions may be
    stored in any order, as those of a head view ``[T, L, N].permute(1, 0, 2)`` are."""
    require(
        out.dim() == len(shape),
        lambda: f"cake::{op}: out must have shape {list(shape)}, got {shape_of(out)}",
    )
    for have, want in zip(out.shape, shape, strict=True):
        require(
            have == want,
            lambda: f"cake::{op}: out must have shape {list(shape)}, got {shape_of(out)}",
        )
    require(
        out.dtype in dtypes,
        lambda: f"cake::{op}: out must be {' or '.join(str(d) for d in dtypes)}, got {out.dtype}",
    )
    if not all(map(_is_int, (*out.shape, *out.stride()))):
        return  # a trace with symbolic sizes leaves this rule to the real operator
    dims = [dim for dim in range(out.dim()) if out.shape[dim] > 1 and 0 not in out.shape]
    span = 1
    for dim in sorted(dims, key=lambda d: (d != out.dim() - 1, out.stride(d))):
        stride = out.stride(dim)
        require(
            stride == 1 if dim == out.dim() - 1 else stride >= span,
            lambda: (
                f"cake::{op}: out must be row-major without overlap (unit stride on the last"
                f" dimension), got strides {tuple(out.stride())} for shape {shape_of(out)}"
            ),
        )
        span = max(span, out.shape[dim] * stride)


def _is_int(n: Any) -> bool:
    return type(n) is int


def check_no_overlap(op: str, out: Tensor, **inputs: Tensor) -> None:
    """``out`` shares no memory with an input (decided by address ranges; real tensors only)."""
    first, last = _extent(out)
    for arg, t in inputs.items():
        begin, end = _extent(t)
        require(
            not (first < end and begin < last),
            lambda arg=arg: (
                f"cake::{op}: out must not share memory with the input {arg}; their address ranges"
                " overlap"
            ),
        )


def _extent(t: Tensor) -> tuple[int, int]:
    return (t.data_ptr(), t.data_ptr() + span(t) * t.element_size()) if t.numel() else (0, 0)


def span(t: Tensor) -> int:
    """How many elements lie between the first and the last of a tensor that has some, with both."""
    return sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
