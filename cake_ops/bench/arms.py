"""The arms of a row: what each library is asked to do, with equal work for all.

A library offers the three passes of the grouped GEMM as plain functions and, where it has one, a
differentiable grouped_mm; from these `build` makes one call of an operation. Every call allocates
its own outputs. Where a library cannot do exactly the same, `remark` says what it does instead, and the
report prints that under the table.

cake      cake_ops.grouped_mm and its passes
control   the same calls once more: its ratio to cake is the noise of the measurement
inforward cake's passes in an ordinary autograd.Function, which launches in its forward and saves
          after; a checkpoint with early stop cannot skip that launch
torch     torch._grouped_mm
cublas    one torch.mm for each group, the sizes known on the host in advance, into slices of one
          output; under autograd in the same ordinary Function
deepgemm  DeepGEMM's contiguous kernels (package sgl-deep-gemm), which need groups in multiples of
          128 rows
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cake_ops

from .accuracy import Data
from .shapes import Case

__all__ = ["ARMS", "Arm", "Unavailable", "build", "eligible", "remark", "rounded"]

ARMS = ("cake", "control", "inforward", "torch", "cublas", "deepgemm")

CHECKPOINTED = ("ckpt", "ckpt ES", "block", "block ES")

Arm = Callable[[], dict[str, Tensor]]


class Unavailable(RuntimeError):
    """This arm cannot run here; the message says why."""


@dataclass(frozen=True)
class Library:
    fwd: Callable[[Tensor, Tensor], Tensor]
    dgrad: Callable[[Tensor, Tensor], Tensor]
    wgrad: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    grouped_mm: Callable[[Tensor, Tensor], Tensor] | None = None  # differentiable


class _InForward(torch.autograd.Function):
    """A library's passes in the usual form: launch in forward, save, launch twice in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, library: Library) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.library = library
        return library.fwd(x, w)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return ctx.library.dgrad(g, w), ctx.library.wgrad(g, x, w.dtype), None


def _cake(offs: Tensor) -> Library:
    return Library(
        fwd=lambda x, w: cake_ops.grouped_mm(x, w, offs),
        dgrad=lambda g, w: cake_ops.grouped_mm_dgrad(g, w, offs),
        wgrad=lambda g, x, dtype: cake_ops.grouped_mm_wgrad(g, x, offs, out_dtype=dtype),
        grouped_mm=lambda x, w: cake_ops.grouped_mm(x, w, offs),
    )


def _torch(offs: Tensor) -> Library:
    mm = torch._grouped_mm
    return Library(
        fwd=lambda x, w: mm(x, w.transpose(-2, -1), offs=offs),
        dgrad=lambda g, w: mm(g, w, offs=offs),
        wgrad=lambda g, x, dtype: mm(g.t(), x, offs=offs).to(dtype),
        grouped_mm=lambda x, w: mm(x, w.transpose(-2, -1), offs=offs),
    )


def _cublas(sizes: tuple[int, ...]) -> Library:
    ends = torch.tensor((0, *sizes)).cumsum(0).tolist()
    groups = [(e, slice(ends[e], ends[e + 1])) for e in range(len(sizes))]

    def fwd(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], w.shape[1])
        for e, rows in groups:
            torch.mm(x[rows], w[e].t(), out=y[rows])
        return y

    def dgrad(g: Tensor, w: Tensor) -> Tensor:
        dx = g.new_empty(g.shape[0], w.shape[2])
        for e, rows in groups:
            torch.mm(g[rows], w[e], out=dx[rows])
        return dx

    def wgrad(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        dw = x.new_empty(len(sizes), g.shape[1], x.shape[1], dtype=dtype)
        for e, rows in groups:
            if sizes[e] == 0:
                dw[e].zero_()
            elif dtype == x.dtype:
                torch.mm(g[rows].t(), x[rows], out=dw[e])
            elif x.is_cuda:
                torch.mm(g[rows].t(), x[rows], out_dtype=dtype, out=dw[e])
            else:
                torch.mm(g[rows].t().to(dtype), x[rows].to(dtype), out=dw[e])
        return dw

    return Library(fwd, dgrad, wgrad)


def _deepgemm(sizes: tuple[int, ...], offs: Tensor) -> Library:
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except Exception as error:  # its import builds and loads native code: anything may be raised
        raise Unavailable(f"deep_gemm cannot be imported: {error}") from error
    device = offs.device
    sizes_device = torch.tensor(sizes, dtype=torch.int32, device=device)
    group_of_row = torch.repeat_interleave(
        torch.arange(len(sizes), dtype=torch.int32, device=device), sizes_device
    )

    def fwd(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], w.shape[1])
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, w, y, group_of_row)
        return y

    def dgrad(g: Tensor, w: Tensor) -> Tensor:
        dx = g.new_empty(g.shape[0], w.shape[2])
        deep_gemm.m_grouped_bf16_gemm_nn_contiguous(g, w, dx, group_of_row)
        return dx

    def wgrad(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        dw = x.new_zeros(len(sizes), g.shape[1], x.shape[1], dtype=dtype)
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(g, x, dw, list(sizes), sizes_device, dw)
        return dw

    return Library(fwd, dgrad, wgrad)


def eligible(arm: str, case: Case, op: str, device: torch.device) -> bool:
    """Whether an arm belongs in a row at all; whether it runs is found out by calling it."""
    if arm == "inforward":
        return op in CHECKPOINTED
    if arm == "deepgemm":
        aligned = all(size % 128 == 0 for size in case.sizes)
        return device.type == "cuda" and aligned and op in ("fwd", "dgrad", "dW fp32")
    return True


def remark(arm: str, op: str) -> str | None:
    """What an arm does instead of the row's exact work."""
    if op == "dW fp32" and arm == "torch":
        return "has no FP32 dW: its BF16 dW followed by .to(torch.float32), hence its error"
    if op == "dW fp32" and arm == "deepgemm":
        return "has only an accumulating dW: a zero fill, then its FP32 += kernel"
    if op in CHECKPOINTED and arm == "cublas":
        return "the loop is in an autograd.Function's forward, so early stop cannot skip it"
    return None


def rounded(arm: str, op: str) -> bool:
    """Whether an FP32 output has been rounded to BF16 on the way."""
    return op == "dW fp32" and arm == "torch"


def build(arm: str, op: str, data: Data) -> Arm:
    """One call of an operation by an arm: a function of no arguments that returns its outputs."""
    sizes = data.case.sizes
    if arm in ("cake", "control", "inforward"):
        library = _cake(data.offs)
    elif arm == "torch":
        library = _torch(data.offs)
    elif arm == "cublas":
        library = _cublas(sizes)
    else:
        library = _deepgemm(sizes, data.offs)
    x, w, g = data.x, data.w, data.g
    if op == "fwd":
        return lambda: {"y": library.fwd(x, w)}
    if op == "dgrad":
        return lambda: {"dx": library.dgrad(g, w)}
    if op in ("dW", "dW fp32"):
        dtype = torch.float32 if op == "dW fp32" else torch.bfloat16
        return lambda: {"dw": library.wgrad(g, x, dtype)}

    mm = None if arm == "inforward" else library.grouped_mm
    if mm is None:

        def mm(x: Tensor, w: Tensor) -> Tensor:
            return _InForward.apply(x, w, library)

    def block(x: Tensor, w: Tensor, w_down: Tensor) -> Tensor:
        a, b = mm(x, w).chunk(2, dim=-1)
        return mm(F.silu(a) * b, w_down)

    if op in ("ckpt", "ckpt ES"):
        return _checkpointed(mm, {"dx": x, "dw": w}, g, early_stop=op == "ckpt ES")
    assert data.w_down is not None
    inputs = {"dx": x, "dw": w, "dw_down": data.w_down}
    return _checkpointed(block, inputs, g, early_stop=op == "block ES")


def _checkpointed(
    region: Callable[..., Tensor], inputs: dict[str, Tensor], g: Tensor, *, early_stop: bool
) -> Arm:
    """Forward and backward of a checkpointed region: y and the gradients, named as in inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs.values()]

    def call() -> dict[str, Tensor]:
        y = checkpoint(
            region,
            *leaves,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing random inside, and a capture could not read it
            early_stop=early_stop,
        )
        gradients = torch.autograd.grad(y, leaves, g)
        return {"y": y.detach(), **dict(zip(inputs, gradients, strict=True))}

    return call
