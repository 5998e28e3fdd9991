"""The launch path on a GPU: caches, addresses, streams, threads, prepared launches.

What the grouped GEMMs share with the router is tested for both; the caches of the router are tested in
test_cuda_router_launch.py. A test called after a case (h51, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import statistics
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import reference
import torch
from forms import LAYOUTS, NAN, same_bits
from gpu import (
    BF16,
    DEVICE,
    KERNEL_FAMILIES,
    KERNEL_PRODUCTS,
    OTHER_SIZES,
    SIZES,
    Problem,
    check,
    check_all,
    kernels,
    problem,
    router,
    settled_memory,
    small,
    small_of,
    wait,
)
from torch import Tensor

import cake_ops
from cake_ops.bench.host import cuda_cases, rounds_us
from cake_ops.cuda.routes import CACHES, MAX_ROUTES, RouteCache
from cake_ops.cuda.tensor_map import MAX_ADDRESSES

pytestmark = pytest.mark.gpu


each_family = pytest.mark.parametrize("family", KERNEL_FAMILIES)


def results(p: Problem) -> list[Tensor]:
    return [p.run(name) for name in p.products]


# Addresses and geometries


def test_h51_memory_reused_with_another_geometry() -> None:
    """One address, many shapes, strides, numbers of experts and result types."""
    memory = torch.empty(1 << 20, dtype=BF16, device=DEVICE)
    result = torch.empty(1 << 18, device=DEVICE)
    for sizes, n, k in (
        ([90, 70], 136, 72),
        ([160], 72, 136),
        (SIZES, 136, 72),
        ([90, 70], 136, 72),
    ):
        rows, experts = sum(sizes), len(sizes)
        x = memory[: rows * k].view(rows, k).normal_()
        g = memory[1 << 18 :][: rows * n].view(rows, n).normal_()
        w = memory[1 << 19 :][: experts * n * k].view(experts, n, k).normal_()
        offs = reference.offsets(sizes, DEVICE)
        for weight in (w, w.view(experts, k, n).mT):
            assert weight.data_ptr() == w.data_ptr()
            check_all(Problem(x, weight, g, offs))
        for dtype in (torch.float32, BF16):
            out = result.view(dtype)[: experts * n * k].view(experts, n, k).fill_(NAN)
            cake_ops.grouped_mm_wgrad(g, x, offs, out=out)
            check(out, reference.grouped_mm_wgrad(g, x, offs))


def test_h51_memory_freed_and_allocated_anew() -> None:
    x = torch.randn(300, 256, dtype=BF16, device=DEVICE)
    addresses = set()
    for i in range(12):
        experts, n = ((2, 128), (4, 64), (1, 256))[i % 3]
        w = torch.randn(experts, n, 256, dtype=BF16, device=DEVICE)
        addresses.add(w.data_ptr())
        offs = reference.offsets([300 // experts] * experts, DEVICE)
        check(cake_ops.grouped_mm(x, w, offs), reference.grouped_mm(x, w, offs))
        del w
    assert len(addresses) < 12, "the allocator was meant to hand out an address again"


@each_family
def test_one_geometry_at_more_addresses_than_are_kept(family: str) -> None:
    p = small(family)
    copies = [p.x.clone() for _ in range(2 * MAX_ADDRESSES)]
    expected = p.run(family)
    for x in copies + copies:
        assert same_bits(p.forward(x, p.w), expected)


def test_h52_fresh_tensors_of_known_shapes_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []
    add = RouteCache.add

    def counting(self: RouteCache, key: Any, *call: Any) -> Any:
        planned.append(key)
        return add(self, key, *call)

    def step(rows: int) -> None:
        p = problem([rows, 40], 136, 72)
        x, w = p.x.requires_grad_(), p.w.requires_grad_()
        cake_ops.grouped_mm(x, w, p.offs).backward(p.g)

    monkeypatch.setattr(RouteCache, "add", counting)
    for rows in range(50, 60):
        step(rows)
    entries, known = {name: len(cache) for name, cache in CACHES.items()}, len(planned)
    for i in range(300):
        step(50 + i % 10)
    wait()
    assert len(planned) == known
    assert {name: len(cache) for name, cache in CACHES.items()} == entries


def test_h53_operands_are_released_at_once() -> None:
    w = torch.randn(2, 128, 4096, dtype=BF16, device=DEVICE)
    offs = reference.offsets([100_000, 31_072], DEVICE)
    before = settled_memory()
    x = torch.zeros(131_072, 4096, dtype=BF16, device=DEVICE)  # 1 GB
    y = cake_ops.grouped_mm(x, w, offs)
    dw = cake_ops.grouped_mm_wgrad(y, x, offs)
    held = [weakref.ref(t) for t in (x, y, dw)]
    del x, y, dw
    assert all(ref() is None for ref in held)
    assert torch.cuda.memory_allocated() == before


def test_h54_thousands_of_geometries() -> None:
    strides = range(64, 64 + 8 * (MAX_ROUTES + 500), 8)
    memory = torch.randn(90 * strides[-1], dtype=BF16, device=DEVICE)
    w = torch.randn(2, 72, 64, dtype=BF16, device=DEVICE)
    offs = reference.offsets([40, 49], DEVICE)
    x = memory.as_strided((90, 64), (64, 1))
    check(cake_ops.grouped_mm(x, w, offs), reference.grouped_mm(x, w, offs))
    before = torch.cuda.memory_allocated()  # with the workspace of the reference's cuBLAS
    for i, stride in enumerate(strides):
        rows = 90 - i % 4
        x = memory.as_strided((rows, 64), (stride, 1))
        ends = offs.clamp(max=rows)
        y = cake_ops.grouped_mm(x, w, ends)
        assert len(CACHES["grouped_mm"]) <= MAX_ROUTES
        if i % 250 == 1:
            check(y, reference.grouped_mm(x, w, ends))
    x = memory.as_strided((90, 64), (64, 1))  # evicted meanwhile
    y = cake_ops.grouped_mm(x, w, offs)
    check(y, reference.grouped_mm(x, w, offs))
    del y, ends
    assert torch.cuda.memory_allocated() == before


# Streams and threads


@each_family
def test_launches_on_the_current_stream(family: str) -> None:
    """The stream sleeps before it writes the operands: a launch elsewhere would read the old ones."""
    p, later = small(family), small(family)
    results(p)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for t, new in zip(p.present, later.present, strict=True):
            t.copy_(new)
        actual = [*results(p), *p.step()]
    torch.cuda.current_stream().wait_stream(side)
    for name, result in zip(p.products * 2, actual, strict=True):
        later.check(name, result)


@each_family
def test_threads_with_streams_of_their_own_while_caches_are_cleared(family: str) -> None:
    if family == "grouped_mm":
        problems = [problem([rows, 0, 40], 136, 72) for rows in (1, 64, 300)]
    else:
        problems = [router(rows, 136, 72) for rows in (1, 64, 300)]
    expected = [results(p) for p in problems]
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(40):
                for p, bits in zip(problems, expected, strict=True):
                    for a, b in zip(results(p), bits, strict=True):
                        assert same_bits(a, b)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(4)]
        deadline = time.monotonic() + 60
        while not all(future.done() for future in futures) and time.monotonic() < deadline:
            cake_ops.clear_caches()
            time.sleep(1e-3)
        for future in futures:
            future.result(timeout=1)


@each_family
def test_deterministic_mode_changes_nothing(family: str) -> None:
    p = problem(SIZES, 136, 72, tail=3) if family == "grouped_mm" else small(family)
    plain = [*results(p), p.run(family, deterministic=False)]
    torch.use_deterministic_algorithms(True)
    try:
        strict = [*results(p), p.run(family, deterministic=False)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(a, b) for a, b in zip(plain, strict, strict=True))
    check_all(p)


# Prepared launches and explanations


@pytest.mark.parametrize("name", KERNEL_PRODUCTS)
def test_prepared_launch_allocates_nothing_and_takes_new_values(name: str) -> None:
    p = small_of(name)
    prepared = cake_ops.prepare(name, *p.tensors(name))
    for sizes in OTHER_SIZES:
        p.renew(sizes)
        prepared.out.fill_(NAN)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(10):
            assert prepared.launch() is prepared.out
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        p.check(name, prepared.out)


@each_family
def test_prepare_refuses_what_would_be_copied(family: str) -> None:
    x, *others = small(family).tensors(family)
    with pytest.raises(RuntimeError, match="cannot prepare"):
        cake_ops.prepare(family, LAYOUTS["misaligned"](x), *others)


@pytest.mark.parametrize("name", KERNEL_PRODUCTS)
def test_explain_names_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.undo()  # the poison is a kernel too
    p = small_of(name)
    explanation = cake_ops.explain(name, *p.tensors(name))
    p.run(name)
    assert kernels(lambda: p.run(name)) == [explanation.kernel]


# Host time


def test_h65_h66_host_time_of_a_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the figures. The limits are wide: budgets are judged by the benchmark, on a quiet host."""
    monkeypatch.undo()  # the poison would be timed too
    lines, ratios = [], []
    for mode, arms in cuda_cases().items():
        us = rounds_us(arms, 300, 9, torch.cuda.synchronize)
        medians = {name: statistics.median(times) for name, times in us.items()}
        lines.append(f"{mode}: " + ", ".join(f"{name} {t:.1f} us" for name, t in medians.items()))
        ratios.append(medians["cake"] / medians["torch._grouped_mm"])
    p = problem([64] * 8, 512, 512)
    prepared, out = cake_ops.prepare("grouped_mm", *p.tensors("grouped_mm")), p.g.clone()
    arms = {"cake": (prepared.launch, ()), "zero_": (out.zero_, ())}
    us = rounds_us(arms, 300, 9, torch.cuda.synchronize)
    launch, zero = (statistics.median(us[name]) for name in arms)
    lines.append(f"prepared launch {launch:.1f} us, a C++ launch (zero_) {zero:.1f} us")
    with capsys.disabled():
        print("\n  host time of a call: " + "\n    ".join(lines))
    assert max(ratios) < 1, "slower on the host than torch's own grouped GEMM"
    assert launch < 25
