"""How the CUDA backend serves a call of the grouped GEMMs: routes, copies and caches, on the CPU.

The kernels are emulated (:mod:`emulator`); everything before the launch is the real code, reached through the
public functions with CPU tensors. A test called after a case (h12, ..) is a defect that users of another
package met once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch
from emulator import EmulatedPlan, emulated_family
from forms import CANARY, LAYOUTS, NAN, assert_all_forms, assert_close, same_bits, select
from torch import Tensor

import cake_ops
from cake_ops._problem import Problem
from cake_ops.cuda import fallback, grouped_mm, grouped_routes
from cake_ops.cuda.routes import CACHES, MAX_ROUTES

BF16 = torch.bfloat16
PRODUCTS = ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """CPU tensors go through the CUDA backend; yields the names of the kernels that are launched."""
    with emulated_family(monkeypatch, "grouped_mm", grouped_routes, EmulatedPlan) as launched:
        yield launched


def make(
    sizes: list[int], n: int, k: int, tail: int = 0, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, g, offs."""
    rows = sum(sizes) + tail
    x, g = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
    return x, torch.randn(len(sizes), n, k).to(dtype), g, reference.offsets(sizes)


# Which way a call takes


def padded_rows(t: Tensor) -> Tensor:
    """Rows 16 bytes apart from each other, which a tensor map can address."""
    buffer = t.new_full((*t.shape[:-1], t.shape[-1] + 8), NAN)
    buffer[..., :-8] = t
    return buffer[..., :-8]


def windows(t: Tensor) -> Tensor:
    """Rows that overlap in memory, each 8 elements after the one before."""
    flat = torch.randn(t[0].numel() + 8 * t.shape[0]).to(t.dtype)
    return flat.as_strided(t.shape, (8, *t.stride()[1:]))


ADDRESSABLE = {"contiguous": LAYOUTS["contiguous"], "padded-rows": padded_rows}
COPIED = {
    name: layout
    for name, layout in {**LAYOUTS, "windows": windows}.items()
    if name not in ("contiguous", "permuted")
}


@pytest.mark.parametrize("layout", ADDRESSABLE)
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize(
    "name, kernel",
    [
        ("grouped_mm", "sm90_grouped_gemm_nt_"),
        ("grouped_mm_dgrad", "sm90_grouped_gemm_nn_"),
        ("grouped_mm_wgrad", "sm90_grouped_gemm_wgrad_bf16_store_"),
    ],
)
def test_h12_operands_that_are_read_in_place(
    emulated: list[str], name: str, kernel: str, operand: int, layout: str
) -> None:
    tensors = list(select(name, *make([7, 0, 64, 1], n=72, k=40, tail=5)))
    tensors[operand] = ADDRESSABLE[layout](tensors[operand])
    explanation = cake_ops.explain(name, *tensors)
    assert explanation.path == "kernel" and explanation.kernel.startswith(kernel)
    assert not emulated
    y = getattr(cake_ops, name)(*tensors)
    assert emulated == [explanation.kernel]
    assert_close(y, reference.PRODUCTS[name](*tensors))


@pytest.mark.parametrize(
    "name, kernel",
    [("grouped_mm", "sm90_grouped_gemm_nn_"), ("grouped_mm_dgrad", "sm90_grouped_gemm_nt_")],
)
@pytest.mark.parametrize("layout", ["transposed", "permuted"])
def test_h12_weights_are_read_in_place_in_either_order(name: str, kernel: str, layout: str) -> None:
    a, w, offs = select(name, *make([7, 0, 64, 1], n=72, k=40))
    w = LAYOUTS[layout](w)
    explanation = cake_ops.explain(name, a, w, offs)
    assert explanation.path == "kernel"
    assert explanation.kernel.startswith(kernel) == (layout == "transposed")
    assert_close(getattr(cake_ops, name)(a, w, offs), reference.PRODUCTS[name](a, w, offs))


@pytest.mark.parametrize("layout", COPIED)
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_h12_what_a_tensor_map_cannot_address_is_copied(
    emulated: list[str], name: str, operand: int, layout: str
) -> None:
    tensors = list(select(name, *make([7, 0, 64, 1], n=72, k=40)))
    tensors[operand] = COPIED[layout](tensors[operand])
    in_place = tensors[operand].dim() == 3 and layout in ("transposed", "windows")
    explanation = cake_ops.explain(name, *tensors)
    assert explanation.path == ("kernel" if in_place else "kernel after a copy")
    assert_close(getattr(cake_ops, name)(*tensors), reference.PRODUCTS[name](*tensors))
    assert len(emulated) == 1


def test_h12_experts_that_start_between_16_byte_units_are_copied() -> None:
    x, w, _, offs = make([7, 0, 64, 1], n=72, k=40)
    apart = torch.empty(4 * (72 * 40 + 4), dtype=BF16).as_strided(w.shape, (72 * 40 + 4, 40, 1))
    apart.copy_(w)
    assert cake_ops.explain("grouped_mm", x, apart, offs).path == "kernel after a copy"
    assert_close(cake_ops.grouped_mm(x, apart, offs), reference.grouped_mm(x, w, offs))


@pytest.mark.parametrize("n, k", [(72, 39), (71, 40), (1, 1), (7, 257), (100, 12)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_h13_odd_sizes_are_padded(emulated: list[str], name: str, n: int, k: int) -> None:
    tensors = select(name, *make([7, 0, 64, 1], n=n, k=k, tail=2))
    explanation = cake_ops.explain(name, *tensors)
    assert explanation.path == "kernel after a copy"
    assert "no multiple of 8" in explanation.reason
    assert_all_forms(name, *tensors)
    assert emulated


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_reason_of_a_copy_names_what_needs_it_and_nothing_else(name: str) -> None:
    for n, k, odd in ((72, 39, {"K = 39"}), (71, 40, {"N = 71"}), (71, 39, {"N = 71", "K = 39"})):
        reason = cake_ops.explain(name, *select(name, *make([7, 0, 64, 1], n=n, k=k))).reason
        assert set(reason.split("; ")) == {f"{size} is no multiple of 8" for size in odd}
    a, b, offs = select(name, *make([7, 0, 64, 1], n=72, k=40))
    off = LAYOUTS["misaligned"]
    first, second = ("x", "w") if name == "grouped_mm" else ("g", "w" if "dgrad" in name else "x")
    out = off(reference.PRODUCTS[name](a, b, offs).to(BF16))
    for call, options, copied in (
        ((off(a), b, offs), {}, first),
        ((a, off(b), offs), {}, second),
        ((off(a), off(b), offs.repeat_interleave(2)[::2]), {}, f"{first}, {second}, offs"),
        ((a, b, offs), {"out": out}, "out"),
    ):
        reason = cake_ops.explain(name, *call, **options).reason
        assert reason == f"no unit stride or no 16-byte rows: {copied}"


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("way", ["padded", "copied", "zeros", "torch"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_result_is_new_to_autograd_on_every_way(
    monkeypatch: pytest.MonkeyPatch, name: str, way: str, needs_grad: bool
) -> None:
    """A version above 0 would say that the result was written again after it was made."""
    sizes = {"n": 72, "k": 39 if way == "padded" else 40}
    rows = [7, 0, 64, 1]
    if way == "zeros":
        contracted = {"grouped_mm": "k", "grouped_mm_dgrad": "n"}.get(name)
        sizes, rows = ({**sizes, contracted: 0}, rows) if contracted else (sizes, [0, 0])
    a, b, offs = select(name, *make(rows, **sizes))
    if way == "copied":
        a, b = LAYOUTS["misaligned"](a), LAYOUTS["misaligned"](b)
    if way == "torch":
        monkeypatch.setattr(grouped_routes, "no_kernels_reason", lambda device: "no kernels for it")
        monkeypatch.setattr(fallback, "announce", lambda device: None)
        mm = torch.mm  # that of the CPU takes no out_dtype
        monkeypatch.setattr(
            torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype))
        )
    path = {"zeros": "no kernel", "torch": "torch"}.get(way, "kernel after a copy")
    assert cake_ops.explain(name, a, b, offs).path == path
    expected = reference.PRODUCTS[name](a, b, offs)
    y = getattr(cake_ops, name)(a.requires_grad_(needs_grad), b, offs)
    assert y._version == 0 and y.requires_grad == needs_grad
    assert_close(y.detach(), expected)
    out = torch.empty(expected.shape, dtype=BF16)
    getattr(cake_ops, name)(a.detach(), b, offs, out=out)
    assert out._version == 1, "one write, counted by the operator"
    assert_close(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("n, k", [(72, 40), (63, 39)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_in_all_forms_and_layouts(
    name: str, n: int, k: int, operand: int, layout: str
) -> None:
    tensors = list(select(name, *make([7, 0, 30, 1], n=n, k=k, tail=5)))
    tensors[operand] = LAYOUTS[layout](tensors[operand])
    assert_all_forms(name, *tensors)


@pytest.mark.parametrize("name", PRODUCTS)
def test_strided_offs_are_copied(name: str) -> None:
    x, w, g, offs = make([7, 0, 64, 1], n=72, k=40)
    offs = torch.stack([offs, torch.full_like(offs, -5)], 1).flatten()[::2]
    tensors = select(name, x, w, g, offs)
    assert "offs" in cake_ops.explain(name, *tensors).reason
    assert_all_forms(name, *tensors)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    "sizes, n, k", [([0, 0], 8, 16), ([3, 4], 0, 16), ([3, 4], 16, 0), ([], 8, 8), ([], 0, 0)]
)
def test_h09_nothing_to_multiply_launches_nothing(
    emulated: list[str], name: str, sizes: list[int], n: int, k: int
) -> None:
    tensors = select(name, *make(sizes, n, k, tail=0 if sizes == [0, 0] else 3))
    assert cake_ops.explain(name, *tensors).path == "no kernel"
    assert_all_forms(name, *tensors)
    assert not emulated


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("columns", [0, 3, 8])
@pytest.mark.parametrize("n, k", [(40, 24), (39, 24), (40, 23)])
def test_accumulation_keeps_the_bits_of_empty_groups_on_every_way(
    n: int, k: int, columns: int, dtype: torch.dtype
) -> None:
    x, _, g, offs = make([0, 63, 0], n=n, k=k)
    start = torch.randn(3, n, k).to(dtype)
    start[0, 0, 0], start[2, 0, 0] = -0.0, NAN
    out = torch.full((3, n, k + columns), CANARY, dtype=dtype)[..., :k].copy_(start)
    cake_ops.grouped_mm_wgrad_(out, g, x, offs)
    assert same_bits(out[0], start[0]) and same_bits(out[2], start[2])
    assert_close(out[1], start[1].double() + reference.grouped_mm_wgrad(g, x, offs)[1])


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_misaligned_operand_is_the_one_that_is_copied(name: str) -> None:
    """Calls that differ in nothing but which operand is misaligned have routes of their own."""
    a, b, offs = select(name, *make([7, 0, 64, 1], n=72, k=40))
    expected = reference.PRODUCTS[name](a, b, offs)
    off = LAYOUTS["misaligned"]
    for first, second in ((off(a), b), (a, off(b)), (off(a), off(b)), (a, b), (off(a), b)):
        out = torch.full(expected.shape, NAN, dtype=BF16)
        getattr(cake_ops, name)(first, second, offs, out=out)
        assert_close(out, expected)
        assert_close(getattr(cake_ops, name)(first, second, offs), expected)


def test_explain_of_a_kernel_says_what_is_launched() -> None:
    x, w, _, offs = make([128] * 8, n=256, k=128)
    explanation = cake_ops.explain(cake_ops.grouped_mm, x, w, offs)
    m, n, _ = explanation.tile
    assert f"_{m}x{n}_c{explanation.cluster}" in explanation.kernel
    assert explanation.grid % explanation.cluster == 0 and explanation.threads == 384
    assert explanation.chosen_by == "cost model" and "chosen by: cost model" in str(explanation)
    assert explanation.kernel in str(explanation) and explanation.workspace_bytes == 0
    with pytest.raises(RuntimeError, match="offs must have one end for each expert"):
        cake_ops.explain(cake_ops.grouped_mm, x, w, offs[:-1])


@pytest.mark.parametrize("name", PRODUCTS)
def test_explain_allocates_no_result(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tensors = select(name, *make([128] * 8, n=256, k=128))
    monkeypatch.setattr(Problem, "allocate", lambda *call, **options: pytest.fail("allocates"))
    assert cake_ops.explain(name, *tensors).path == "kernel"


@pytest.mark.parametrize("columns", [0, 3, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_explain_of_a_writing_form_says_what_it_launches(
    emulated: list[str], dtype: torch.dtype, columns: int
) -> None:
    """The kernel that adds is another one than the kernel that stores, and ``out`` may have to be copied."""
    x, _, g, offs = make([7, 0, 64, 1], n=72, k=40)
    out = torch.zeros(4, 72, 40 + columns, dtype=dtype)[..., :40]
    added = cake_ops.explain(cake_ops.grouped_mm_wgrad_, out, g, x, offs)
    stored = cake_ops.explain(cake_ops.grouped_mm_wgrad, g, x, offs, out=out)
    assert not emulated and (out == 0).all()
    cake_ops.grouped_mm_wgrad_(out, g, x, offs)
    cake_ops.grouped_mm_wgrad(g, x, offs, out=out)
    kind = "f32" if dtype == torch.float32 else "bf16"
    for explanation, launched, how in zip((added, stored), emulated, ("add", "store"), strict=True):
        assert f"_{kind}_{how}_" in launched
        if columns == 3:
            assert explanation.path == "kernel after a copy" and "out" in explanation.reason
        else:
            assert explanation.kernel == launched


# Prepared launches


def test_offs_of_a_prepared_launch_are_not_checked(
    monkeypatch: pytest.MonkeyPatch, emulated: list[str]
) -> None:
    x, w, _, offs = make([7, 0, 64, 1], n=72, k=40)
    prepared = cake_ops.prepare("grouped_mm", x, w, offs)
    monkeypatch.setattr(grouped_mm, "CHECK_OFFS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    offs[2] = 3
    with pytest.raises(RuntimeError, match="group 2 ends at 3"):
        cake_ops.grouped_mm(x, w, offs)
    prepared.launch()
    assert len(emulated) == 1


@pytest.mark.parametrize("name", PRODUCTS)
def test_prepared_launch_takes_new_values(emulated: list[str], name: str) -> None:
    a, b, offs = select(name, *make([7, 0, 64, 1], n=72, k=40, tail=3))
    prepared = cake_ops.prepare(name, a, b, offs)
    assert not emulated and prepared.explanation.path == "kernel"
    for sizes in ([7, 0, 64, 1], [0, 0, 0, 0], [1, 70, 0, 2]):
        a.normal_(), b.normal_(), offs.copy_(reference.offsets(sizes))
        prepared.out.fill_(NAN)
        assert prepared.launch() is prepared.out
        assert_close(prepared.out, reference.PRODUCTS[name](a, b, offs))
    assert emulated == [prepared.explanation.kernel] * 3


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_prepared_explanation_is_of_what_is_launched(
    emulated: list[str], dtype: torch.dtype
) -> None:
    x, _, g, offs = make([7, 0, 64, 1], n=72, k=40)
    out = torch.full((4, 72, 40), NAN, dtype=dtype)
    prepared = cake_ops.prepare("grouped_mm_wgrad", g, x, offs, out=out)
    prepared.launch()
    assert emulated == [prepared.explanation.kernel]
    assert_close(out, reference.grouped_mm_wgrad(g, x, offs), reference.tolerance(BF16))


@pytest.mark.parametrize("operand", ["a", "b", "offs", "out"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_prepare_refuses_what_needs_a_copy(name: str, operand: str) -> None:
    a, b, offs = select(name, *make([7, 0, 64, 1], n=72, k=40))
    out = torch.empty(reference.PRODUCTS[name](a, b, offs).shape, dtype=BF16)
    call = {"a": a, "b": b, "offs": offs, "out": out}
    call[operand] = (
        offs.repeat_interleave(2)[::2]
        if operand == "offs"
        else LAYOUTS["misaligned"](call[operand])
    )
    out = call.pop("out")
    with pytest.raises(RuntimeError, match="cannot prepare a launch on these tensors.*copy them"):
        cake_ops.prepare(name, *call.values(), out=out)


# Caches


@pytest.mark.parametrize("name", PRODUCTS)
def test_h18_a_known_geometry_does_not_admit_another_dtype(name: str) -> None:
    a, b, offs = select(name, *make([7, 0, 64, 1], n=72, k=40))
    getattr(cake_ops, name)(a, b, offs)
    with pytest.raises(RuntimeError, match="offs must be int32"):
        getattr(cake_ops, name)(a, b, offs.long())
    with pytest.raises(RuntimeError, match="must have one dtype"):
        getattr(cake_ops, name)(a, b.half(), offs)
    with pytest.raises(RuntimeError, match="must have one dtype"):
        getattr(cake_ops, name)(a.half(), b, offs)


def test_h51_memory_that_is_reused_with_another_geometry() -> None:
    """One address, many shapes, strides, numbers of experts and result types."""
    memory = torch.empty(1 << 16, dtype=BF16)
    result = torch.empty(1 << 15)
    for sizes, n, k in (([9, 7], 40, 24), ([16], 24, 40), ([1, 2, 3], 40, 24), ([9, 7], 40, 24)):
        rows, experts = sum(sizes), len(sizes)
        x = memory[: rows * k].view(rows, k).normal_()
        w = memory[1 << 14 :][: experts * n * k].view(experts, n, k).normal_()
        g = memory[1 << 15 :][: rows * n].view(rows, n).normal_()
        offs = reference.offsets(sizes)
        for weight in (w, w.view(experts, k, n).mT):
            assert weight.data_ptr() == w.data_ptr()
            y = cake_ops.grouped_mm(x, weight, offs)
            assert_close(y, reference.grouped_mm(x, weight, offs))
        for dtype in (torch.float32, BF16):
            out = result.view(dtype)[: experts * n * k].view(experts, n, k)
            cake_ops.grouped_mm_wgrad(g, x, offs, out=out)
            assert_close(out, reference.grouped_mm_wgrad(g, x, offs), 4e-3)


def test_h52_fresh_tensors_of_known_shapes_hit(misses: list[int]) -> None:
    def step(rows: int) -> None:
        x, w, _, offs = make([rows, 3], n=40, k=24)
        x.requires_grad_(), w.requires_grad_()
        cake_ops.grouped_mm(x, w, offs).square().sum().backward()

    for rows in (5, 6, 7):  # M is 8, 9 and 10, in two buckets
        step(rows)
    entries, planned = {name: len(cache) for name, cache in CACHES.items()}, len(misses)
    assert planned == 2 * 3
    for i in range(60):
        step(5 + i % 3)
    assert len(misses) == planned
    assert {name: len(cache) for name, cache in CACHES.items()} == entries


def test_h54_caches_are_bounded() -> None:
    w, offs = torch.randn(1, 8, 8).to(BF16), torch.tensor([3], dtype=torch.int32)
    strides = range(8, 8 * (MAX_ROUTES + 100), 8)
    memory = torch.randn(5 * strides[-1]).to(BF16)
    for stride in strides:
        x = memory.as_strided((5, 8), (stride, 1))
        y = cake_ops.grouped_mm(x, w, offs)
        assert len(CACHES["grouped_mm"]) <= MAX_ROUTES
        if stride % 200 == 0:
            assert_close(y, reference.grouped_mm(x, w, offs))
    assert MAX_ROUTES // 2 <= len(CACHES["grouped_mm"])
    x = memory.as_strided((5, 8), (8, 1))  # evicted meanwhile
    assert_close(cake_ops.grouped_mm(x, w, offs), reference.grouped_mm(x, w, offs))


@pytest.mark.parametrize("name", PRODUCTS)
def test_h52_a_plan_serves_every_number_of_rows_of_its_bucket(
    emulated: list[str], misses: list[int], name: str
) -> None:
    sizes = [[100, 0, 1], [90, 7, 8], [0, 0, 97], [60, 30, 22]]  # M of 97 to 112
    for i, group_sizes in enumerate(sizes):
        tensors = select(name, *make(group_sizes, n=40, k=24))
        y = getattr(cake_ops, name)(*tensors)
        assert_close(y, reference.PRODUCTS[name](*tensors))
        assert len(misses) == 1 and len(emulated) == i + 1
        with pytest.raises(RuntimeError):  # one row less in the second operand, or no such expert
            getattr(cake_ops, name)(tensors[0], tensors[1][1:], tensors[2])
        misses[:] = [1]


@pytest.mark.parametrize("form", ["", "_out", "_"])
@pytest.mark.parametrize("known", [0, 1, 2])
def test_rows_that_differ_are_refused_whatever_is_known(known: int, form: str) -> None:
    """No key of such a call may equal that of a known one, as one made of a bool does: False == 0."""
    offs, out = reference.offsets([0, known]), torch.zeros(2, 40, 24).to(BF16)
    g, x = torch.randn(3, 40).to(BF16), torch.randn(3, 24).to(BF16)
    call = {
        "": cake_ops.grouped_mm_wgrad,
        "_out": lambda g, x, offs: cake_ops.grouped_mm_wgrad(g, x, offs, out=out),
        "_": lambda g, x, offs: cake_ops.grouped_mm_wgrad_(out, g, x, offs),
    }[form]
    call(g[:known], x[:known], offs)
    entries = {name: len(cache) for name, cache in CACHES.items()}
    out.fill_(CANARY)
    for a in range(4):
        for b in set(range(4)) - {a}:
            with pytest.raises(RuntimeError, match=f"cake::grouped_mm_wgrad{form}: x must have"):
                call(g[:a], x[:b], offs)
    for a, b in ((g[0], x[0]), (g[0, 0], x[0, 0]), (g[0, 0], x), (g, x[0, 0])):
        with pytest.raises(RuntimeError, match=f"cake::grouped_mm_wgrad{form}: "):
            call(a, b, offs)
    assert (out == CANARY).all()
    assert {name: len(cache) for name, cache in CACHES.items()} == entries


def test_h53_routes_hold_no_tensors() -> None:
    x, w, g, offs = make([9, 7], n=40, k=24)
    misaligned = LAYOUTS["misaligned"](x)
    held = [weakref.ref(t) for t in (x, w, g, offs, misaligned)]
    held += [weakref.ref(cake_ops.grouped_mm(t, w, offs)) for t in (x, misaligned)]
    held += [weakref.ref(cake_ops.grouped_mm_wgrad(g, t, offs)) for t in (x, misaligned)]
    del x, w, g, offs, misaligned
    assert all(ref() is None for ref in held)


def test_threads_share_the_caches() -> None:
    problems = [make([9, rows], n=40, k=24) for rows in range(1, 9)]
    expected = [cake_ops.grouped_mm(x, w, offs) for x, w, _, offs in problems]

    def work() -> None:
        for _ in range(20):
            for (x, w, _, offs), y in zip(problems, expected, strict=True):
                assert same_bits(cake_ops.grouped_mm(x, w, offs), y)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(4)]
        while not all(future.done() for future in futures):
            cake_ops.clear_caches()
    for future in futures:
        future.result()


# Offsets


@pytest.mark.parametrize("form", ["", "_out", "_"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_check_offs_names_the_group(
    monkeypatch: pytest.MonkeyPatch, emulated: list[str], name: str, form: str
) -> None:
    a, b, offs = select(name, *make([7, 0, 64, 1], n=72, k=40))
    out = torch.full(reference.PRODUCTS[name](a, b, offs).shape, CANARY, dtype=BF16)
    bad = offs.clone()
    bad[2] = 3
    call = {
        "": lambda offs: getattr(cake_ops, name)(a, b, offs),
        "_out": lambda offs: getattr(cake_ops, name)(a, b, offs, out=out),
        "_": lambda offs: cake_ops.grouped_mm_wgrad_(out, a, b, offs),
    }[form]
    if form == "_" and name != "grouped_mm_wgrad":
        return
    monkeypatch.setattr(grouped_mm, "CHECK_OFFS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match=f"cake::{name}{form}: .*group 2 ends at 3, .* at 7"):
        call(bad)
    assert (out == CANARY).all() and not emulated
    call(offs)
    assert len(emulated) == 1
