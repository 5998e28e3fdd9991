"""Activation memory beyond plain checkpoints: offload hooks, mixed nesting, memory budgets, the page on them."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops.testing import count_launches

OFFS = torch.tensor([20, 20, 57], dtype=torch.int32)
Layer = Callable[[Tensor], Tensor]
PAGE = (Path(__file__).resolve().parents[1] / "docs/checkpointing.md").read_text()
COMMON, *SNIPPETS = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with (
        torch.compiler.config.patch(force_disable_caches=True),
        torch._inductor.config.patch(compile_threads=1),
    ):
        yield


class Experts:
    """A gated expert layer of 3 experts behind a routed dispatch: what a region of a model holds."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 1):
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        rows, k, i = 60 * size, 64, 48
        self.gate = torch.randn(3, k, device=device)
        self.up, self.down = torch.randn(3, 2 * i, k, **options), torch.randn(3, k, i, **options)
        self.x, self.offs = torch.randn(rows, k, **options), OFFS.to(device) * size
        self.leaves = [t.requires_grad_() for t in (self.x, self.gate, self.up, self.down)]

    def __call__(self, x: Tensor) -> Tensor:
        scale = cake_ops.router_mm(x, self.gate).softmax(-1).amax(-1, keepdim=True).to(x.dtype)
        gate, value = cake_ops.grouped_mm(x, self.up, self.offs).chunk(2, -1)
        return cake_ops.grouped_mm(F.silu(gate) * value * scale, self.down, self.offs)

    def step(self, run: Layer) -> tuple[list[Tensor], int, int]:
        """y and the gradients; the forward launches of the grouped and of the router product."""
        for leaf in self.leaves:
            leaf.grad = None
        with count_launches() as launches:
            y = run(self.x)
            y.pow(2).sum().backward()  # a reentrant checkpoint knows no autograd.grad
        assert launches["grouped_mm_dgrad"] == launches["grouped_mm_wgrad"] == 2
        found = [y.detach(), *(leaf.grad for leaf in self.leaves)]
        return found, launches["grouped_mm"], launches["router_mm"]


def hooked(hooks: Callable[[], Any], run: Layer) -> Layer:
    def call(x: Tensor) -> Tensor:
        with hooks():
            return run(x)

    return call


def checkpointed(run: Layer, reentrant: bool = False) -> Layer:
    return lambda x: checkpoint(run, x, use_reentrant=reentrant)


def through_bytes() -> saved_tensors_hooks:
    """Offloads to what is no tensor any more, so a backward that reads anything else fails."""

    def pack(t: Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
        data = t.detach().contiguous().flatten().view(torch.uint8)
        return bytes(data.tolist()), t.dtype, t.shape

    def unpack(packed: tuple[bytes, torch.dtype, torch.Size]) -> Tensor:
        data, dtype, shape = packed
        return torch.tensor(list(data), dtype=torch.uint8).view(dtype).view(shape)

    return saved_tensors_hooks(pack, unpack)


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    """Bytes come back contiguous, which leads elementwise operators other ways: hence not bit for bit."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_offloaded_layer_computes_nothing_again() -> None:
    experts = Experts()
    want, *counts = experts.step(experts)
    got, *actual = experts.step(hooked(save_on_cpu, experts))
    assert actual == counts == [2, 1] and all(map(torch.equal, got, want))
    got, *actual = experts.step(hooked(through_bytes, experts))
    assert actual == counts
    assert_close(got, want)


@pytest.mark.parametrize(
    ("outer", "forwards"),
    [
        (lambda run: hooked(through_bytes, checkpointed(run)), (3, 2)),
        # Hooks inside of a region take what it saves: it is offloaded and not computed again.
        (lambda run: checkpointed(hooked(through_bytes, run)), (2, 1)),
        (lambda run: hooked(through_bytes, checkpointed(run, True)), (4, 2)),
        (lambda run: checkpointed(hooked(through_bytes, run), True), (4, 2)),
    ],
    ids=["offload-checkpoint", "checkpoint-offload", "offload-reentrant", "reentrant-offload"],
)
def test_offload_and_checkpoint(outer: Callable[[Layer], Layer], forwards: tuple[int, int]) -> None:
    experts = Experts()
    want, *_ = experts.step(experts)
    got, *counts = experts.step(outer(experts))
    assert tuple(counts) == forwards
    assert_close(got, want)


@pytest.mark.parametrize(
    ("inner", "outer", "forwards"),
    [(False, False, (3, 2)), (False, True, (5, 3)), (True, False, (6, 3)), (True, True, (6, 3))],
)
def test_nested_checkpoints_of_two_kinds(
    inner: bool, outer: bool, forwards: tuple[int, int]
) -> None:
    """``inner`` and ``outer`` say which is reentrant: such a one runs its region to the end."""
    experts = Experts()
    want, *_ = experts.step(experts)
    got, *counts = experts.step(checkpointed(checkpointed(experts, inner), outer))
    assert tuple(counts) == forwards
    assert all(map(torch.equal, got, want))


def test_memory_budget_trades_launches_for_memory() -> None:
    experts = Experts()

    def two(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + experts(x).tanh()  # which needs the result of the last product
        return x

    expected = torch.autograd.grad(two(experts.x).pow(2).sum(), experts.leaves)
    found = []
    for budget in (1.0, 0.7, 0.0):
        torch._dynamo.reset()
        with (
            torch._functorch.config.patch(activation_memory_budget=budget),
            count_launches() as launches,
        ):
            y = torch.compile(two, backend="aot_eager", fullgraph=True)(experts.x)
            saved = sum(t.nbytes for t in y.grad_fn.saved_tensors)
            actual = torch.autograd.grad(y.pow(2).sum(), experts.leaves)
        found.append((launches["grouped_mm"], saved))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    (all_saved, most), (cheap, less), (none_saved, least) = found
    # Between the extremes what is cheap goes first: less memory, and not one product more.
    assert (all_saved, cheap, none_saved) == (4, 4, 8) and most > less > least


@pytest.mark.gpu
def test_offloading_frees_the_device() -> None:
    experts = Experts("cuda", torch.bfloat16, size=1000)

    def forward(run: Layer) -> tuple[Tensor, int]:
        before = torch.cuda.memory_allocated()
        y = run(experts.x)
        return y, torch.cuda.memory_allocated() - before

    want, *_ = experts.step(experts)
    y, kept = forward(experts)
    del y
    offload = hooked(lambda: save_on_cpu(pin_memory=True), experts)
    y, left = forward(offload)
    assert left < 2 * y.nbytes < kept
    del y
    got, *counts = experts.step(offload)
    assert counts == [2, 1] and all(map(torch.equal, got, want))


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
@pytest.mark.usefixtures("unseen_gpu")
def test_documentation_runs(number: int, tmp_path: Path) -> None:
    assert "assert" in SNIPPETS[number]
    script = tmp_path / "checkpointing.py"
    script.write_text(COMMON + SNIPPETS[number])
    runpy.run_path(str(script))
