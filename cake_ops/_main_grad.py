"""Weight gradients that are added straight into ``weight.main_grad`` and never exist on their own.

The conventions are those of Megatron-LM and Transformer Engine: ``main_grad`` is a buffer of the weight's
shape; a weight with the attribute ``grad_added_to_main_grad``, as Megatron's DDP sets it, gets True there,
and a placeholder as its gradient, for the sake of the hooks that wait for one. Other weights get no gradient.

The weight reaches its product through a node of its own, :class:`_MainGrad`. A product that finds this node
behind its operand adds to the buffer and hands on no gradient. Whatever stands between the two, such as
the cast of autocast, or a compiler that takes the product apart, leaves the product to make a gradient as
usual, and the node adds it. So the sum is the same everywhere, and fused wherever it can be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import LIB

ADVICE = "allocate it before the forward: weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"


class _MainGrad(torch.autograd.Function):
    """The identity of a weight, whose gradient goes to the buffer."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        # Not saved: other backwards may add to the buffer before this one, and it stays where it is.
        ctx.weight, ctx.main_grad = weight, main_grad
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        if g is not None:
            _refuse_graph()
            ctx.main_grad.add_(g)
        return _placeholder(ctx.weight), None


def main_grad_of(node: Any) -> Tensor | None:
    """The buffer for the gradient that is about to be made for ``node``, if it has one."""
    if not isinstance(node, _MainGrad._backward_cls):
        return None
    _refuse_graph()
    return node.main_grad


def _refuse_graph() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fuse_wgrad_accumulation: a weight gradient that is added to main_grad cannot be differentiated"
            " again; call backward without create_graph=True, or leave fuse_wgrad_accumulation off"
        )


def _placeholder(weight: Tensor) -> Tensor | None:
    """What the hooks of Megatron find in ``weight.grad``. They add it if ``zero_out_wgrad`` is set, and
    else drop it unread."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def accumulating(module: torch.nn.Module) -> Tensor:
    """The weight of ``module``, with a gradient that is added to ``weight.main_grad``."""
    weight = module.weight
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    where = f"cake_ops.nn.{type(module).__name__}: fuse_wgrad_accumulation"
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            f"{where} needs weight.main_grad, which weight {list(weight.shape)} does not have; {ADVICE}"
        )
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise RuntimeError(
            f"{where} needs weight.main_grad of the weight's shape and device, {list(weight.shape)} on"
            f" {weight.device}, got {list(main_grad.shape)} on {main_grad.device}"
        )
    if getattr(weight, "overwrite_main_grad", False):
        raise RuntimeError(
            f"{where} adds to weight.main_grad, but weight.overwrite_main_grad asks to overwrite it"
        )
    if not torch.compiler.is_compiling():
        return _MainGrad.apply(weight, main_grad)
    if hasattr(weight, "grad_added_to_main_grad"):
        torch._dynamo.graph_break(
            f"{where}: a compiled backward cannot set weight.grad_added_to_main_grad; exclude the module"
            " with torch.compiler.disable"
        )
        return _apply_in_eager(weight, main_grad)
    return torch.ops.cake.with_main_grad(weight, main_grad)


@torch._disable_dynamo  # as torch.compiler.disable, which would import the compiler here
def _apply_in_eager(weight: Tensor, main_grad: Tensor) -> Tensor:
    return _MainGrad.apply(weight, main_grad)


# For compiled graphs: the compiler would look into the function and put the node out of the product's sight, but it
# keeps an operator whole until autograd has seen it. It computes nothing, hence is none of ``OPS``.
LIB.define("with_main_grad(Tensor weight, Tensor main_grad) -> Tensor")
LIB.impl("with_main_grad", _MainGrad.apply, "CompositeImplicitAutograd")
