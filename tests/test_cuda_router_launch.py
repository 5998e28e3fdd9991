"""The launch path of the router on a GPU: caches, addresses, verdicts, whole steps in graphs, the gate module.

What it shares with the grouped GEMMs (streams, threads, prepared launches, first uses) is tested for both in
test_cuda_launch.py, test_cuda_graph.py, test_cuda_process.py and test_cuda_autograd.py. A test called after a
case (h51, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import random
import resource
import statistics
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import reference
import torch
from forms import NAN, assert_close, same_bits
from gpu import (
    BF16,
    DEVICE,
    FP32,
    ROUTER_PRODUCTS,
    Problem,
    check,
    check_all,
    gemms,
    kernels,
    router,
    settled_memory,
    wait,
)
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops.bench.host import rounds_us
from cake_ops.cuda.router_config import LAYOUTS, policies
from cake_ops.cuda.routes import CACHES, MAX_ROUTES, RouteCache
from cake_ops.nn import RouterLinear

pytestmark = pytest.mark.gpu


# Addresses and geometries


def test_h51_memory_reused_with_another_geometry() -> None:
    """One address, many shapes, strides, dtypes of the operands and of the result."""
    memory = torch.empty(3, 1 << 18, device=DEVICE)
    result = torch.empty(1 << 18, device=DEVICE)

    def at(place: int, shape: tuple[int, int], dtype: torch.dtype, swapped: bool) -> Tensor:
        flat = memory[place].view(dtype)[: shape[0] * shape[1]].normal_()
        return flat.view(shape[::-1]).t() if swapped else flat.view(shape)

    shapes = [(300, 64, 72), (72, 64, 300), (300, 72, 64), (150, 128, 72), (300, 64, 72)]
    for i, (tokens, experts, hidden) in enumerate(shapes * 4):
        dtypes = [BF16 if i >> bit & 1 else FP32 for bit in range(3)]
        swapped = [(i + place) % 4 == 3 for place in range(3)]
        sizes = [(tokens, hidden), (experts, hidden), (tokens, experts)]
        p = Problem(*map(at, range(3), sizes, dtypes, swapped))
        assert [t.data_ptr() for t in p.present] == [row.data_ptr() for row in memory]
        check_all(p)
        for name in ROUTER_PRODUCTS[1:]:
            for dtype in (FP32, BF16):
                expected = p.expected(name)
                out = result.view(dtype)[: expected.numel()].view(expected.shape).fill_(NAN)
                getattr(cake_ops, name)(*p.tensors(name), out=out)
                p.check(name, out)


def test_h51_memory_freed_and_allocated_anew() -> None:
    x = torch.randn(300, 1024, device=DEVICE)
    addresses = set()
    for i in range(12):
        experts, dtype = ((64, FP32), (128, BF16), (32, FP32))[i % 3]
        w = torch.randn(experts, 1024, device=DEVICE).to(dtype)
        addresses.add(w.data_ptr())
        p = Problem(x, w, torch.randn(300, experts, device=DEVICE))
        check_all(p)
        del w, p
    assert len(addresses) < 12, "the allocator was meant to hand out an address again"


def test_fresh_tensors_in_every_call() -> None:
    """Operands and results of each call lie elsewhere, among what earlier calls have left."""
    kept: list[Any] = []
    choose = random.Random(0)
    addresses = set()
    for _ in range(200):
        p = router(choose.choice((16, 100, 257)), 64, choose.choice((72, 512)))
        results = p.step()
        addresses.add(p.x.data_ptr())
        p.check_step(results)
        kept.append((p, results))
        if len(kept) > 20:
            del kept[choose.randrange(len(kept))]
    assert len(addresses) > 20


def test_h52_fresh_tensors_of_known_shapes_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []
    add = RouteCache.add

    def counting(self: RouteCache, key: Any, *call: Any) -> Any:
        planned.append(key)
        return add(self, key, *call)

    monkeypatch.setattr(RouteCache, "add", counting)
    tokens = range(500, 530)
    for rows in tokens:
        router(rows, 64, 256, BF16).step()
    assert planned, "planning was meant to be seen"
    entries, known = {name: len(cache) for name, cache in CACHES.items()}, len(planned)
    for i in range(300):
        p = router(tokens[7 * i % 30], 64, 256, BF16)
        results = p.step()
        if i % 50 == 0:
            p.check_step(results)
    assert len(planned) == known
    assert {name: len(cache) for name, cache in CACHES.items()} == entries


def test_h53_operands_are_released_at_once() -> None:
    w = torch.randn(64, 4096, device=DEVICE)
    before = settled_memory()
    x = torch.zeros(65_536, 4096, device=DEVICE)  # 1 GB
    y = cake_ops.router_mm(x, w)
    dw = cake_ops.router_mm_wgrad(y, x)
    dx = cake_ops.router_mm_dgrad(y, w)
    held = [weakref.ref(t) for t in (x, y, dw, dx)]
    del x, y, dw, dx
    assert all(ref() is None for ref in held)
    assert torch.cuda.memory_allocated() == before


def test_h54_thousands_of_geometries() -> None:
    """5000 strides of x, four T and two N; the first ones are evicted meanwhile and come again."""
    memory = torch.randn(90 * 4 * 5100, device=DEVICE)
    weights = [torch.randn(n, 64, device=DEVICE) for n in (8, 72)]

    def call(i: int) -> tuple[Tensor, Tensor, Tensor]:
        x = memory.as_strided((90 - 30 * (i % 4 == 3), 64), (64 + 4 * i, 1))
        w = weights[i % 2]
        return cake_ops.router_mm(x, w), x, w

    def checked(i: int) -> None:
        y, x, w = call(i)
        check(y, reference.mm(x, w), Problem(x, w, y).fp32_bound)

    checked(0)
    checked(1)
    before = settled_memory()  # with the workspace of the reference's cuBLAS
    host = 0
    for i in range(5000):
        call(i)
        assert all(len(cache) <= MAX_ROUTES for cache in CACHES.values())
        if i % 500 == 1:
            checked(i)
        if i == 2500:
            host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(4):
        checked(i)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 50 << 10  # KB
    assert torch.cuda.memory_allocated() == before


# Verdicts


@pytest.fixture
def verdicts() -> Iterator[None]:
    """Overrides last until the end of the test."""
    yield
    cake_ops.reset_router_routes()


@pytest.mark.parametrize("name", ROUTER_PRODUCTS)
def test_a_changed_verdict_is_used_at_the_next_call(
    verdicts: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One shape, two ways to tile it, in every form: no plan of the old verdict is launched."""
    monkeypatch.undo()  # the poison is a kernel too
    p = router(300, 136, 72)
    out = torch.full_like(p.run(name), NAN)
    for config in (*policies(LAYOUTS[name], "f32"), *policies(LAYOUTS[name], "f32")[:1]):
        cake_ops.set_router_route(name, config.name)
        assert cake_ops.explain(name, *p.tensors(name)).kernel == config.symbol
        results: list[Tensor] = []

        def calls(results: list[Tensor] = results) -> None:
            results += [p.run(name), p.run(name, out=out)]

        assert kernels(calls) == [config.symbol] * 2
        for result in results:
            p.check(name, result)


# Whole steps


class Step(NamedTuple):
    """What a gate's training step gives."""

    experts: Tensor
    weights: Tensor
    dx: Tensor
    dw: Tensor


def gate_step(p: Problem, upstream: Tensor, dtype: torch.dtype | None = None) -> Step:
    """Logits, softmax, the 8 best experts, and the gradients for ``upstream``; in FP64 by torch's own GEMM."""
    x, w = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (p.x, p.w))
    logits = p.forward(x, w) if dtype is None else linear(x, w)
    weights, experts = logits.softmax(-1).topk(8)
    dx, dw = torch.autograd.grad(weights, (x, w), upstream.to(weights.dtype))
    return Step(experts, weights.detach(), dx, dw)


def check_gate_step(p: Problem, upstream: Tensor, step: Step) -> None:
    expected = gate_step(p, upstream, torch.float64)
    wait()
    same = step.experts == expected.experts
    assert same.float().mean() > 0.999 and same.all(1).float().mean() > 0.99  # near-ties may swap
    if same.all():
        assert_close(step.weights, expected.weights, 1e-5)
        for actual, exact in ((step.dx, expected.dx), (step.dw, expected.dw)):
            assert_close(actual, exact, 1e-5 if actual.dtype == FP32 else None)


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
@pytest.mark.parametrize("tokens", [64, 257])
def test_a_whole_gate_step_in_a_graph(tokens: int, x_dtype: torch.dtype) -> None:
    """Forward, softmax, top-k and both gradients, replayed with new values: the bits of eager calls."""
    p = router(tokens, 128, 1024, x_dtype)
    p.w.div_(32)
    upstream = torch.randn(tokens, 8, device=DEVICE)
    gate_step(p, upstream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gate_step(p, upstream)
    for _ in range(5):
        p.renew([])
        p.w.div_(32)
        upstream.normal_()
        graph.replay()
        eager = gate_step(p, upstream)
        assert all(same_bits(a, b) for a, b in zip(captured, eager, strict=True))
        check_gate_step(p, upstream, captured)


def test_h42_recomputed_routing_has_the_same_bits() -> None:
    """A checkpointed gate and its experts, 50 steps, with another stream that keeps the SMs busy."""
    tokens, experts, k = 4096, 128, 8
    p = router(tokens, experts, 512, BF16)
    w = torch.randn(experts, 64, 512, device=DEVICE, dtype=BF16)
    leaves = [t.requires_grad_() for t in (p.x, p.w, w)]
    seen: list[Tensor] = []

    def block(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        logits = cake_ops.router_mm(x, gate)
        seen.append(logits.detach())
        weights, chosen = logits.softmax(-1).topk(k)
        order = chosen.flatten().argsort(stable=True)
        offs = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).int()
        y = cake_ops.grouped_mm(x[order // k], w, offs)
        return y * weights.flatten()[order].unsqueeze(1).to(BF16)

    other, square = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=BF16)
    other.wait_stream(torch.cuda.current_stream())
    expected = torch.autograd.grad(block(*leaves).float().square().sum(), leaves)
    for _ in range(50):
        seen.clear()
        with torch.cuda.stream(other):
            torch.mm(square, square)
        y = checkpoint(block, *leaves, use_reentrant=False)
        with torch.cuda.stream(other):
            torch.mm(square, square)
        grads = torch.autograd.grad(y.float().square().sum(), leaves)
        first, again = seen
        assert same_bits(first, again)
    wait()
    torch.cuda.current_stream().wait_stream(other)
    assert_close(first, reference.mm(p.x.detach(), p.w.detach()), p.fp32_bound)
    assert all(grad.isfinite().all() for grad in grads)
    assert same_bits(
        grads[2], expected[2]
    )  # the other two add up in arrival order, in torch's gathers


# The gate module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_router_linear_as_a_drop_in(x_dtype: torch.dtype, bias: bool) -> None:
    plain = torch.nn.Linear(512, 64, bias, device=DEVICE)
    gate = RouterLinear.from_linear(plain)
    x = torch.randn(3, 50, 512, device=DEVICE).to(x_dtype).requires_grad_()
    upstream = torch.randn(3, 50, 64, device=DEVICE)
    logits = gate(x)
    logits.backward(upstream)
    exact = x.detach().double().requires_grad_()
    parameters = [t.detach().double().requires_grad_() for t in plain.parameters()]
    y = linear(exact, *parameters)
    y.backward(upstream.double())
    wait()
    assert logits.shape == (3, 50, 64) and logits.dtype == FP32
    assert_close(logits, y.detach(), 1e-6)
    assert x.grad.dtype == x_dtype
    assert_close(x.grad, exact.grad, 1e-6 if x_dtype == FP32 else None)
    for parameter, expected in zip(gate.parameters(), parameters, strict=True):
        assert_close(parameter.grad, expected.grad, 1e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_micro_batches_add_into_main_grad(dtype: torch.dtype) -> None:
    """One kernel each, in place, and twice the same sequence has the same bits."""
    batches = [router(tokens, 64, 512, BF16) for tokens in (257, 1, 100)]
    grads = [torch.zeros(64, 512, device=DEVICE, dtype=dtype) for _ in range(2)]
    for main_grad in grads:
        for p in batches:
            cake_ops.router_mm_wgrad_(main_grad, p.g, p.x)
    assert same_bits(*grads)
    bound = 2e-6 if dtype == FP32 else len(batches) * reference.tolerance(BF16)
    assert_close(grads[0], sum(p.expected("router_mm_wgrad") for p in batches), bound)


# What runs


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_each_pass_is_one_kernel(monkeypatch: pytest.MonkeyPatch, x_dtype: torch.dtype) -> None:
    monkeypatch.undo()  # the poison is a kernel too
    for tokens in (1, 64, 256, 1024):
        p = router(tokens, 256, 4096, x_dtype)
        p.step()
        assert gemms(p.step) == ["fwd", "dgrad", "wgrad"]
        for name in p.products:
            assert kernels(lambda p=p, name=name: p.run(name)) == [
                cake_ops.explain(name, *p.tensors(name)).kernel
            ]


def test_h65_host_time_of_a_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the figures. The limit is wide: budgets are judged by the benchmark, on a quiet host."""
    monkeypatch.undo()  # the poison would be timed too
    p = router(64, 256, 4096)
    wt = p.w.t()
    arms = {"router_mm": (cake_ops.router_mm, (p.x, p.w)), "torch.mm": (torch.mm, (p.x, wt))}
    with torch.no_grad():
        us = rounds_us(arms, 300, 9, torch.cuda.synchronize)
    cake, mm = (statistics.median(us[name]) for name in arms)
    with capsys.disabled():
        print(f"\n  host time of a call: router_mm {cake:.1f} us, torch.mm {mm:.1f} us")
    assert cake < 2 * mm
