"""The layers of the kernel repository: a forward each, for a module that holds the weights."""

from __future__ import annotations

from torch import Tensor, nn

from ...grouped_mm import grouped_mm
from ..transformers import experts_forward

__all__ = ["Experts", "GroupedLinear"]


class GroupedLinear(nn.Module):
    """For a module with ``weight`` [E, N, K] and, if it likes, ``bias`` [E, N].

    x [M, K], offs [E] int32 cumulative ends -> [M, N]; see :class:`cake_ops.nn.GroupedLinear`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        y = grouped_mm(x, self.weight, offs)
        bias = getattr(self, "bias", None)
        if bias is None:
            return y
        return y + grouped_mm(y.new_ones(len(y), 1), bias.unsqueeze(-1), offs)


class Experts(nn.Module):
    """For the experts modules of transformers; see
    :func:`cake_ops.integrations.transformers.experts_forward`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
