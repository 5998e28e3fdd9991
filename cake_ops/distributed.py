"""Expert parallelism: each rank of a group holds an equal share of the experts, and tokens travel to them.

Two differentiable functions go around the experts, with any number of ranks and uneven routing::

    rows, offs, state = dispatch(x, expert_ids, weights, num_experts, group)
    y = combine(down(silu(up(rows, offs)), offs), state)     # cake_ops.nn.GroupedLinear of local experts

``dispatch`` sends one copy of a token to each of its k experts and lays what arrives out as
:func:`cake_ops.grouped_mm` wants it: by local expert, with ``offs`` on the device. ``combine`` sends the
results back and adds each token's k rows with its weights, which never travel.

Rules of both:
    * every rank of the group takes part in each call and in its backward, with or without tokens of its
      own or for its experts: it then has zero rows, and its weights get gradients that are zeros. x has
      to require a gradient on all ranks or on none.
    * one host sync in ``dispatch``: the split sizes of an uneven ``all_to_all_single`` are host integers.
      A pair of calls is three collectives forward (counts, rows, results) and two backward.
    * deterministic, forward and backward: rows of an expert are ordered by source rank, then token; all
      moves are gathers, and nothing is added in arrival order.
    * gradients of the local experts are those of the SUM of the ranks' losses, as their rows come from
      all ranks. Data-parallel parameters hold the MEAN, so divide the experts' by the group's size.

The collectives are torch's functional ones: they are differentiable, and selective checkpointing can save
``torch.ops._c10d_functional.all_to_all_single.default`` instead of sending again.

The layout (permute, all-to-all, permute, and back) is that of Megatron-LM's token dispatcher (Shoeybi et
al., 2019, and its MoE successors), with tokens never dropped or padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ._checks import require, shape_of

__all__ = ["Dispatched", "combine", "dispatch", "local_experts"]


@dataclass(frozen=True)
class Dispatched:
    """What :func:`combine` needs to undo a :func:`dispatch`. T tokens, k experts each, R received rows."""

    group: dist.ProcessGroup
    send: list[int]  # rows for each rank; their sum is T * k
    receive: list[int]  # rows from each rank; their sum is R
    by_expert: Tensor  # [T * k], of each sent row the copy t * k + i (of token t) that it is
    by_expert_inverse: Tensor
    local: Tensor  # [R], of each of rows its place in what was received
    local_inverse: Tensor
    weights: Tensor  # [T, k]


def local_experts(num_experts: int, group: dist.ProcessGroup | None = None) -> range:
    """The experts that this rank of ``group`` holds: an equal share, in order of rank."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    require(
        num_experts > 0 and num_experts % size == 0,
        lambda: (
            f"local_experts: num_experts must be a positive multiple of the group's size {size},"
            f" got {num_experts}"
        ),
    )
    share = num_experts // size
    return range(rank * share, (rank + 1) * share)


def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Dispatched]:
    """Sends every token to the ranks that hold its experts.

    Args:
        x: [T, K] tokens of this rank; T may be zero and differ between ranks, K and the dtype may not.
        expert_ids: [T, k] integers in [0, num_experts), the experts of each token; k >= 1 is the same on
            all ranks. An id outside raises ``RuntimeError`` on every rank of the group.
        weights: [T, k] floating, the share of each expert's result; used by :func:`combine`.
        num_experts: of all ranks, a multiple of the group's size.
        group: a process group; the default one if None.

    Returns:
        rows [R, K], the tokens for the local experts, grouped by expert; R may be zero.
        offs [num_experts / ranks], int32 cumulative ends of the groups, on x's device; offs[-1] == R.
        state, for :func:`combine`.

    Differentiable in x, and in weights through :func:`combine`.
    """
    group = dist.group.WORLD if group is None else group
    share = len(local_experts(num_experts, group))
    require(
        x.dim() == 2,
        lambda: f"dispatch: x must have shape [T, K], got {shape_of(x)}",
    )
    require(
        expert_ids.dim() == 2 and expert_ids.shape[0] == x.shape[0] and expert_ids.shape[1] > 0,
        lambda: (
            f"dispatch: expert_ids must have shape [T, k] with T = {x.shape[0]} and k >= 1,"
            f" got {shape_of(expert_ids)}"
        ),
    )
    require(
        not (expert_ids.is_floating_point() or expert_ids.dtype == torch.bool),
        lambda: f"dispatch: expert_ids must be integers, got {expert_ids.dtype}",
    )
    require(
        weights.shape == expert_ids.shape,
        lambda: (
            f"dispatch: weights must have the shape of expert_ids, {shape_of(expert_ids)},"
            f" got {shape_of(weights)}"
        ),
    )
    ids, by_expert = expert_ids.detach().flatten().sort(stable=True)
    by_expert_inverse = _inverse(by_expert)

    # A count for each expert, and one of the ids outside, which every rank tells every other.
    bounds = torch.searchsorted(ids.long(), torch.arange(num_experts + 1, device=ids.device))
    counts = bounds.diff().view(-1, share)
    outside = (ids.numel() - counts.sum()).expand(counts.shape[0], 1)
    counts = torch.cat([counts, outside], 1)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    received, outside = received.split([share, 1], 1)
    send, receive, invalid = torch.stack(  # the host sync
        [counts[:, :share].sum(1), received.sum(1), outside[:, 0]]
    ).tolist()
    require(
        not any(invalid),
        lambda: (
            f"dispatch: expert_ids must be in [0, {num_experts}); outside are"
            + ",".join(f" {n} of rank {rank}" for rank, n in enumerate(invalid) if n)
        ),
    )

    rows = _Gather.apply(x, by_expert, by_expert_inverse, expert_ids.shape[1])
    rows = all_to_all_single_autograd(rows, receive, send, group)
    # The transfer runs while its rows, ordered by rank and expert, are ordered by expert alone.
    experts = torch.arange(share, device=x.device).repeat(len(receive))
    experts = experts.repeat_interleave(received.flatten(), output_size=sum(receive))
    local = experts.argsort(stable=True)
    state = Dispatched(
        group, send, receive, by_expert, by_expert_inverse, local, _inverse(local), weights
    )
    offs = received.sum(0).cumsum(0, dtype=torch.int32)
    return _Gather.apply(rows, state.local, state.local_inverse, 1), offs, state


def combine(y: Tensor, state: Dispatched) -> Tensor:
    """Returns the experts' results to their tokens and adds them up with the weights.

    Args:
        y: [R, N], the results for the rows of :func:`dispatch`.
        state: from that call.

    Returns:
        [T, N] in y's dtype: ``sum_i weights[t, i] * y_i[t]``, weighted and added in FP32 (or FP64, if
        there) and rounded once.

    Differentiable in y and weights.
    """
    require(
        y.dim() == 2 and y.shape[0] == sum(state.receive),
        lambda: (
            f"combine: y must have shape [R, N] with R = {sum(state.receive)}, got {shape_of(y)}"
        ),
    )
    y = _Gather.apply(y, state.local_inverse, state.local, 1)
    y = all_to_all_single_autograd(y, state.send, state.receive, state.group)
    y = _Gather.apply(y, state.by_expert_inverse, state.by_expert, 1)
    weights = state.weights.to(torch.promote_types(state.weights.dtype, torch.float32))
    return (y.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1).to(y.dtype)


class _Gather(torch.autograd.Function):
    """``x[order // copies]``, where ``order`` permutes ``copies`` copies of each row of x.

    The gradient is a gather too, and a sum over a row's copies. That of an indexed x would add rows in
    arrival order, or sort the indices first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        g = g.index_select(0, inverse)
        if ctx.copies > 1:
            g = g.unflatten(0, (g.shape[0] // ctx.copies, ctx.copies)).sum(1)
        return g, None, None, None


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)
