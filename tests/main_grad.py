"""What the tests of ``fuse_wgrad_accumulation`` share: modules with and without it, and Megatron's hook."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import reference
import torch
from forms import NAN
from torch import Tensor, nn

import cake_ops
from cake_ops.nn import GroupedLinear, RouterLinear

BF16, FP32 = torch.bfloat16, torch.float32
GROUPS, TAIL, N, K = [7, 0, 63, 9], 3, 40, 24
ROWS = sum(GROUPS) + TAIL
CPU = torch.device("cpu")
KINDS = ("router", "grouped")


class Case(NamedTuple):
    """A module that fuses, one with the same parameters that does not, and what else they are called with."""

    fused: nn.Module
    plain: nn.Module
    name: str  # of the forward operator
    offs: tuple[Tensor, ...]

    @property
    def weight(self) -> nn.Parameter:
        return self.fused.weight

    def batch(self, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        """x, and the gradient of the result. Rows of no group are NaN."""
        dtype = BF16 if self.name == "grouped_mm" else FP32
        x = torch.randn(rows, K, device=self.weight.device).to(self.weight.dtype)
        g = torch.randn(rows, N, device=self.weight.device).to(dtype)
        if self.offs:
            x[rows - TAIL :] = NAN
        return x.requires_grad_(), g

    def add(self, buffer: Tensor, g: Tensor, x: Tensor) -> None:
        """What the backward is to do, by the public operator."""
        getattr(cake_ops, f"{self.name}_wgrad_")(buffer, g, x.detach(), *self.offs)


def make(
    kind: str,
    device: torch.device = CPU,
    *,
    bias: bool = True,
    dtype: torch.dtype | None = None,
    main_dtype: torch.dtype = FP32,
) -> Case:
    factory = {"device": device, "dtype": dtype or (FP32 if kind == "router" else BF16)}
    if kind == "router":
        fused = RouterLinear(K, N, bias, fuse_wgrad_accumulation=True, **factory)
        offs: tuple[Tensor, ...] = ()
    else:
        fused = GroupedLinear(len(GROUPS), K, N, bias, fuse_wgrad_accumulation=True, **factory)
        offs = (reference.offsets(GROUPS, device),)
    plain = copy.deepcopy(fused)
    plain.fuse_wgrad_accumulation = False
    fused.weight.main_grad = torch.randn(fused.weight.shape, device=device).to(main_dtype)
    return Case(fused, plain, f"{kind}_mm", offs)


def with_megatron_hook(weight: nn.Parameter) -> list[Any]:
    """What Megatron-LM's DDP does with overlapped reductions. Returns the hook's node, which has to be
    kept alive, and then for each call the flag and ``weight.grad``."""
    weight.grad_added_to_main_grad = False
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    calls: list[Any] = [node]

    def hook(*unused: Any) -> None:
        assert weight.grad is not None  # what Megatron asserts
        calls.append((weight.grad_added_to_main_grad, weight.grad))
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    node.register_hook(hook)
    return calls
