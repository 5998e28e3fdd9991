"""Modules where people expect them: an expert layer and a gate.

Both keep torch's parameter names and layouts, so checkpoints, optimizers, FSDP and module filters that look
for ``nn.Linear`` work unchanged.

With ``fuse_wgrad_accumulation=True`` (the name is Transformer Engine's) the backward adds the weight gradient
to the buffer ``weight.main_grad``, by :func:`cake_ops.grouped_mm_wgrad_` or :func:`cake_ops.router_mm_wgrad_`.
No gradient is made, and none is read and added by another kernel.

Rules of fuse_wgrad_accumulation:
    * the owner of ``main_grad`` allocates it before the forward, in the weight's shape and row-major, and
      zeroes it: FP32 or BF16 for a gate, FP32 or the operands' dtype for experts, whatever the weight's
      dtype. The optimizer reads it. A backward adds to the buffer that the weight had in its forward.
    * ``weight.grad`` stays as it was, usually None. Tensor hooks on the weight run and are given None. Gradients
      of inputs and biases are as ever.
    * Megatron-LM's DDP: a weight with an attribute ``grad_added_to_main_grad`` gets True there, and for the
      hooks a placeholder as ``weight.grad``: without values, or zeros with ``weight.zero_out_wgrad``.
    * torch's DDP runs, gives the weight a zero ``grad`` and does not reduce ``main_grad``; that is for the user to
      do. FSDP2 exchanges the parameter for one without ``main_grad``, which raises; name the weight in
      ``ignored_params``. ``weight.overwrite_main_grad`` (Megatron-FSDP) raises.
    * several uses of a weight add one after another. A frozen weight, ``torch.no_grad()`` and
      ``backward(inputs=...)`` without the weight launch nothing and need no buffer; no rows add nothing.
    * checkpoints spare the same launches as without it. ``torch.compile`` fuses too, ``fullgraph=True`` included.
    * a gradient is made after all, and then added, by experts whose weight autocast casts, under compiled
      autograd, and under ``torch.compile`` with ``grad_added_to_main_grad``, which breaks the graph.
    * ``backward(create_graph=True)`` raises where it would add; ``torch.autograd.grad`` of the weight adds and
      returns None. Gradients of inputs can be differentiated again, as for a gradient penalty.
    * export it under ``torch.no_grad()``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ._main_grad import accumulating
from .grouped_mm import grouped_mm
from .router_mm import router_mm

__all__ = ["GroupedLinear", "RouterLinear"]


class GroupedLinear(nn.Module):
    """E linear layers, each applied to the rows of its group: ``y[m] = x[m] @ weight[e].T (+ bias[e])``.

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        bias: whether to learn a bias [E, N]. It is added to the rows of the groups; rows at or past
            ``offs[-1]`` stay zero.
        deterministic: see :func:`cake_ops.grouped_mm`.
        fuse_wgrad_accumulation: whether the weight gradient is added to ``weight.main_grad``; see the module.
        device, dtype: of the parameters; BF16 for the GPU kernels (FP32 parameters work under autocast).

    Shapes: x [M, K], offs [E] int32 cumulative ends -> y [M, N]. The weight is [E, N, K] and is
    initialised as E layers of ``nn.Linear``.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        deterministic: bool = True,
        fuse_wgrad_accumulation: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = (
            num_experts,
            in_features,
            out_features,
        )
        self.deterministic = deterministic
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight = nn.Parameter(
            torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(
                torch.empty(num_experts, out_features, device=device, dtype=dtype)
            )
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws each expert's weight and bias as ``nn.Linear`` does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        weight = accumulating(self) if self.fuse_wgrad_accumulation else self.weight
        y = grouped_mm(x, weight, offs, deterministic=self.deterministic)
        if self.bias is None:
            return y
        # A product with a column of ones: no row behind the last group gets a bias, and the bias
        # gradient is summed in FP32 (that of an indexed bias[expert] is summed in BF16: it stalls at 256).
        ones = y.new_ones(y.shape[0], 1)
        bias = self.bias.unsqueeze(-1)
        return y + grouped_mm(ones, bias, offs, deterministic=self.deterministic)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features},"
            f" out_features={self.out_features}, bias={self.bias is not None}"
        )


class RouterLinear(nn.Linear):
    """A MoE gate: ``nn.Linear`` whose product is :func:`cake_ops.router_mm`, so its logits are FP32.

    Input [.., H] in FP32 or BF16, weight [N, H] in FP32 or BF16; the result is FP32 [.., N]. It is an
    ``nn.Linear`` to module filters, and an existing one becomes a gate by
    ``RouterLinear.from_linear(module)``, sharing its parameters.

    Args:
        args, kwargs: those of ``nn.Linear``.
        deterministic: see :func:`cake_ops.router_mm`.
        fuse_wgrad_accumulation: whether the weight gradient is added to ``weight.main_grad``; see the module.
    """

    def __init__(
        self,
        *args: Any,
        deterministic: bool = True,
        fuse_wgrad_accumulation: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.deterministic = deterministic
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        deterministic: bool = True,
        fuse_wgrad_accumulation: bool = False,
    ) -> RouterLinear:
        """A gate that shares the parameters of ``linear``."""
        gate = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            deterministic=deterministic,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            device="meta",
        )
        gate.weight, gate.bias = linear.weight, linear.bias
        return gate.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        rows = input[None] if input.dim() == 1 else input.flatten(0, -2)
        weight = accumulating(self) if self.fuse_wgrad_accumulation else self.weight
        logits = router_mm(rows, weight, deterministic=self.deterministic)
        if self.bias is not None:
            logits = logits + self.bias.float()
        return logits if input.dim() == 2 else logits.view(*input.shape[:-1], self.out_features)
