"""A byte-level mixture-of-experts language model: the smallest that is still the real thing.

Pre-norm blocks of causal attention and a mixture of SwiGLU experts, rotary positions, an FP32 router,
top-k routing with a load-balancing loss. Weights are FP32 masters, cast to the type of the activations
where they are used. Nothing in it reads a value on the host: the number of rows of each expert reaches
the grouped GEMM as ``offs`` on the device, and every shape is known beforehand.

**Where the checkpoint ends.** A checkpointed region is run again in the backward, and PyTorch stops that
second run at the last tensor the region saves (*early stop*). What comes after is never recomputed, so
the last operator that saves should be the most expensive one, and it must save before it launches, which
cake_ops does. Here that is the down projection, which takes two decisions:

* The routing weight multiplies the hidden activations and not the expert's output: the result is the
  same since the down projection is linear, but a product after it would save its operands.
* Un-sorting the rows (it saves its index) and the residual sum stay outside of the region. What they
  keep alive is that index, 8 bytes per row.

So a step launches, per block, 2 forward grouped GEMMs and 1 again in the backward, 3 in all. With early
stop off, or with the combine inside of the region, or with an operator that launches first and saves
afterwards, there are 4. ``tests/test_demo.py`` counts each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cake_ops

# x [R, K], w [E, N, K], offs [E] int32 cumulative ends -> y [R, N]: rows offs[e-1]:offs[e] times w[e].T
GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """D = ``width``, F = ``hidden``, E = ``experts``; T = batch x context tokens, R = T x ``top_k`` rows."""

    layers: int
    width: int
    heads: int
    experts: int
    top_k: int
    hidden: int
    context: int


def gather_rows(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Tokens [T, D] -> rows [R, D] sorted by expert; row r is choice ``order[r]`` of the flat [T, k]."""
    return x[order // top_k]


def sum_rows(y: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Rows [R, D] sorted by expert -> the sum over each token's rows [T, D]; undoes the sorting."""
    return y[inverse].view(-1, top_k, y.shape[1]).sum(1)


class Dispatch(torch.autograd.Function):
    """:func:`gather_rows` whose gradient is :func:`sum_rows`.

    Both are gathers, so sums are made in a fixed order; autograd's own gradient of indexing is a
    scatter, which on a GPU is slow or (with atomics) not the same from run to run.
    """

    @staticmethod
    def forward(ctx, x, order, inverse, top_k):  # type: ignore[override]
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return gather_rows(x, order, top_k)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return sum_rows(g, inverse, ctx.top_k), None, None, None


class Combine(torch.autograd.Function):
    """:func:`sum_rows` whose gradient is :func:`gather_rows`."""

    @staticmethod
    def forward(ctx, y, order, inverse, top_k):  # type: ignore[override]
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return sum_rows(y, inverse, top_k)

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return gather_rows(g, order, ctx.top_k), None, None, None


class Routing(NamedTuple):
    """Which rows go where, all on the device."""

    weight: Tensor  # [T, k] FP32, sums to one over a token's choices
    order: Tensor  # [R] sorted row -> flat (token, choice)
    inverse: Tensor  # [R] flat (token, choice) -> sorted row
    counts: Tensor  # [E] int64 rows of each expert
    balance: Tensor  # [] the Switch load-balancing loss, 1 when the load is even


class Router(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = cake_ops.nn.RouterLinear(config.width, config.experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        score = self.gate(x).softmax(-1)  # [T, E], FP32 whatever the type of x
        weight, expert = score.topk(self.top_k)
        flat = expert.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        counts = flat.new_zeros(score.shape[1]).scatter_add_(0, flat, torch.ones_like(flat))
        balance = (score.mean(0) * counts).sum() * (score.shape[1] / len(flat))
        return Routing(weight / weight.sum(-1, keepdim=True), order, inverse, counts, balance)


class Experts(nn.Module):
    """E SwiGLU networks, their weights stacked: ``up`` [E, 2F, D] holds gate and value, ``down`` [E, D, F]."""

    def __init__(self, config: ModelConfig, grouped_mm: GroupedMM) -> None:
        super().__init__()
        self.grouped_mm = grouped_mm
        e, d, f = config.experts, config.width, config.hidden
        self.up = nn.Parameter(torch.randn(e, 2 * f, d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(e, d, f) * f**-0.5)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """``x`` [R, D] sorted by expert -> [R, D], already scaled by the routing weight."""
        offs = routing.counts.cumsum(0, dtype=torch.int32)
        weight = routing.weight.flatten()[routing.order].to(x.dtype)
        gate, value = self.grouped_mm(x, self.up.to(x.dtype), offs).chunk(2, dim=-1)
        hidden = F.silu(gate) * value * weight[:, None]
        return self.grouped_mm(hidden, self.down.to(x.dtype), offs)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        d = config.width
        self.qkv = nn.Parameter(torch.randn(3 * d, d) * d**-0.5)
        self.out = nn.Parameter(torch.randn(d, d) * d**-0.5)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """``x`` [B, S, D] -> [B, S, D]; ``rotation`` = cosines and sines [S, D / heads / 2]."""
        b, s, d = x.shape
        qkv = cake_ops.linear(x, self.qkv.to(x.dtype)).view(b, s, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, D / heads]
        y = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True
        )
        return cake_ops.linear(y.transpose(1, 2).reshape(b, s, d), self.out.to(x.dtype))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding: turns the pairs (x[i], x[i + half]) by position x frequency."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, grouped_mm: GroupedMM) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.width), Attention(config)
        self.experts_norm, self.router = RMSNorm(config.width), Router(config)
        self.experts = Experts(config, grouped_mm)

    def up_to_down_projection(self, x: Tensor, rotation: tuple[Tensor, Tensor]):
        """The checkpointed region: everything up to the last tensor worth saving."""
        x = x + self.attention(self.attention_norm(x), rotation)
        flat = self.experts_norm(x).flatten(0, 1)
        routing = self.router(flat)
        rows = Dispatch.apply(flat, routing.order, routing.inverse, self.router.top_k)
        return x, self.experts(rows, routing), routing

    def combine(self, x: Tensor, rows: Tensor, routing: Routing) -> Tensor:
        return x + Combine.apply(rows, routing.order, routing.inverse, self.router.top_k).view_as(x)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Routing]:
        x, rows, routing = checkpoint(
            self.up_to_down_projection, x, rotation, use_reentrant=False, preserve_rng_state=False
        )
        return self.combine(x, rows, routing), routing


class MoELanguageModel(nn.Module):
    """``tokens`` [B, S] int64 -> logits [B, S, 256], the balance loss, and the load [layers, E]."""

    def __init__(self, config: ModelConfig, grouped_mm: GroupedMM, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        d = config.width
        self.embedding = nn.Parameter(torch.randn(256, d))
        self.blocks = nn.ModuleList(Block(config, grouped_mm) for _ in range(config.layers))
        self.norm = RMSNorm(d)
        # Zero, so that the first guess is uniform and its loss ln 256 = 5.545 nats.
        self.head = nn.Parameter(torch.zeros(256, d))
        half = d // config.heads // 2
        angle = torch.outer(torch.arange(config.context), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        length = tokens.shape[1]
        rotation = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        routings = []
        for block in self.blocks:
            x, routing = block(x, rotation)
            routings.append(routing)
        logits = cake_ops.linear(self.norm(x), self.head.to(x.dtype))
        balance = torch.stack([r.balance for r in routings]).mean()
        return logits, balance, torch.stack([r.counts for r in routings])
