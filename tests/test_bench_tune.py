"""``bench router --tune`` on a fake GPU, and the breakdown of a call's host time on fake parts."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from test_bench import FakeGpu

import cake_ops
from cake_ops.bench import breakdown, host, router_tune
from cake_ops.bench.__main__ import main
from cake_ops.bench.devices import CudaDevice
from cake_ops.bench.router_cases import RouterCase, RouterData
from cake_ops.bench.timing import Event
from cake_ops.cuda import launch
from cake_ops.cuda.router_config import LAYOUTS
from cake_ops.cuda.router_verdicts import TABLE
from cake_ops.routing import reset_router_routes, router_routes

GPU = "Fake GPU 1"
SMS = 132


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    """No test reads or writes the measurements of whoever runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reset_router_routes()
    yield
    reset_router_routes()


class TuningGpu(FakeGpu):
    """A call is a launch of a configuration, which takes the time that ``us`` gives it."""

    def __init__(self, us) -> None:
        super().__init__()
        self._us = us

    def capture(self, fn):
        fn()
        return fn, None

    def call(self, fn):
        us = self._us(fn())
        begin = self.now
        self.now += 1000 * (us + 1)
        self._events.append(Event("kernel", begin, begin + 1000 * us))


@pytest.fixture
def candidates(monkeypatch):
    """Kernels on a machine without a GPU: a launch computes the product and returns its configuration."""

    def candidate_route(op, config, out, a, b):
        def run(out, a, b):
            out.copy_(getattr(cake_ops, op)(a, b))
            return config.name

        return SimpleNamespace(run=run)

    monkeypatch.setattr(router_tune, "candidate_route", candidate_route)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_problems_are_every_operator_and_dtype_with_kernels():
    found = list(router_tune.problems(RouterCase(4096, 64), SMS))
    kinds = {(p.op, p.dtype) for p in found}
    assert {(op, "f32") for op in LAYOUTS} <= kinds
    for problem in found:
        assert len(set(problem.configs)) == len(problem.configs) >= 1
        assert {c.b_dtype for c in problem.configs} == {problem.dtype}
        assert {c.layout for c in problem.configs} == {LAYOUTS[problem.op]}


def test_windows_cover_every_number_of_tokens_once():
    problem = next(router_tune.problems(RouterCase(4096, 64), SMS))
    times = {
        router_tune.Problem(problem.op, RouterCase(4096, t), "f32", problem.configs): {
            config.name: 10.0 + i for i, config in enumerate(problem.configs)
        }
        for t in router_tune.TOKENS
    }
    routes = router_tune.verdicts(times)
    assert routes[0].min_T == 1 and routes[-1].max_T is None
    for route, following in itertools.pairwise(routes):
        assert following.min_T == route.max_T + 1
    for route in routes:
        route.check()
        assert (route.N, route.H, route.us) == (256, 4096, 10.0)
        assert route.config == problem.configs[0].name


def test_tuning_stores_the_fastest_and_uses_it_at_once(candidates, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(router_tune, "TOKENS", (8, 16))
    last = {}  # the slowest in the model's eyes is the fastest here

    def us(config):
        return 5 if config in last else 20

    for case in (RouterCase(64, 8, 16), RouterCase(64, 16, 16)):
        last |= {p.configs[-1].name: p for p in router_tune.problems(case, SMS)}
    table = tmp_path / "times.json"
    path = router_tune.tune(TuningGpu(us), [64], 16, 0, table)
    stored = json.loads(path.read_text())
    problems = [p for t in (8, 16) for p in router_tune.problems(RouterCase(64, t, 16), SMS)]
    assert len(stored) == len(problems) and {row["gpu"] for row in stored} == {GPU}
    assert {row["config"] for row in stored} <= set(last) and {row["us"] for row in stored} == {5.0}
    measured = json.loads(table.read_text())["rows"]
    assert [len(row["us"]) for row in measured] == [len(p.configs) for p in problems]
    for problem in problems:
        sizes = (problem.dtype, problem.case.tokens, 16, 64, SMS)
        config, source = TABLE.choose(GPU, problem.op, *sizes)
        assert source == "tuned" and config.name in last
    assert capsys.readouterr().out.count(" us; the model's ") == len(problems)

    router_tune.tune(TuningGpu(us), [128], 16, 0)  # another width: the first one's verdicts stay
    assert {route.H for route in router_routes() if route.source == "tuned"} == {64, 128}
    router_tune.tune(TuningGpu(us), [64], 16, 0)  # again: replaced, not doubled
    assert sum(route.source == "tuned" for route in router_routes()) == 2 * len(problems)


def test_an_inaccurate_configuration_is_an_error(monkeypatch):
    def candidate_route(op, config, out, a, b):
        return SimpleNamespace(run=lambda out, a, b: None)  # leaves the poison

    monkeypatch.setattr(router_tune, "candidate_route", candidate_route)
    case = RouterCase(64, 8, 16)
    data = RouterData.random(case, torch.device("cpu"), 0)
    with pytest.raises(RuntimeError, match="inaccurate y: relative error nan"):
        router_tune.measure_case(
            TuningGpu(lambda config: 5), data, list(router_tune.problems(case, SMS))
        )


def test_tune_needs_a_gpu_and_integers(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["router", "--tune"]) == 2
    assert main(["router", "--tune", "--device", "cpu"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["router", "--tune", "--json", "/no/such/folder/t.json"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--hidden: not a list of integers"):
        main(["router", "--tune", "--hidden", "4096,x"])
    for sizes in (["--hidden", "64,0"], ["--experts", "7"]):
        with pytest.raises(SystemExit, match="positive widths and --experts at least 8, got "):
            main(["router", "--tune", *sizes])


# ---- the breakdown of a call's host time


def test_the_parts_of_a_call_add_up():
    undisturbed = {
        "call": 15.5,
        "launch": 12.5,
        "allocation": 2.5,
        "tensor maps": 1.5,
        "driver": 4.7,
        "nothing": 0.5,
    }
    # One lucky round, and a host that is slow for most of the others.
    us = {part: [1.7 * t, 0.9 * t, t, *[1.7 * t] * 8] for part, t in undisturbed.items()}
    found = breakdown.breakdown(us)
    assert found == pytest.approx(
        {
            "whole call": 15.0,
            "recognition": 3.0,
            "allocation": 2.0,
            "tensor maps": 1.0,
            "driver's launch": 4.2,
            "rest": 12.0 - 2.0 - 1.0 - 4.2,
        }
    )
    assert sum(found.values()) == pytest.approx(2 * found["whole call"])


def test_launches_are_recorded_and_made(monkeypatch):
    made = []
    driver = SimpleNamespace(cuLaunchKernelEx=lambda *args: made.append(args) or (0,), other=7)
    monkeypatch.setattr(launch, "driver", lambda: driver)
    with breakdown.recorded_launches() as launches:
        assert launch.driver().cuLaunchKernelEx("config", "kernel", 1, 0) == (0,)
        assert launch.driver().other == 7
    assert launches == made == [("config", "kernel", 1, 0)]
    assert launch.driver() is driver


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["grouped_mm", "router_mm"])
def test_the_breakdown_on_the_gpu(monkeypatch, op):
    monkeypatch.undo()  # the poison would be timed too
    grouped, routed = host.cuda_cases()["no grad"], host.router_cases()["fwd"]
    tensors = {"grouped_mm": grouped, "router_mm": routed}[op]["cake"][1]
    if cake_ops.explain(op, *tensors).path != "kernel":
        pytest.skip("no kernels for this GPU")
    parts, held = breakdown.timed_parts(op, tensors)
    found = breakdown.breakdown(host.rounds_us(parts, 300, 5, torch.cuda.synchronize))
    assert held is not None and found["whole call"] < 100
    assert all(us > 0 for part, us in found.items() if part != "rest")
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_tuning_one_size_on_the_gpu(monkeypatch):
    device = CudaDevice()
    case = RouterCase(512, 64, 64)
    data = RouterData.random(case, device.torch_device, 0)
    if cake_ops.explain("router_mm", data.x, data.w).path != "kernel":
        pytest.skip("no kernels for this GPU")
    monkeypatch.setattr(router_tune, "TOKENS", (64,))
    problems = list(router_tune.problems(case, SMS))
    times = router_tune.measure_case(device, data, problems)
    assert list(times) == problems
    assert all(0.5 < us < 1000 for row in times.values() for us in row.values())
    for route in router_tune.verdicts(times):
        route.check()
