"""The layers of ``python -m cake_ops.bench layers``: transformers' blocks, their data, an FP64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYERS", "TINY", "TOLERANCE", "Data", "Layer", "Outputs", "reference"]

# Some four roundings to BF16 in a row cost 0.01. A single row may be ten times worse than the whole.
TOLERANCE = 0.03

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layer:
    """The shape of an MoE layer; ``family`` names the transformers model that it belongs to."""

    name: str
    family: str
    hidden: int
    inner: int
    experts: int
    top_k: int

    def flops(self, tokens: int) -> int:
        """Three passes of the three projections; the router is not counted."""
        return 3 * 2 * 3 * tokens * self.top_k * self.hidden * self.inner

    def block(self, implementation: str) -> nn.Module:
        """transformers' block, on the current default device."""
        sizes = {"hidden_size": self.hidden, "num_experts_per_tok": self.top_k}
        if self.family == "qwen3_moe":
            from transformers.models.qwen3_moe import Qwen3MoeConfig as Config
            from transformers.models.qwen3_moe.modeling_qwen3_moe import (
                Qwen3MoeSparseMoeBlock as Block,
            )

            sizes |= {"moe_intermediate_size": self.inner, "num_experts": self.experts}
            sizes |= {"norm_topk_prob": True}
        else:
            from transformers.models.mixtral import MixtralConfig as Config
            from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

            sizes |= {"intermediate_size": self.inner, "num_local_experts": self.experts}
        return Block(Config(**sizes, experts_implementation=implementation))


LAYERS = (
    Layer("Qwen3-30B-A3B", "qwen3_moe", 2048, 768, 128, 8),
    Layer("Mixtral-8x7B", "mixtral", 4096, 14336, 8, 2),
)
TINY = (
    Layer("tiny Qwen3", "qwen3_moe", 64, 48, 8, 3),
    Layer("tiny Mixtral", "mixtral", 32, 72, 4, 2),
)


class Data:
    """The blocks of all implementations on one set of weights, the tokens, a gradient, the reference."""

    def __init__(
        self, layer: Layer, tokens: int, implementations: Iterable[str], device: torch.device
    ) -> None:
        self.layer, self.tokens = layer, tokens
        with torch.device("meta"):
            self.blocks = {name: layer.block(name).bfloat16() for name in implementations}
        first, *others = self.blocks.values()
        first.to_empty(device=device)
        with torch.no_grad():
            for p in first.parameters():
                p.normal_(std=p.shape[-1] ** -0.5)
        for block in others:  # the same Parameter objects
            block.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        shape, options = (1, tokens, layer.hidden), {"device": device, "dtype": torch.bfloat16}
        self.x, self.g = (
            torch.randn(shape, **options).requires_grad_(),
            torch.randn(shape, **options),
        )
        self.expected, self.group_sizes = reference(first, self.x, self.g)

    def step(self, block: nn.Module, run: Callable[[Tensor], Tensor] | None = None) -> Outputs:
        """Forward and backward of a block, or of what was compiled from it."""
        y = (block if run is None else run)(self.x)
        names, parameters = zip(*block.named_parameters(), strict=True)
        grads = torch.autograd.grad(y, (self.x, *parameters), self.g)
        return dict(zip(("y", "x", *names), (y.detach(), *grads), strict=True))

    def error(self, outputs: Outputs) -> float:
        """The largest relative Frobenius error of a result; RuntimeError past the tolerance."""
        largest = 0.0
        for name, want in self.expected.items():
            got, want = outputs[name].flatten(0, -2), want.flatten(0, -2)
            rows, norms = want.new_empty(len(want)), want.norm(dim=-1)
            for part in torch.arange(len(want)).split(1 << 16):
                where = slice(int(part[0]), int(part[-1]) + 1)
                rows[where] = (got[where].float() - want[where]).norm(dim=-1)
            error = (rows.double().norm() / norms.double().norm()).item()
            worst = torch.where(rows == 0, rows, rows / norms).max().item()
            if not (error <= TOLERANCE and worst <= 10 * TOLERANCE):  # NaN fails too
                raise RuntimeError(
                    f"inaccurate {name}: relative error {error:.2e} (bound {TOLERANCE}), "
                    f"worst row {worst:.2e}"
                )
            largest = max(largest, error)
        return largest


def reference(block: nn.Module, x: Tensor, g: Tensor) -> tuple[dict[str, Tensor], list[int]]:
    """y and all gradients in FP32, the experts computed in FP64, and how many rows each expert has.

    The router is not what is measured: its choices, and the way back through it, are its own.
    """
    tokens, grads = x.detach().flatten(0, 1).requires_grad_(), g.flatten(0, 1)
    _, weights, ids = block.gate(tokens)
    y, dx = (torch.zeros_like(tokens, dtype=torch.float64) for _ in range(2))
    dweights = torch.zeros_like(weights, dtype=torch.float64)
    stored = {name: getattr(block.experts, name) for name in ("gate_up_proj", "down_proj")}
    dstored = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in stored.items()}
    sizes = []
    for e in range(len(stored["down_proj"])):
        token, choice = (ids == e).nonzero(as_tuple=True)
        sizes.append(len(token))
        parts = (tokens[token], weights[token, choice], *(p[e] for p in stored.values()))
        leaves = [t.detach().double().requires_grad_() for t in parts]
        rows, weight, up, down = leaves
        gate, value = (rows @ up.t()).chunk(2, -1)
        result = (F.silu(gate) * value) @ down.t() * weight.unsqueeze(1)
        drows, dweight, dup, ddown = torch.autograd.grad(result, leaves, grads[token].double())
        y.index_add_(0, token, result.detach())
        dx.index_add_(0, token, drows)
        dweights[token, choice] = dweight
        dstored["gate_up_proj"][e], dstored["down_proj"][e] = dup, ddown
    leaves = [tokens, block.gate.weight]
    dtokens, dgate = torch.autograd.grad(weights, leaves, dweights.to(weights.dtype))
    expected = {"y": y, "x": dx + dtokens, "gate.weight": dgate}
    expected |= {f"experts.{name}": t for name, t in dstored.items()}
    return {name: t.float() for name, t in expected.items()}, sizes
