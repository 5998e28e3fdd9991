"""The benchmark harness: rows, statistics, rendering and files, and the pipeline on two fake devices.

No figure of a benchmark is tested here, only that the harness would report a wrong one. `FakeGpu` runs
the arms on the CPU and writes the timeline a profiler would: a marker, a fill, a marker, then one
kernel for each matrix product that reaches a backend.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cake_ops
from cake_ops.bench import arms, grouped, host, records, shapes, suite, timing
from cake_ops.bench.__main__ import main
from cake_ops.bench.devices import CpuDevice, CudaDevice, gpu_events
from cake_ops.bench.report import census_difference, render
from cake_ops.bench.timing import MARKER, Event

META = dict.fromkeys(records.META_KEYS, "x")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def poison():
    """The harness poisons by itself; a kernel that does it here would be in every census."""


class Launches(TorchDispatchMode):
    """The names of the matrix products that pass below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "mm" in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class FakeGpu(CpuDevice):
    """A virtual clock and a timeline; every matrix product takes 10 us, every launch 1 us."""

    sees_kernels = True

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.label = "fake GPU"
        self.now = 0
        self.lost = lost  # indices of events that the profiler loses

    def _run(self, name: str, us: int) -> None:
        self._events.append(Event(name, self.now + 1000, self.now + 1000 * (us + 1)))
        self.now += 1000 * (us + 1)

    def before_call(self, spin_us):
        for name in (f"at::{MARKER}(long)", "fill", f"at::{MARKER}(long)"):
            self._run(name, 3)

    def call(self, fn):
        with Launches() as launches:
            fn()
        for name in launches.names:
            self._run(name, 10)

    def stop(self):
        kept = [event for i, event in enumerate(self._events) if i not in self.lost]
        random.Random(0).shuffle(kept)  # a profiler promises no order
        return kept

    def clock_mhz(self):
        return 1500

    def capture(self, fn):
        outputs = fn()

        def replay():
            for name, value in fn().items():
                outputs[name].copy_(value)

        return replay, outputs


def pure_kernels(device: FakeGpu, **us: int):
    """Arms that are one kernel each of a given duration, run on the fake timeline."""
    device.call = lambda fn: device._run(*fn())
    return {name: (lambda name=name, t=t: (f"k_{name}", t)) for name, t in us.items()}


# ---- rows


def test_group_sizes_add_up_and_have_their_shape():
    assert shapes.balanced(4, 112576) == (28144,) * 4
    assert shapes.skewed(136064) == (68032, 34016, 17008, 17008)
    ascending = shapes.one_empty(112576, ascending=True)
    assert ascending[0] == 0 and list(ascending) == sorted(ascending)
    assert shapes.one_empty(112576, ascending=False) == ascending[::-1]
    sizes = shapes.lognormal(32, 131072)
    assert sum(sizes) == 131072 and sizes == shapes.lognormal(32, 131072)
    many = shapes.lognormal(4096, 4096 * 1000)
    assert statistics.pstdev(many) / statistics.fmean(many) == pytest.approx(0.35, abs=0.02)
    assert shapes.balanced(8, 1001) == (126, 125, 125, 125, 125, 125, 125, 125)


def test_the_large_rows_are_those_of_the_method():
    cases = shapes.large_cases()
    gate_up = [case for case in cases if case.family == "gate_up"]
    assert {(c.n, c.k) for c in gate_up} == {(4096, 6144)}
    assert {(c.n, c.k) for c in cases if c.family == "down"} == {(6144, 2048)}
    assert len(gate_up) == 14 and len(cases) == 42
    assert {(c.experts, c.m) for c in cases} == {
        *((4, 112576), (4, 136064)),
        *((8, 131072), (16, 131072), (32, 131072)),
    }
    ops = {row.op for row in shapes.rows_of(cases)}
    assert ops == {"fwd", "dgrad", "dW", "dW fp32", "ckpt", "ckpt ES", "block", "block ES"}


def test_the_small_rows_cover_their_ranges():
    cases = shapes.small_cases()
    assert {case.experts for case in cases} == {8, 16, 32, 64}
    rows = {size for case in cases for size in case.sizes}
    assert min(rows) == 16 and max(rows) == 512
    assert {min(min(c.n, c.k) for c in cases), max(max(c.n, c.k) for c in cases)} == {512, 4096}


def test_row_names_are_unique_and_select():
    rows = shapes.rows_of(shapes.large_cases() + shapes.small_cases())
    assert len({row.name for row in rows}) == len(rows)
    chosen = shapes.select(rows, "E8 .*balanced", ["dgrad"], ["graph"])
    assert [row.name for row in chosen] == [
        "gate_up E8 M131072 balanced, dgrad, graph",
        "down E8 M131072 balanced, dgrad, graph",
    ]
    assert shapes.select(rows) == rows


def test_every_family_fits_in_eight_minutes_and_quick_in_one():
    rows = shapes.rows_of(shapes.large_cases() + shapes.small_cases())
    for family in ("gate_up", "down", "block", "small"):
        part = shapes.select(rows, f"^{family}")
        assert 30 < suite.total_seconds(grouped.SUITE, part, arms.ARMS, 10) < 480
    quick = shapes.quick_rows()
    assert quick and suite.total_seconds(grouped.SUITE, quick, arms.ARMS, 10) < 50


def test_flops_count_every_gemm_of_a_call():
    case = shapes.Case("gate_up", (3, 0, 5), 16, 32, "t")
    one = 2 * 8 * 16 * 32
    for op, gemms in {"fwd": 1, "dgrad": 1, "dW": 1, "dW fp32": 1, "ckpt": 4, "ckpt ES": 3}.items():
        assert shapes.flops(case, op) == gemms * one
    block = shapes.Case("block", (3, 0, 5), 16, 32, "t")
    down = 2 * 8 * 32 * 8
    assert shapes.flops(block, "block") == 4 * one + 4 * down
    assert shapes.flops(block, "block ES") == 4 * one + 3 * down


# ---- timing


def test_groups_rotate_and_mirror():
    names = ["a", "b", "c"]
    orders = [timing.arm_order(names, group) for group in range(6)]
    assert orders[:4] == [list("abc"), list("cba"), list("bca"), list("acb")]
    for name in names:  # over a whole round every arm has been everywhere equally often
        assert sorted(order.index(name) for order in orders) == [0, 0, 1, 1, 2, 2]


def test_measure_attributes_every_kernel():
    device = FakeGpu()
    calls = pure_kernels(device, cake=10, torch=13, cublas=9)
    timings, clocks = timing.measure(device, calls, groups=10)
    assert {name: t.us for name, t in timings.items()} == {
        "cake": [10.0] * 10,
        "torch": [13.0] * 10,
        "cublas": [9.0] * 10,
    }
    assert timings["torch"].census == {"k_torch": 1}
    assert clocks == [1500, 1500]


def test_an_interval_spans_all_kernels_and_gaps():
    assert timing.interval_us([Event("b", 5000, 9000), Event("a", 1000, 12000)]) == 11.0


def test_events_lost_in_the_first_group_do_no_harm():
    device = FakeGpu(lost=(0, 1, 2, 5))
    timings, _ = timing.measure(device, pure_kernels(device, cake=10, torch=13), groups=3)
    assert timings["cake"].us == [10.0] * 3 and timings["torch"].us == [13.0] * 3


@pytest.mark.parametrize("lost", range(8, 8 + 4))  # the first group is two calls of four events
def test_an_event_lost_later_is_an_error(lost):
    device = FakeGpu(lost=(lost + 4,))
    calls = pure_kernels(device, cake=10, torch=13)
    with pytest.raises(RuntimeError, match="events were lost|launched"):
        timing.measure(device, calls, groups=3)


def test_too_few_markers_are_an_error():
    with pytest.raises(RuntimeError, match="recorded 0 of 2 markers"):
        timing.split_calls([Event("k", 0, 1)], 1)


def test_an_arm_that_launches_differently_each_time_is_an_error():
    device = FakeGpu()
    calls = pure_kernels(device, cake=10, torch=13)
    names = itertools.cycle("xyz")
    calls["torch"] = lambda: (next(names), 13)
    with pytest.raises(RuntimeError, match="torch launched"):
        timing.measure(device, calls, groups=4)


def test_gpu_events_are_those_of_the_gpu():
    kinds = torch.autograd.DeviceType

    def recorded(name, kind, start, duration):
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: kind,
            start_ns=lambda: start,
            duration_ns=lambda: duration,
        )

    raw = [recorded("cudaLaunchKernel", kinds.CPU, 1, 2), recorded("k", kinds.CUDA, 5, 7)]
    assert gpu_events(raw) == [Event("k", 5, 12)]


def test_host_time_is_the_median_of_rounds(monkeypatch):
    clock = itertools.count(step=0.5)  # every look at the clock is half a second later
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    us = timing.host_us(CpuDevice(), {"a": lambda: calls.append(1)}, calls=10, rounds=3)
    assert us == {"a": pytest.approx(0.5 / 10 * 1e6)} and len(calls) == 30


# ---- the whole pipeline


def run(device, rows, path=None, which=arms.ARMS, groups=4):
    found = records.Results(META, path)
    failures = suite.run(grouped.SUITE, rows, device, which, groups, 0, found)
    return found, failures


def test_the_pipeline_on_a_fake_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(
        suite,
        "host_us",
        lambda device, arms, calls: timing.host_us(device, arms, calls=2, rounds=1),
    )
    rows = shapes.rows_of(shapes.smoke_cases())
    found, failures = run(FakeGpu(), rows, tmp_path / "r.json")
    assert failures == 0
    assert [records.row_key(row) for row in found.rows] == [
        (r.case.name, r.op, r.mode) for r in rows
    ]
    for row, detail in zip(found.rows, found.details, strict=True):
        expected = {"cake", "control", "torch", "cublas"} | (
            {"inforward"} if row["op"] in arms.CHECKPOINTED else set()
        )
        assert set(row["arms"]) == expected and set(row["ratios"]) == expected - {"cake"}
        assert not detail["skipped"]
        for arm, kernels in detail["census"].items():  # 10 us a kernel, 1 us between two
            assert row["arms"][arm]["median_us"] == 11 * sum(kernels.values()) - 1
        assert row["ratios"]["control"] == [1.0, 1.0, 1.0]
        assert bool(detail["host_us"]) == (row["mode"] == "eager")
    text = render(records.Results.load(tmp_path / "r.json"))
    spared = text[text.index("early stop spares in ckpt, graph") :]
    assert "  cake: 1 x grouped_mm (2 rows)" in spared  # exactly one forward GEMM
    assert "  inforward: nothing (2 rows)" in spared
    assert "  torch: 1 x _grouped_mm (2 rows)" in spared


def test_an_arm_that_fails_is_left_out_with_its_reason(monkeypatch):
    build = arms.build

    def broken(arm, op, data):
        if arm == "torch":
            raise ValueError("no such kernel\nlong trace")
        call = build(arm, op, data)
        return (lambda: {k: v * 1.5 for k, v in call().items()}) if arm == "cublas" else call

    monkeypatch.setattr(arms, "build", broken)
    rows = shapes.rows_of(shapes.smoke_cases()[:1], ("eager",))[:1]
    found, failures = run(FakeGpu(), rows)
    assert failures == 0 and set(found.rows[0]["arms"]) == {"cake", "control"}
    assert found.details[0]["skipped"]["torch"] == "no such kernel"
    assert found.details[0]["skipped"]["cublas"].startswith("inaccurate y: relative error 5.00e-01")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_output_left_unwritten_is_found(monkeypatch, mode):
    """The check must not be satisfied by what an earlier call left in the same memory."""
    once = {"done": False}
    build = arms.build

    def lazy(arm, op, data):
        call = build(arm, op, data)
        kept = call()

        def second_time_nothing():
            if not once["done"]:
                once["done"] = True
                return kept
            return {k: v.clone() for k, v in kept.items()}  # whatever is in the poisoned memory

        return second_time_nothing

    monkeypatch.setattr(arms, "build", lazy)
    rows = shapes.rows_of(shapes.smoke_cases()[:1], (mode,))[:1]
    found, failures = run(FakeGpu(), rows, which=["cake"])
    assert failures == 1 and not found.rows


def test_a_row_that_cake_cannot_run_fails_and_the_others_go_on(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("cake is broken")

    monkeypatch.setattr(cake_ops, "grouped_mm_dgrad", broken)
    rows = shapes.rows_of(shapes.smoke_cases()[:1], ("eager",))[:3]
    found, failures = run(FakeGpu(), rows)
    assert failures == 1 and [row["op"] for row in found.rows] == ["fwd", "dW"]
    assert "FAILED gate_up E4 M104 tiny, dgrad, eager: cake is broken" in capsys.readouterr().err


# ---- the commands


def test_grouped_smoke_run_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "r.json"
    command = [
        "grouped",
        "--device",
        "cpu",
        "--rows",
        "^down",
        "--ops",
        "fwd,ckpt ES",
        "--groups",
        "2",
    ]
    assert main([*command, "--arms", "torch", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "CPU smoke run" in out and "fwd, eager" in out and "ckpt ES, eager" in out
    document = json.loads(path.read_text())
    assert "CPU smoke run" in document["meta"]["gpu"]
    assert [list(row["arms"]) for row in document["rows"]] == [["cake", "torch"]] * 2


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch, capsys):
    run_row, count = suite.run_row, itertools.count()

    def interrupted(*args):
        if next(count) == 2:
            raise KeyboardInterrupt
        return run_row(*args)

    monkeypatch.setattr(suite, "run_row", interrupted)
    path = tmp_path / "r.json"
    status = main(
        ["grouped", "--device", "cpu", "--groups", "2", "--arms", "torch", "--json", str(path)]
    )
    assert status == 130 and len(json.loads(path.read_text())["rows"]) == 2
    assert "interrupted" in capsys.readouterr().err


def test_grouped_lists_and_explains(capsys):
    assert main(["grouped", "--list", "--rows", "^gate_up E8 M131072 balanced, fwd"]) == 0
    out = capsys.readouterr().out
    assert (
        out.splitlines()[0] == "gate_up E8 M131072 balanced, fwd, eager" and "2 rows, about" in out
    )
    assert main(["grouped", "--list", "--rows", "nothing"]) == 2
    with pytest.raises(SystemExit, match="unknown op 'fwdd'; there are fwd, dgrad"):
        main(["grouped", "--ops", "fwdd"])


def test_host_judges_by_the_median_round():
    us = {"cake": [4.0, 9.0, 4.4], "torch.mm": [1.0, 1.0, 1.0]}
    assert host.judge(us, host.Budget("torch.mm", 4.5)) == (pytest.approx(4.4), True)
    assert host.judge(us, host.Budget("torch.mm", 4.3))[1] is False


@pytest.mark.parametrize("limit, status", [(1e9, 0), (0.0, 1)])
def test_host_checks_its_budgets(monkeypatch, capsys, tmp_path, limit, status):
    budgets = {mode: host.Budget("torch.mm", limit) for mode in host.NULL_BUDGETS}
    monkeypatch.setattr(host, "NULL_BUDGETS", budgets)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "host.json"
    assert (
        main(["host", "--rounds", "3", "--calls", "20", "--check", "--json", f"{file}"]) == status
    )
    out = capsys.readouterr().out
    line = r"cake \d+\.\d+, torch\.ops\.cake \d+\.\d+, torch\.mm \d+\.\d+; cake / torch\.mm"
    assert len(re.findall(line, out)) == 4
    assert out.count("within the budget" if status == 0 else "OVER the budget") == 2
    document = json.loads(file.read_text())
    assert [row["within"] for row in document["rows"]] == [status == 0] * 2
    assert set(document["meta"]) >= set(records.META_KEYS) and document["breakdown"] == {}


def test_host_lets_the_arms_of_all_modes_take_turns_in_every_round():
    calls: list[str] = []
    cases = {
        mode: {arm: (calls.append, (f"{mode} {arm}",)) for arm in ("cake", "torch.mm")}
        for mode in ("no grad", "grad")
    }
    budgets = dict.fromkeys(cases, host.Budget("torch.mm", 1e9))
    rows = host._report("null kernels", cases, budgets, SimpleNamespace(rounds=8, calls=3))
    assert [row["mode"] for row in rows] == list(cases) and all(row["within"] for row in rows)
    warm, rounds = calls[:12], calls[12:]
    assert len(rounds) == 8 * 12 and len(set(warm)) == 4
    for i in range(0, len(rounds), 12):
        assert sorted(rounds[i : i + 12]) == sorted(warm)


def test_host_shows_undisturbed_times_beside_what_it_judges(monkeypatch, capsys):
    slow = [1.0] * 8 + [1.5] * 12
    us = {("grad", "cake"): [4.0 * s for s in slow], ("grad", "torch.mm"): [2.0] * 20}
    monkeypatch.setattr(host, "rounds_us", lambda *_: us)
    budget = host.Budget("torch.mm", 2.5, 1.5)
    args = SimpleNamespace(rounds=20, calls=100)
    cases = {"grad": dict.fromkeys(("cake", "torch.mm"))}
    (row,) = host._report("grouped", cases, {"grad": budget}, args)
    assert row["section"] == "grouped" and row["ratio"] == 3.0 and not row["within"]
    assert row["undisturbed_us"] == {"cake": 4.0, "torch.mm": 2.0}
    judged, below = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert judged == (
        "grad cake 6.00, torch.mm 2.00; cake / torch.mm 3.00 (OVER the budget of 2.50, goal 1.50)"
    )
    assert below == "cake 4.00, torch.mm 2.00; cake / torch.mm 2.00"


def test_host_runs_no_kernel_and_builds_a_graph_only_with_grad():
    cases = host.null_cases()
    with cake_ops.testing.null_kernels():
        for mode, calls in cases.items():
            fn, tensors = calls["cake"]
            assert fn(*tensors).requires_grad == (mode == "grad")


def test_host_compares_equal_products_of_the_router():
    cases = host.router_cases("cpu")
    assert set(cases) == set(host.ROUTER_BUDGETS)
    for calls in cases.values():
        cake, mm = (fn(*tensors) for fn, tensors in calls.values())
        torch.testing.assert_close(cake, mm, rtol=1e-4, atol=1e-4)


# ---- on the GPU


@pytest.mark.gpu
def test_measure_on_the_gpu_sees_the_kernels():
    device = CudaDevice()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    calls = {"one": lambda: a @ a, "two": lambda: (a @ a, a @ a)}
    timings, clocks = timing.measure(device, calls, groups=6)
    assert sum(timings["two"].census.values()) == 2 * sum(timings["one"].census.values())
    assert 1.7 < statistics.median(timings["two"].us) / statistics.median(timings["one"].us) < 2.3
    assert all(clock is None or 200 < clock < 3000 for clock in clocks)
    replay, outputs = device.capture(lambda: {"y": a @ a})
    outputs["y"].zero_()
    graph, _ = timing.measure(device, {"graph": replay}, groups=3)
    assert graph["graph"].census == timings["one"].census
    torch.testing.assert_close(outputs["y"], a @ a)


@pytest.mark.gpu
def test_a_captured_call_keeps_its_operands():
    device = CudaDevice()

    def captured():
        operand = torch.ones(1 << 20, device="cuda")
        return device.capture(lambda: {"y": operand * 2})

    replay, outputs = captured()
    others = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    outputs["y"].zero_()
    replay()
    assert bool((outputs["y"] == 2).all()) and len(others) == 4


@pytest.mark.gpu
def test_the_pipeline_on_the_gpu(tmp_path):
    rows = shapes.rows_of(shapes.smoke_cases())
    found, failures = run(CudaDevice(), rows, tmp_path / "r.json")
    assert failures == 0 and len(found.rows) == len(rows)
    census = {
        (r["shape"], r["op"], r["mode"]): d["census"]["cake"]
        for r, d in zip(found.rows, found.details, strict=True)
    }
    for (shape, op, mode), kernels in census.items():
        if op == "ckpt":
            spared = census_difference(kernels, census[shape, "ckpt ES", mode])
            assert list(spared.values()) == [1], spared
