"""Which configuration serves a router GEMM: overrides, measurements, shipped verdicts, the model.

The kernels are emulated (:mod:`router_emulator`), and the user's cache is a temporary directory. A test called
after a case (h31, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from forms import CANARY, assert_close, select
from router_emulator import GPU, emulated_router, make

import cake_ops
from cake_ops.cuda import router_routes, router_verdicts
from cake_ops.cuda.router_config import LAYOUTS as KERNEL_LAYOUTS
from cake_ops.cuda.router_config import policies
from cake_ops.cuda.router_verdicts import RouterRoute, cache_dir, store_verdicts, tuned_file
from cake_ops.routing import reset_router_routes, set_router_route
from cake_ops.routing import router_routes as listed

FP32, BF16 = torch.float32, torch.bfloat16
PRODUCTS = ("router_mm", "router_mm_dgrad", "router_mm_wgrad")
TOLERANCE = 5e-7


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    with emulated_router(monkeypatch, str(tmp_path)) as launched:
        yield launched


def kernels_of(emulated: list[str], name: str, form: str) -> list[str]:
    """The kernels of one call on fresh tensors, its result checked."""
    tensors = select(name, *make())
    expected = reference.PRODUCTS[name](*tensors)
    emulated.clear()
    if form == "plain":
        out = getattr(cake_ops, name)(*tensors)
    else:
        out = torch.full(expected.shape, CANARY)
        if form == "out":
            getattr(cake_ops, name)(*tensors, out=out)
        else:
            cake_ops.router_mm_wgrad_(out.zero_(), *tensors)
    assert_close(out, expected, TOLERANCE)
    return [kernel.removeprefix("sm90_router_gemm_") for kernel in emulated]


FORMS = [(name, form) for name in PRODUCTS for form in ("plain", "out")]


@pytest.mark.parametrize("name, form", [*FORMS, ("router_mm_wgrad", "add")])
def test_a_changed_verdict_serves_the_very_next_call(
    emulated: list[str], misses: list[int], name: str, form: str
) -> None:
    """Two partitions of one shape: the plan made under the old verdict must not be launched again."""
    configs = [config.name for config in policies(KERNEL_LAYOUTS[name], "f32")]
    model = kernels_of(emulated, name, form)
    for config in (*configs, configs[0], *reversed(configs)):
        set_router_route(name, config, N=40, H=72)
        assert kernels_of(emulated, name, form) == [config]
        planned = len(misses)
        assert kernels_of(emulated, name, form) == [config]
        assert len(misses) == planned
    reset_router_routes()
    assert kernels_of(emulated, name, form) == model


def test_a_prepared_launch_keeps_its_plan(emulated: list[str]) -> None:
    x, w, _ = make()
    prepared = cake_ops.prepare("router_mm", x, w)
    set_router_route("router_mm", "nt_f32_128x152_k8")
    prepared.launch()
    assert emulated == [prepared.explanation.kernel] != ["sm90_router_gemm_nt_f32_128x152_k8"]


def served(tokens: int, experts: int = 40, hidden: int = 72, dtype=FP32) -> tuple[str, str]:
    """Configuration of a forward, and what chose it."""
    x, w, _ = make(tokens, experts, hidden)
    explanation = cake_ops.explain("router_mm", x.to(dtype), w)
    return explanation.kernel.removeprefix("sm90_router_gemm_"), explanation.chosen_by


def test_windows_of_an_override() -> None:
    big, small = "nt_f32_128x152_k8", "nt_f32_64x8_k8"
    set_router_route("router_mm", big, N=40, H=72, min_T=30, max_T=100)
    assert served(100) == served(30) == (big, "override")
    assert served(29) == served(32), "29 to 32 are one bucket"
    assert served(112) == (big, "override"), "97 to 112 are one bucket"
    for call in ((28,), (113,), (100, 41), (100, 40, 76), (100, 40, 72, BF16)):
        assert served(*call)[1] == "cost model"
    set_router_route(cake_ops.router_mm, small, gpu=GPU)
    assert served(100) == served(3, 7, 8) == (small, "override")
    set_router_route("router_mm", big, gpu="another GPU")
    assert served(100) == (small, "override")
    assert [route.config for route in listed("router_mm")] == [big, small, big]
    assert listed(cake_ops.router_mm_dgrad) == []
    reset_router_routes()
    assert served(100)[1] == "cost model" and listed() == []
    for op in ("grouped_mm", cake_ops.dense_mm, "nonsense"):
        with pytest.raises(RuntimeError, match="op must be one of router_mm, .* got '"):
            listed(op)


def test_an_override_that_cannot_compute_a_call_leaves_it_to_others() -> None:
    """A CTA sums 2048 tokens at most where a cluster can share them."""
    set_router_route("router_mm_wgrad", "tn_f32_64x32_k1")
    for tokens, source in ((2048, "override"), (2049, "cost model")):
        x, _, g = make(tokens)
        assert cake_ops.explain("router_mm_wgrad", g, x).chosen_by == source


@pytest.mark.parametrize(
    "op, config, window, message",
    [
        ("router", "nt_f32_64x8_k8", {}, "op must be one of router_mm, .*got 'router'"),
        (
            "router_mm",
            "nt_f32_64x9_k8",
            {},
            "configurations of router_mm are nt_.*'nt_f32_64x9_k8'",
        ),
        ("router_mm", "nn_f32_64x32_k1", {}, "configurations of router_mm are .*'nn_f32_64x32_k1'"),
        ("router_mm", "nt_f32_64x8_k8", {"N": 0}, "N must be .* got 0"),
        ("router_mm", "nt_f32_64x8_k8", {"H": 1 << 31}, "H must be .* got 2147483648"),
        ("router_mm", "nt_f32_64x8_k8", {"min_T": 0}, "min_T must be from 1 .* got 0"),
        ("router_mm", "nt_f32_64x8_k8", {"min_T": 9, "max_T": 8}, "max_T = 8, got 9"),
        (
            "router_mm_wgrad",
            "tn_f32_64x32_k1",
            {"N": 1 << 30, "H": 1 << 30},
            "serves no call of T >= 1, N = 1073741824, .* at most 2.30 CTAs",
        ),
        (
            "router_mm_wgrad",
            "tn_f32_64x32_k1",
            {"min_T": 2049},
            "serves no call of T >= 2049, N = any, H = any: .* 2048 tokens a CTA",
        ),
    ],
)
def test_bad_overrides_are_refused(op: str, config: str, window: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        set_router_route(op, config, **window)
    assert listed() == []


TUNED = RouterRoute("router_mm", "nt_f32_128x80_k8", 40, 72, max_T=64, us=7.5)


def test_stored_verdicts_serve_the_next_call_and_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, emulated: list[str]
) -> None:
    model = kernels_of(emulated, "router_mm", "plain")
    path = store_verdicts(GPU, [TUNED])
    assert path == tuned_file(GPU)
    assert path == tmp_path / "cake_ops" / cake_ops.__version__ / "router-NVIDIA-H200.json"
    assert kernels_of(emulated, "router_mm", "plain") == [TUNED.config] != model
    assert listed() == [replace(TUNED, gpu=GPU, source="tuned")]
    assert served(63) == (TUNED.config, "tuned") and served(65)[1] == "cost model"

    set_router_route("router_mm", "nt_f32_64x8_k8")
    assert served(63) == ("nt_f32_64x8_k8", "override")
    reset_router_routes()
    assert served(63) == (TUNED.config, "tuned")

    monkeypatch.setattr(router_routes, "gpu_name", lambda device: "another GPU")
    assert served(63)[1] == "cost model"
    monkeypatch.setattr(router_routes, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(cake_ops, "__version__", "9.9")
    reset_router_routes()
    assert served(63)[1] == "cost model", "measured with another version of the package"


def test_storing_replaces_what_was_stored() -> None:
    store_verdicts(GPU, [TUNED])
    store_verdicts(GPU, [replace(TUNED, config="nt_f32_64x8_k8")])
    store_verdicts("another GPU", [TUNED])
    assert served(63) == ("nt_f32_64x8_k8", "tuned")
    assert len(listed()) == 2
    with pytest.raises(RuntimeError, match="configurations of router_mm are"):
        store_verdicts(GPU, [replace(TUNED, config="nonsense")])
    assert served(63) == ("nt_f32_64x8_k8", "tuned")


def test_shipped_verdicts_come_after_tuned_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = tmp_path / "shipped.json"
    rows = [{"op": "router_mm", "config": "nt_f32_64x16_k8", "gpu": GPU, "min_T": 1, "max_T": 4096}]
    shipped.write_text(json.dumps(rows))
    monkeypatch.setattr(router_verdicts, "SHIPPED", shipped)
    reset_router_routes()
    assert served(63) == ("nt_f32_64x16_k8", "shipped")
    store_verdicts(GPU, [TUNED])
    assert served(63) == (TUNED.config, "tuned") and served(65) == ("nt_f32_64x16_k8", "shipped")


@pytest.mark.parametrize(
    "content", ["{", '[{"op": 1}]', '[{"op": "router_mm", "config": "gone"}]', "[1]", '{"a": 1}']
)
def test_a_bad_file_of_measurements_is_announced_and_not_used(content: str) -> None:
    path = tuned_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.warns(UserWarning, match=f"{path.name} is not used .*--tune"):
        assert served(63)[1] == "cost model"
    assert served(63)[1] == "cost model"  # announced once


def test_the_shipped_verdicts_are_right() -> None:
    rows = json.loads(router_verdicts.SHIPPED.read_text())
    for row in rows:
        RouterRoute(**row).check()
        assert row["gpu"] and row["us"] > 0


def test_the_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for base in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        expected = tmp_path / "home" / ".cache" / "cake_ops" / cake_ops.__version__
        assert cache_dir() == expected
