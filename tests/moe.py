"""A small MoE layer built from the package's modules, whole or expert-parallel, and what it should compute.

The reference is a dense MoE in FP64: every expert on every token, and a mask of weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import cake_ops
from cake_ops.distributed import combine, dispatch, local_experts

HIDDEN, INNER, TOP_K = 12, 10, 2
# Bounds on relative Frobenius errors: three products in a row, and weight gradients over some 60 rows.
FP32, BF16 = 3e-6, 2e-2


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = cake_ops.nn.GroupedLinear(experts, HIDDEN, INNER, bias=True)
        self.down = cake_ops.nn.GroupedLinear(experts, INNER, HIDDEN)

    def forward(self, rows: Tensor, offs: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(rows, offs)), offs)


class Moe(nn.Module):
    """All experts on this rank, or with a group those that ``local_experts`` gives to it."""

    def __init__(self, experts: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.num_experts, self.group = experts, group
        self.router = cake_ops.nn.RouterLinear(HIDDEN, experts, bias=False)
        self.experts = Experts(len(local_experts(experts, group)) if group else experts)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        shares = self.router(x).softmax(-1)
        ids = shares.topk(TOP_K).indices if ids is None else ids
        weights = shares.gather(1, ids)
        if self.group is not None:
            rows, offs, state = dispatch(x, ids, weights, self.num_experts, self.group)
            return x + combine(self.experts(rows, offs), state)
        sorted_ids, order = ids.flatten().sort(stable=True)
        offs = torch.searchsorted(sorted_ids, torch.arange(self.num_experts), right=True).int()
        y = self.experts(x[order // ids.shape[1]], offs)[order.argsort()].unflatten(0, ids.shape)
        return x + (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def model(experts: int, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(1)  # the same on both ranks
    return nn.Sequential(*(Moe(experts) for _ in range(layers)))


def share(experts: int, group: dist.ProcessGroup | None = None) -> slice:
    mine = local_experts(experts, group)
    return slice(mine.start, mine.stop)


def expert_parallel(whole: nn.Sequential, group: dist.ProcessGroup | None = None) -> nn.Sequential:
    """A model of one layer, with this rank's share of the experts."""
    experts, group = whole[0].num_experts, group or dist.group.WORLD
    part, mine = nn.Sequential(Moe(experts, group)), share(experts, group)
    weights = whole.state_dict().items()
    part.load_state_dict({k: v[mine] if "experts" in k else v for k, v in weights})
    return part


def reference(p: dict[str, Tensor], x: Tensor, ids: Tensor | None = None) -> Tensor:
    names = ("router.weight", "experts.up.weight", "experts.up.bias", "experts.down.weight")
    for layer in sorted({name[0] for name in p}):
        router, up, bias, down = (p[f"{layer}.{name}"] for name in names)
        shares = (x @ router.T).softmax(-1)
        chosen = shares.topk(TOP_K).indices if ids is None else ids
        mask = torch.zeros_like(shares).scatter(1, chosen, 1.0)
        h = nn.functional.silu(torch.einsum("tk,enk->ten", x, up) + bias)
        x = x + torch.einsum("ten,ekn,te->tk", h, down, shares * mask)
    return x


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().double().requires_grad_() for k, v in module.named_parameters()}


def batch(rank: int, tokens: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of a rank and the gradient of its result; every rank can make every rank's."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, g = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    return x, g


def both(tokens: tuple[int, int], step: int = 0) -> tuple[Tensor, Tensor]:
    pairs = [batch(rank, n, step) for rank, n in enumerate(tokens)]
    x, g = (torch.cat(t).double() for t in zip(*pairs, strict=True))
    return x.requires_grad_(), g


def close(actual: Tensor, expected: Tensor, bound: float = FP32) -> None:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= bound, f"relative error {error:.2e} > {bound:.0e}"
