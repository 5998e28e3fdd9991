"""Modules where people expect them: an expert layer and a gate.

Both keep torch's parameter names and layouts, so checkpoints, optimizers, FSDP and module filters that look
for ``nn.Linear`` work unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

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
        y = grouped_mm(x, self.weight, offs, deterministic=self.deterministic)
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
    """

    deterministic: bool = True

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> RouterLinear:
        """A gate that shares the parameters of ``linear``."""
        gate = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        gate.weight, gate.bias = linear.weight, linear.bias
        return gate.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        rows = input[None] if input.dim() == 1 else input.flatten(0, -2)
        logits = router_mm(rows, self.weight, deterministic=self.deterministic)
        if self.bias is not None:
            logits = logits + self.bias.float()
        return logits if input.dim() == 2 else logits.view(*input.shape[:-1], self.out_features)
