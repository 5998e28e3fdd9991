"""``torch.compile(mode="reduce-overhead")`` on the GPU: an MoE layer replayed from CUDA-graph trees.

inductor captures forward and backward as it finds them, and leaves out what it believes a graph cannot hold.
So besides the values the tests look at whether anything was left out, and whether a call replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters

import cake_ops
from cake_ops.testing import count_launches

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 333, 128, 96, 8, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()  # lets go of the graphs


class Moe(nn.Module):
    """Router, gated experts and the sum over the choices, from the package's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.router = cake_ops.nn.RouterLinear(HIDDEN, EXPERTS, bias=False)
        self.up = cake_ops.nn.GroupedLinear(EXPERTS, HIDDEN, 2 * INNER, dtype=torch.bfloat16)
        self.down = cake_ops.nn.GroupedLinear(EXPERTS, INNER, HIDDEN, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        chosen, expert = self.router(x).topk(TOP_K)
        of_row, order = expert.flatten().sort(stable=True)
        bounds = torch.arange(EXPERTS, device=x.device)
        offs = torch.searchsorted(of_row, bounds, right=True, out_int32=True)
        gate, value = self.up(x[order // TOP_K], offs).chunk(2, -1)
        y = self.down(nn.functional.silu(gate) * value, offs)[order.argsort()]
        weight = chosen.softmax(-1).unsqueeze(-1)
        return x + (y.view(-1, TOP_K, HIDDEN) * weight).sum(1).to(x.dtype)


def of_transformers() -> nn.Module:
    pytest.importorskip("transformers", reason="needs the client: transformers")
    from cake_ops.bench.layer_data import Layer
    from cake_ops.integrations.transformers import register

    register()
    block = Layer("small", "qwen3_moe", HIDDEN, INNER, EXPERTS, TOP_K).block("cake").bfloat16()
    for p in block.parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return nn.Sequential(nn.Unflatten(0, (1, -1)), block, nn.Flatten(0, 1))


def step(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(g)
    grads = [p.grad for p in module.parameters()]
    return [t.detach().clone() for t in (y, x.grad, *grads)]  # the next replay writes over them


@pytest.mark.parametrize("make", [Moe, of_transformers])
def test_layer_in_cuda_graph_trees(make: Callable[[], nn.Module]) -> None:
    module = make().cuda()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for i in range(5):
        x, g = torch.randn(2, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        with count_launches() as launches:
            got = step(module, compiled, x, g)
        assert launches["grouped_mm"] == launches["grouped_mm_wgrad"]
        if i in (0, 4):  # the first calls warm up and are captured; a replay does not come by here
            assert launches["grouped_mm"] == (2 if i == 0 else 0)
        want = step(module, module, x, g)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            # what inductor fuses it does not round to BF16 in between
            assert (a.double() - b.double()).norm() <= 0.03 * b.double().norm()
    assert counters["inductor"]["cudagraph_skips"] == 0
