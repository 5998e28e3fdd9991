"""The router benchmark: its rows, its check, its arms on fake libraries, the choice of experts, the report."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from test_bench import META, FakeGpu

import cake_ops
from cake_ops.bench import records, router, router_arms, router_cases, router_experts, suite
from cake_ops.bench.__main__ import main
from cake_ops.bench.cublas import CublasError
from cake_ops.bench.devices import CudaDevice
from cake_ops.bench.report import render
from cake_ops.bench.router_cases import RouterCase, RouterData, measure_outputs
from cake_ops.bench.shapes import Row

CPU = torch.device("cpu")
CASE = RouterCase(64, 33, 24)


@pytest.fixture(autouse=True)
def poison():
    """The harness poisons by itself; a kernel that does it here would be in every census."""


@pytest.fixture
def data() -> RouterData:
    return RouterData.random(CASE, CPU, seed=1)


# ---- rows


def test_the_rows_are_the_nine_shapes_in_every_operation_and_mode():
    rows = router.Router().rows("all")
    assert len(rows) == len({row.name for row in rows}) == 9 * 5 * 2
    assert {(row.case.hidden, row.case.tokens, row.case.experts) for row in rows} == {
        (h, t, 256) for h in (4096, 5120, 6144) for t in (64, 256, 1024)
    }
    assert [row.op for row in rows[:10:2]] == ["fwd", "dgrad", "wgrad", "bwd", "2fwd+bwd"]
    assert rows[0].name == "H4096 T64, fwd, eager" and rows[1].mode == "graph"


def test_the_whole_run_fits_in_its_time_and_quick_in_a_minute():
    it = router.Router()
    assert 30 < suite.total_seconds(it, it.rows("all"), it.arms, it.groups) < 150
    assert suite.total_seconds(it, it.rows("quick"), it.arms, it.groups) < 60


def test_flops_count_every_product():
    one = 2 * 33 * 64 * 24
    counts = {"fwd": 1, "dgrad": 1, "wgrad": 1, "bwd": 2, "2fwd+bwd": 4}
    assert {op: router_cases.flops(CASE, op) / one for op in router_cases.OPS} == counts


# ---- the check


def test_the_exact_results_are_those_of_autograd(data):
    x, w = (t.double().requires_grad_() for t in (data.x, data.w))
    y = x @ w.t()
    dx, dw = torch.autograd.grad(y, (x, w), data.g.double())
    for name, value in {"y": y.detach(), "dx": dx, "dw": dw}.items():
        torch.testing.assert_close(data.exact[name], value, rtol=1e-12, atol=1e-12)
    assert torch.equal(data.exact_logits(), data.exact["y"])


def test_figures_of_accuracy_are_of_all_outputs(data):
    outputs = {name: data.exact[name].float() for name in ("y", "dx", "dw")}
    error, figures = measure_outputs(data, outputs, 2e-6)
    assert 1e-9 < error < 1e-7 and 0 < figures["max_error"] < 1e-7 and figures["top8"] == 1.0
    scaled = data.exact["dw"] * (1 + 1e-4)
    error, figures = measure_outputs(data, {"dw": scaled}, 1e-3)
    assert error == pytest.approx(1e-4) and figures == {"max_error": pytest.approx(1e-4)}


@pytest.mark.parametrize("name", ["y", "y again", "dx", "dw"])
@pytest.mark.parametrize("wrong", ["row", "nan", "element", "shape"])
def test_a_wrong_output_is_found(data, name, wrong):
    output = data.exact[name.split()[0]].float()
    measure_outputs(data, {name: output}, 2e-6)
    if wrong == "row":
        output[5] = output[6]
    elif wrong == "nan":
        output[-1, -1] = float("nan")
    elif wrong == "element":
        output[3, 2] += 1e-3 * output.abs().max()
    else:
        output = output[1:]
    with pytest.raises(RuntimeError, match="inaccurate|has shape"):
        measure_outputs(data, {name: output}, 2e-6)


def test_a_token_with_another_expert_lowers_the_agreement(data):
    y = data.exact["y"].float()
    order = y[4].argsort(descending=True)
    y[4, order[[7, 8]]] = y[4, order[[8, 7]]]
    assert measure_outputs(data, {"y": y}, 1.0)[1]["top8"] == pytest.approx(32 / 33)
    y[4, order[[0, 1]]] = y[4, order[[1, 0]]]  # the order of the eight does not matter
    assert measure_outputs(data, {"y": y}, 1.0)[1]["top8"] == pytest.approx(32 / 33)


# ---- arms


class FakeLibraries(router_arms.Libraries):
    """cuBLAS and cuBLASLt by torch, on a machine without either."""

    def __init__(self, monkeypatch) -> None:
        super().__init__(FakeGpu())
        self._device.torch_device = torch.device("cuda", 0)
        monkeypatch.setattr(router_arms, "Sgemm", lambda device: torch.mm)
        monkeypatch.setattr(router_arms, "Lt", lambda device: FakeLt())


class FakeAlgorithm:
    """Multiplies with a relative error, in so many products."""

    class problem:
        compute = "FP32"

    def __init__(self, error: float, products: int = 1) -> None:
        self.error, self.products = error, products

    def __call__(self, a, b):
        if self.error < 0:
            raise CublasError("cublasLtMatmul failed with status 15")
        for _ in range(self.products):
            out = torch.mm(a, b)
        return out * (1 + self.error)


class FakeLt:
    """The fastest proposal is inaccurate, the next does not run, the third is the best, the first is slow."""

    def algorithms(self, a, b):
        return [FakeAlgorithm(0.0, 3), FakeAlgorithm(1e-4), FakeAlgorithm(-1), FakeAlgorithm(0.0)]


OUTPUTS = {
    "fwd": ["y"],
    "dgrad": ["dx"],
    "wgrad": ["dw"],
    "bwd": ["dx", "dw"],
    "2fwd+bwd": ["y", "y again", "dx", "dw"],
}


@pytest.mark.parametrize("op", list(router_cases.OPS))
@pytest.mark.parametrize("arm", router_arms.ARMS)
def test_every_arm_computes_the_same_products(arm, op, data, monkeypatch):
    build = FakeLibraries(monkeypatch).build(arm, op, data)
    outputs = build()
    assert list(outputs) == OUTPUTS[op]
    assert all(t.is_contiguous() for t in outputs.values())
    dtype = torch.bfloat16 if arm == "bf16" else torch.float32
    assert all(t.dtype == dtype for t in outputs.values())
    error, _ = measure_outputs(data, outputs, router_arms.tolerance(arm))
    assert (error > 1e-3) == (arm == "bf16")
    assert all(build()[name] is not outputs[name] for name in outputs)  # new memory every call


def test_the_modes_of_cake_reach_its_operators(data, monkeypatch):
    seen = []

    def spy(name):
        real = getattr(cake_ops, name)

        def call(*args, deterministic):
            seen.append((name, deterministic))
            return real(*args, deterministic=deterministic)

        monkeypatch.setattr(cake_ops, name, call)

    for name in ("router_mm", "router_mm_dgrad", "router_mm_wgrad"):
        spy(name)
    libraries = FakeLibraries(monkeypatch)
    for arm, deterministic in (("cake", True), ("control", True), ("cake-nondet", False)):
        seen.clear()
        libraries.build(arm, "2fwd+bwd", data)()
        names = ["router_mm", "router_mm", "router_mm_dgrad", "router_mm_wgrad"]
        assert seen == [(name, deterministic) for name in names]


def test_tf32_is_on_for_its_arm_alone(data, monkeypatch):
    seen = []
    mm = torch.mm

    def spy(a, b):
        seen.append(torch.get_float32_matmul_precision())
        return mm(a, b)

    monkeypatch.setattr(torch, "mm", spy)
    libraries = FakeLibraries(monkeypatch)
    with router_arms.fp32_precision("highest"):
        libraries.build("tf32", "fwd", data)()
        libraries.build("torch", "fwd", data)()
    assert seen == ["high", "highest"]


def test_cublaslt_is_the_fastest_accurate_proposal(data, monkeypatch):
    libraries = FakeLibraries(monkeypatch)
    libraries.build("cublaslt", "bwd", data)
    libraries.build("cublaslt", "dgrad", data)
    assert list(libraries.choices) == ["H64 T33 dgrad", "H64 T33 wgrad"]
    text = "FP32 proposal 3 of 4 at 10.00 us; proposal 0 at 32.00 us"
    assert set(libraries.choices.values()) == {text}
    bad = [FakeAlgorithm(1e-4), FakeAlgorithm(-1)]
    with pytest.raises(router_arms.Unavailable, match="no FP32 algorithm for fwd"):
        router_arms.fastest(FakeGpu(), "fwd", data, bad)


# ---- experts


def test_ties_are_told_from_wrong_experts():
    """Twelve experts, the logit of expert i being 12 - i; the eighth largest is expert 7's, 5."""
    exact = torch.arange(12, 0, -1).double().repeat(4, 1)
    exact[1, 8] = 5 - 1e-9  # rounds to 5: a tie with the eighth
    exact[2, 8] = 5 - 2.0**-21 * 1.5  # one and a half units in the last place, which is 2^-21
    logits = exact.float()
    assert router_experts.tally(logits, exact)["differ"] in (0, 1)  # the tie is anybody's
    swapped = logits.clone()
    swapped[1:3, 7], swapped[1:3, 8] = 4.5, 5.5
    assert router_experts.tally(swapped, exact) == {
        "tokens": 4,
        "differ": 2,
        "ties": 1,
        "beyond_ties": 1,
        "widest_ulp": pytest.approx(1.5),
    }


def test_experts_are_compared_over_whole_batches_of_fresh_tokens():
    seen = []

    def wrong(x, w):
        seen.append(x)
        return torch.mm(x, w.t()).neg()

    arms = {"cake": cake_ops.router_mm, "wrong": wrong}
    found = router_experts.compare(arms, 64, 100, CPU, 0, batch=40, experts=32)
    assert found["cake"]["tokens"] == found["wrong"]["tokens"] == 120
    assert found["cake"]["beyond_ties"] == 0
    assert found["wrong"]["beyond_ties"] > 100 and found["wrong"]["widest_ulp"] > 1e3
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1])


# ---- the whole pipeline


def run(rows, path, tokens=0):
    it = router.Router(tokens)
    found = records.Results(META, path)
    return it, found, suite.run(it, rows, FakeGpu(), it.arms, 4, 0, found)


def test_the_pipeline_on_a_fake_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "host_us", lambda device, arms, calls: dict.fromkeys(arms, 7.0))
    rows = router_cases.rows_of([CASE])
    _, found, failures = run(rows, tmp_path / "r.json", tokens=64)
    assert failures == 0 and len(found.rows) == 10
    expected = {"cake", "cake-nondet", "control", "torch", "tf32", "bf16"}
    for row, detail in zip(found.rows, found.details, strict=True):
        assert set(row["arms"]) == expected and set(row["ratios"]) == expected - {"cake"}
        assert list(row["arms"]["cake"]) == ["median_us", "min_us", "max_us", "rel_error"]
        products = {"bwd": 2, "2fwd+bwd": 4}.get(row["op"], 1)
        for kernels in detail["census"].values():  # equal work
            assert sum(kernels.values()) == products
        assert set(detail["skipped"]) == {"cublas", "cublaslt"}
        assert ("top8" in detail["accuracy"]["torch"]) == ("fwd" in row["op"])
        assert bool(detail["host_us"]) == (row["mode"] == "eager")
    found = records.Results.load(tmp_path / "r.json")
    text = render(found)
    assert re.search(r"^  best of torch +geomean 1\.000, below 1 in 0 of 1", text, re.MULTILINE)
    assert "smallest share of tokens with the experts of FP64: cake 1, cake-nondet 1" in text
    assert "host us a call, median of 1 rows under 2 ms: cake 7.0" in text
    assert "note on bf16: operands cast to BF16 beforehand" in text
    title = "experts unlike FP64's"
    assert text.endswith(text[text.index(title) :]) and found.meta[title]["H64 cake"]["differ"] == 0
    assert f"{title}\n  H64 cake: tokens 64, differ 0, ties 0" in text


def test_the_bar_is_the_fastest_fp32_library():
    ratios = {
        "control": 0.9,
        "torch": 2.0,
        "cublas": 1.9,
        "cublaslt": 1.5,
        "tf32": 0.5,
        "bf16": 0.2,
    }
    assert records.best_library({"ratios": {a: [r, r, r] for a, r in ratios.items()}}) == 1.5


def test_a_comparison_that_fails_is_a_failure_of_the_run(tmp_path, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(router_experts, "compare", broken)
    _, found, failures = run([Row(CASE, "fwd", "graph")], tmp_path / "r.json", tokens=64)
    assert failures == 1 and len(found.rows) == 1
    assert "no memory" in capsys.readouterr().err


def test_router_smoke_run_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "r.json"
    command = ["router", "--device", "cpu", "--groups", "2", "--ops", "fwd,2fwd+bwd"]
    assert main([*command, "--tokens", "100", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "CPU smoke run" in out and "2fwd+bwd, eager" in out
    assert "left out in 2 rows: cublaslt: cublaslt needs a CUDA device" in out
    document = json.loads(path.read_text())
    assert len(document["rows"]) == 4
    assert document["meta"]["experts unlike FP64's"]["H64 torch"]["tokens"] == 128
    assert torch.get_float32_matmul_precision() == "highest"


def test_router_lists_its_rows_and_time(capsys):
    assert main(["router", "--list", "--rows", "T64,", "--modes", "graph"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "H4096 T64, fwd, graph" and len(lines) == 3 * 5 + 1
    assert lines[-1].startswith("15 rows, about")


def test_merging_keeps_the_tables_of_both_runs():
    a, b = (records.Results({**META, title: {"n": "t"}}) for title in ("one", "two"))
    a.update(b)
    assert a.meta["one"] == a.meta["two"] == {"n": "t"}


# ---- on the GPU


@pytest.mark.gpu
def test_the_pipeline_on_the_gpu(tmp_path):
    it, device = router.Router(), CudaDevice()
    rows = router_cases.rows_of([RouterCase(4096, 64), RouterCase(1000, 300, 72)])
    found = records.Results(META, tmp_path / "r.json")
    with router_arms.fp32_precision("highest"):
        assert suite.run(it, rows, device, it.arms, 4, 0, found) == 0
    for row, detail in zip(found.rows, found.details, strict=True):
        assert not detail["skipped"] and set(row["arms"]) == set(it.arms)
        fp32 = [a for a in it.arms if a not in ("tf32", "bf16")]
        assert all(row["arms"][a]["rel_error"] < 2e-6 for a in fp32)
        assert row["arms"]["tf32"]["rel_error"] > 1e-5  # or the switch did nothing
    passes = itertools.product(("H4096 T64", "H1000 T300"), ("fwd", "dgrad", "wgrad"))
    assert set(found.meta["algorithms of cublaslt"]) == {" ".join(names) for names in passes}
