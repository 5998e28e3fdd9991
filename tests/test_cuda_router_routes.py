"""How the CUDA backend serves a call of the router GEMMs: routes, copies and caches, on the CPU.

The kernels are emulated (:mod:`router_emulator`); everything before the launch is the real code, reached
through the public functions with CPU tensors. A test called after a case (h31, ..) is a defect that users of
another package met once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
import torch
from forms import LAYOUTS, NAN, assert_all_forms, assert_close, same_bits, select
from router_emulator import emulated_router, make
from torch import Tensor

import cake_ops
from cake_ops._problem import Problem
from cake_ops.cuda import fallback, router_config, router_mm, router_routes, router_verdicts
from cake_ops.cuda.router_config import LAYOUTS as KERNEL_LAYOUTS
from cake_ops.cuda.router_config import RouterConfig, all_configs
from cake_ops.cuda.router_routes import candidate_route
from cake_ops.cuda.routes import CACHES, MAX_ROUTES

FP32, BF16 = torch.float32, torch.bfloat16
PRODUCTS = ("router_mm", "router_mm_dgrad", "router_mm_wgrad")
TOLERANCE = 5e-7
DTYPES = {
    "fp32-fp32": (FP32, FP32),
    "bf16-fp32": (BF16, FP32),
    "fp32-bf16": (FP32, BF16),
    "bf16-bf16": (BF16, BF16),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    with emulated_router(monkeypatch, str(tmp_path)) as launched:
        yield launched


def run(name: str, *tensors: Tensor) -> Tensor:
    """The result, checked."""
    y = getattr(cake_ops, name)(*tensors)
    assert_close(y, reference.PRODUCTS[name](*tensors), TOLERANCE)
    return y


# Which way a call takes


def padded_rows(t: Tensor) -> Tensor:
    """Rows 16 bytes apart from each other, which a tensor map can address."""
    buffer = t.new_full((t.shape[0], t.shape[1] + 8), NAN)
    buffer[:, :-8] = t
    return buffer[:, :-8]


@pytest.mark.parametrize("layout", [Tensor.contiguous, padded_rows])
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_that_are_read_in_place(
    emulated: list[str], name: str, operand: int, layout
) -> None:
    tensors = list(select(name, *make()))
    tensors[operand] = layout(tensors[operand])
    explanation = cake_ops.explain(name, *tensors)
    assert explanation.path == "kernel"
    assert explanation.kernel.startswith(f"sm90_router_gemm_{KERNEL_LAYOUTS[name]}_f32_")
    assert not emulated
    run(name, *tensors)
    assert emulated == [explanation.kernel]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_h12_what_a_tensor_map_cannot_address_is_copied(
    emulated: list[str], name: str, operand: int, layout: str
) -> None:
    tensors = list(select(name, *make()))
    tensors[operand] = LAYOUTS[layout](tensors[operand])
    argument = ("x", "w") if name == "router_mm" else ("g", "w" if name.endswith("dgrad") else "x")
    explanation = cake_ops.explain(name, *tensors)
    assert explanation.path == "kernel after a copy"
    assert explanation.reason == f"{argument[operand]}: no unit stride or no 16-byte rows"
    run(name, *tensors)
    assert len(emulated) == 1
    assert_all_forms(name, *tensors, tolerance=TOLERANCE)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_x_is_read_in_bf16_and_other_operands_become_fp32(
    emulated: list[str], name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    a, b = (t.to(dtype) for t, dtype in zip(select(name, *make()), dtypes, strict=True))
    x = {"router_mm": a, "router_mm_wgrad": b}.get(name)
    others = [t for t in (a, b) if t is not x]
    explanation = cake_ops.explain(name, a, b)
    copied = any(t.dtype == BF16 for t in others)
    assert explanation.path == ("kernel after a copy" if copied else "kernel")
    assert ("bfloat16, read as float32" in explanation.reason) == copied
    run(name, a, b)
    low = x is not None and x.dtype == BF16
    assert len(emulated) == 1 and ("_bf16_" in emulated[0]) == low


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(257, 63, 100), (1, 100, 257), (63, 1, 100), (100, 63, 1), (63, 100, 7), (128, 256, 512)],
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_h09_values_in_all_forms_at_odd_sizes(
    emulated: list[str], name: str, sizes: tuple[int, int, int], dtypes: tuple
) -> None:
    a, b = (t.to(dtype) for t, dtype in zip(select(name, *make(*sizes)), dtypes, strict=True))
    assert_all_forms(name, a, b, tolerance=TOLERANCE)
    assert emulated


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("sizes", [(0, 8, 64), (7, 0, 64), (7, 8, 0), (0, 0, 0)])
def test_h09_nothing_to_multiply_launches_nothing(
    emulated: list[str], name: str, sizes: tuple[int, int, int]
) -> None:
    tensors = select(name, *make(*sizes))
    assert cake_ops.explain(name, *tensors).path == "no kernel"
    assert_all_forms(name, *tensors, tolerance=TOLERANCE)
    assert not emulated


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("hidden", [72, 71])
def test_explain_of_a_writing_form_says_what_it_launches(
    emulated: list[str], hidden: int, dtype: torch.dtype
) -> None:
    x, _, g = make(hidden=hidden)
    out = torch.zeros(40, hidden, dtype=dtype)
    added = cake_ops.explain(cake_ops.router_mm_wgrad_, out, g, x)
    stored = cake_ops.explain(cake_ops.router_mm_wgrad, g, x, out=out)
    assert not emulated and (out == 0).all()
    cake_ops.router_mm_wgrad_(out, g, x)
    assert added == stored and len(emulated) == 1
    assert added.kernel == (emulated[0] if hidden == 72 else "")
    assert added.path == ("kernel" if hidden == 72 else "kernel after a copy")
    with pytest.raises(RuntimeError, match="cake::router_mm_wgrad_: out must not share memory"):
        cake_ops.explain(cake_ops.router_mm_wgrad_, x[:40], g, x)


def test_accumulation_of_no_tokens_keeps_the_bits() -> None:
    out = torch.tensor([[-0.0, NAN], [1.0, -0.0]])
    before = out.clone()
    cake_ops.router_mm_wgrad_(out, torch.empty(0, 2), torch.empty(0, 2))
    assert same_bits(out, before)


@pytest.mark.parametrize("name", PRODUCTS)
def test_gpus_without_kernels_multiply_in_fp64(
    monkeypatch: pytest.MonkeyPatch, emulated: list[str], name: str
) -> None:
    for module in (router_routes, fallback):
        monkeypatch.setattr(module, "no_kernels_reason", lambda device: "no kernels for it")
    fallback.announce.cache_clear()
    tensors = select(name, *make())
    explanation = cake_ops.explain(name, *tensors)
    assert explanation.path == "torch" and explanation.reason.startswith("no kernels for it; FP64")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cake_ops.explain(name, *tensors)
        assert not caught
        assert_all_forms(name, *tensors, tolerance=TOLERANCE)
        with torch.autocast("cpu", dtype=BF16):
            run(name, *tensors)
    fallback.announce.cache_clear()
    said = "cake_ops: no kernels for it; grouped and router GEMMs run through torch there"
    assert [str(warning.message) for warning in caught] == [said]
    assert not emulated


def test_explain_of_a_kernel_says_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "allocate", lambda *call, **options: pytest.fail("allocates"))
    explanation = cake_ops.explain(cake_ops.router_mm, *make(100, 256, 4096)[:2])
    config = router_verdicts.named_configs()[explanation.kernel.removeprefix("sm90_router_gemm_")]
    assert explanation.tile == (config.tile_m, config.tile_n, 32)
    assert (explanation.stages, explanation.cluster) == (config.num_stages, config.cluster_k)
    assert explanation.grid == router_config.grid(config, 100, 256, 4096, 132)
    assert (explanation.threads, explanation.smem_bytes) == (config.threads, config.smem_bytes)
    assert explanation.chosen_by == "cost model" and "chosen by: cost model" in str(explanation)
    with pytest.raises(RuntimeError, match="w must have H = x.shape"):
        cake_ops.explain("router_mm", torch.zeros(3, 8), torch.zeros(3, 9))


@pytest.mark.parametrize("config", all_configs(), ids=lambda config: config.name)
@pytest.mark.parametrize("sizes", [(257, 63, 100), (1, 8, 64), (96, 256, 40)])
def test_every_configuration_can_be_tried(
    emulated: list[str], config: RouterConfig, sizes: tuple[int, int, int]
) -> None:
    name = {layout: name for name, layout in KERNEL_LAYOUTS.items()}[config.layout]
    x, w, g = make(*sizes)
    g = padded_rows(torch.nn.functional.pad(g, (0, -sizes[1] % 4)))[:, : sizes[1]]
    x = x.bfloat16() if config.b_dtype == "bf16" else x
    x = padded_rows(torch.nn.functional.pad(x, (0, -sizes[2] % 8)))[:, : sizes[2]]
    a, b = select(name, x, w, g)
    expected = reference.PRODUCTS[name](a, b)
    out = torch.full(expected.shape, NAN)
    route = candidate_route(name, config, out, a, b)
    route.run(out, a, b)
    assert route.explanation.chosen_by == "caller"
    assert emulated == [config.symbol]
    assert_close(out, expected, TOLERANCE)
    with pytest.raises(RuntimeError, match=f"{config.name} cannot compute T = "):
        candidate_route(name, config, out, LAYOUTS["misaligned"](a), b)


# Caches


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_plan_serves_every_number_of_tokens_of_its_bucket(
    emulated: list[str], misses: list[int], name: str
) -> None:
    for i, tokens in enumerate((97, 112, 98, 100, 111)):
        tensors = select(name, *make(tokens))
        run(name, *tensors)
        assert len(misses) == 1 and len(emulated) == i + 1
    run(name, *select(name, *make(113)))
    assert len(misses) == 2


def test_operands_must_have_as_many_tokens_in_a_known_bucket() -> None:
    x, w, g = make(100)
    cake_ops.router_mm_wgrad(g, x)
    for known in (0, 1):
        cake_ops.router_mm_wgrad(g[:known], x[:known])
        cake_ops.router_mm_wgrad_(torch.zeros(40, 72), g[:known], x[:known])
    for a, b in ((g, x[1:]), (g[1:], x), (g, x[:0]), (g[:0], x), (g, x[0]), (g, x[0, 0])):
        with pytest.raises(RuntimeError, match="cake::router_mm_wgrad: x must have"):
            cake_ops.router_mm_wgrad(a, b)
        with pytest.raises(RuntimeError, match="cake::router_mm_wgrad_: x must have"):
            cake_ops.router_mm_wgrad_(torch.zeros(40, 72), a, b)
    cake_ops.router_mm(x, w)
    for bad in (w[:, 1:], w[None], w[0], w.double(), w.to("meta")):
        with pytest.raises(RuntimeError, match="cake::router_mm: "):
            cake_ops.router_mm(x, bad)
    for bad in (x[0], x[None], torch.tensor(1.0)):
        with pytest.raises(RuntimeError, match=r"cake::router_mm: x must have shape \[T, H\]"):
            cake_ops.router_mm(bad, w)
        with pytest.raises(RuntimeError, match=r"cake::router_mm_wgrad: g must have shape"):
            cake_ops.router_mm_wgrad(bad, x)
    with pytest.raises(RuntimeError, match="out_dtype must be"):
        cake_ops.router_mm_wgrad(g, x, out_dtype=torch.float16)


def test_h52_fresh_tensors_of_known_shapes_hit(misses: list[int]) -> None:
    def step() -> None:
        x, w, g = make()
        x.requires_grad_(), w.requires_grad_()
        cake_ops.router_mm(x, w).backward(g)
        cake_ops.router_mm_wgrad_(torch.zeros(40, 72), g, x.detach())

    step()
    planned = len(misses)
    assert planned == 4
    for _ in range(20):
        step()
    assert len(misses) == planned


def test_h51_memory_that_is_reused_with_another_geometry() -> None:
    memory, result = torch.empty(1 << 15), torch.empty(1 << 12)
    for tokens, experts, hidden in ((16, 40, 24), (24, 24, 40), (16, 40, 24), (15, 40, 24)):
        x = memory[: tokens * hidden].view(tokens, hidden).normal_()
        w = memory[1 << 13 :][: experts * hidden].view(experts, hidden).normal_()
        g = memory[1 << 14 :][: tokens * experts].view(tokens, experts).normal_()
        for name in PRODUCTS:
            tensors = select(name, x, w, g)
            expected = reference.PRODUCTS[name](*tensors)
            out = result[: expected.numel()].view(expected.shape)
            getattr(cake_ops, name)(*tensors, out=out)
            assert_close(out, expected, TOLERANCE)


def test_h53_h54_caches_are_bounded_and_hold_no_tensors() -> None:
    w = torch.randn(8, 8)
    strides = range(8, 8 * (MAX_ROUTES + 100), 8)
    memory = torch.randn(5 * strides[-1])
    for stride in strides:
        cake_ops.router_mm(memory.as_strided((5, 8), (stride, 1)), w)
        assert len(CACHES["router_mm"]) <= MAX_ROUTES
    run("router_mm", memory.as_strided((5, 8), (8, 1)), w)  # evicted meanwhile
    x, y = make()[:2]
    held = [weakref.ref(t) for t in (x, y, cake_ops.router_mm(x, y))]
    del x, y
    assert all(ref() is None for ref in held)


# Prepared launches


@pytest.mark.parametrize("name", PRODUCTS)
def test_prepared_launch_takes_new_values(emulated: list[str], name: str) -> None:
    tensors = select(name, *make())
    prepared = cake_ops.prepare(name, *tensors)
    assert not emulated and prepared.explanation.path == "kernel"
    for _ in range(3):
        for t in tensors:
            t.normal_()
        prepared.out.fill_(NAN)
        assert prepared.launch() is prepared.out
        assert_close(prepared.out, reference.PRODUCTS[name](*tensors), TOLERANCE)
    assert emulated == [prepared.explanation.kernel] * 3
    with pytest.raises(RuntimeError, match="cannot prepare a launch on these tensors.*copy them"):
        cake_ops.prepare(name, LAYOUTS["misaligned"](tensors[0]), tensors[1])


def test_warmup_loads_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int, int]] = []
    monkeypatch.setattr(router_mm, "kernel", lambda *call: loaded.append(call))
    monkeypatch.setattr(router_mm, "no_kernels_reason", lambda device: "")
    router_mm.load_kernels(1)
    assert loaded == [(config.symbol, 1, config.smem_bytes) for config in all_configs()]
