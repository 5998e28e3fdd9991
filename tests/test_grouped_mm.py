"""Values of the three grouped GEMMs against FP64: sizes, layouts, offsets, tail rows, empty groups.

A test called after a case (h01, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import reference
import torch
from forms import (
    CANARY,
    LAYOUTS,
    NAN,
    Place,
    assert_all_forms,
    assert_close,
    same_bits,
    seen_operators,
    select,
)
from torch import Tensor

import cake_ops
from cake_ops.cuda import fallback

BF16 = torch.bfloat16
PRODUCTS = ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")


class Sizes(NamedTuple):
    groups: list[int]
    n: int
    k: int
    tail: int = 0


SIZES = {
    "odd": Sizes([1, 7, 63, 100, 257], n=100, k=63),
    "aligned": Sizes([64, 128, 0, 192], n=128, k=64, tail=16),
    "empty-groups": Sizes([0, 5, 0, 0, 9, 0], n=7, k=257, tail=3),
    "all-rows-in-one-group": Sizes([0, 0, 129, 0], n=63, k=100),
    "one-expert": Sizes([100], n=257, k=8, tail=1),
    "n-1": Sizes([7, 0, 63], n=1, k=63, tail=1),
    "k-1": Sizes([7, 0, 63], n=63, k=1, tail=1),
    "rows-1": Sizes([0, 1, 0], n=100, k=100),
    "all-empty": Sizes([0, 0, 0], n=63, k=7, tail=9),
    "no-experts": Sizes([], n=5, k=6, tail=4),
    "m-0": Sizes([0, 0], n=8, k=16),
    "n-0": Sizes([3, 4], n=0, k=16),
    "k-0": Sizes([3, 4], n=16, k=0, tail=2),
    "nothing": Sizes([], n=0, k=0),
}


def make(
    sizes: Sizes, device: torch.device, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, g, offs with NaN in the tail rows of x and g."""
    rows = sum(sizes.groups)
    x = torch.randn(rows + sizes.tail, sizes.k, device=device).to(dtype)
    w = torch.randn(len(sizes.groups), sizes.n, sizes.k, device=device).to(dtype)
    g = torch.randn(rows + sizes.tail, sizes.n, device=device).to(dtype)
    x[rows:], g[rows:] = NAN, NAN
    return x, w, g, reference.offsets(sizes.groups, device)


def leave_dirty_block(shape: tuple[int, ...], device: torch.device) -> None:
    """Frees a block full of NaN, which the allocator may hand out next."""
    torch.full(shape, NAN, dtype=BF16, device=device)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_h09_values_at_every_size(place: Place, sizes: Sizes, name: str) -> None:
    x, w, g, offs = make(sizes, *place)
    assert_all_forms(name, *select(name, x, w, g, offs))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("operand", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_in_every_layout(device: torch.device, name: str, operand: int, layout: str) -> None:
    x, w, g, offs = make(Sizes([7, 0, 64, 1], n=72, k=40, tail=5), device)
    tensors = list(select(name, x, w, g, offs))
    if layout.endswith("expanded") and tensors[operand].isnan().any():
        tensors[operand] = tensors[operand].nan_to_num()
    tensors[operand] = LAYOUTS[layout](tensors[operand])
    assert_all_forms(name, *tensors)


@pytest.mark.parametrize("name", PRODUCTS)
def test_values_with_both_operands_transposed(device: torch.device, name: str) -> None:
    x, w, g, offs = make(SIZES["odd"], device)
    a, b, offs = select(name, x, w, g, offs)
    assert_all_forms(name, LAYOUTS["transposed"](a), LAYOUTS["transposed"](b), offs)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("view", ["indptr", "every-second"])
def test_h18_offs_may_be_a_view_and_is_not_copied(
    device: torch.device, name: str, view: str
) -> None:
    x, w, g, offs = make(Sizes([7, 0, 63, 9], n=40, k=24, tail=3), device)
    if view == "indptr":
        offs = torch.cat([torch.zeros_like(offs[:1]), offs])[1:]
    else:
        offs = torch.stack([offs, torch.full_like(offs, -5)], 1).flatten()[::2]
        assert offs.stride() == (2,)
    tensors = select(name, x, w, g, offs)
    assert_all_forms(name, *tensors)
    with seen_operators() as seen:
        getattr(cake_ops, name)(*tensors)
    assert seen == [f"cake::{name}"]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_nan_and_inf_stay_in_their_group(device: torch.device, name: str, value: float) -> None:
    """Group 1 is poisoned in every operand; the rows and slices of the others keep their bits."""
    sizes = Sizes([9, 7, 0, 63], n=40, k=24, tail=3)
    x, w, g, offs = make(sizes, device)
    clean = getattr(cake_ops, name)(*select(name, x, w, g, offs))
    x[9:16], w[1], g[9:16] = value, value, value
    dirty = getattr(cake_ops, name)(*select(name, x, w, g, offs))
    if name == "grouped_mm_wgrad":
        others = torch.tensor([0, 2, 3])
        assert not dirty[1].isfinite().any()
        assert (dirty[2] == 0).all()
    else:
        others = torch.cat([torch.arange(9), torch.arange(16, 82)])
        assert not dirty[9:16].isfinite().any()
        assert (dirty[79:] == 0).all()
    assert same_bits(clean[others], dirty[others])
    assert clean.isfinite().all()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_results_are_bitwise_repeatable(
    device: torch.device, name: str, deterministic: bool
) -> None:
    """Forward and data gradient in both modes, the weight gradient in the deterministic one."""
    x, w, g, offs = make(Sizes([100, 0, 257, 1], n=136, k=200), device)
    options = {} if name == "grouped_mm_dgrad" else {"deterministic": deterministic}
    tensors = select(name, x, w, g, offs)
    first = getattr(cake_ops, name)(*tensors, **options)
    assert_close(first, reference.PRODUCTS[name](*tensors))
    if name == "grouped_mm_wgrad" and not deterministic:
        return
    for _ in range(5):
        torch.randn(100, 1000, device=device).to(BF16).mul_(2)
        assert same_bits(getattr(cake_ops, name)(*tensors, **options), first)


def test_accumulation_keeps_the_bits_of_empty_groups(place: Place) -> None:
    x, _, g, offs = make(Sizes([0, 63, 0], n=40, k=24), *place)
    start = torch.randn(3, 40, 24, device=place.device)
    start[0, 0, 0], start[2, 0, 0] = -0.0, NAN
    out = start.clone().to(place.dtype)
    cake_ops.grouped_mm_wgrad_(out, g, x, offs)
    expected = start.to(place.dtype)
    assert same_bits(out[0], expected[0]) and same_bits(out[2], expected[2])
    assert_close(out[1], expected[1].double() + reference.grouped_mm_wgrad(g, x, offs)[1])


BAD_VALUES = {
    "decreasing": ([2, 5, 3], "group 2 ends at 3, the group before it at 5"),
    "negative": ([-1, 2, 3], "group 0 ends at -1, the group before it at 0"),
    "past-the-rows": ([2, 5, 9], "group 2 ends at 9, the group before it at 5"),
    "past-the-rows-then-back": ([2, 9, 8], "group 1 ends at 9, the group before it at 2"),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("form", ["", "_out", "_"])
@pytest.mark.parametrize("ends, group", BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_of_offs_raise_on_the_cpu_and_name_the_group(
    name: str, form: str, ends: list[int], group: str
) -> None:
    x, w, g = torch.randn(8, 4), torch.randn(3, 6, 4), torch.randn(8, 6)
    tensors = select(name, x, w, g, torch.tensor(ends, dtype=torch.int32))
    shape = reference.PRODUCTS[name](*tensors[:2], torch.zeros(3, dtype=torch.int32)).shape
    out = torch.full(shape, CANARY)
    if form == "_" and name != "grouped_mm_wgrad":
        assert not hasattr(cake_ops, name + form)
        return
    with pytest.raises(RuntimeError) as error:
        if form == "":
            getattr(cake_ops, name)(*tensors)
        elif form == "_out":
            getattr(cake_ops, name)(*tensors, out=out)
        else:
            cake_ops.grouped_mm_wgrad_(out, *tensors)
    assert str(error.value) == (
        f"cake::{name}{form}: offs must satisfy 0 <= offs[0] <= .. <= offs[E-1] <= M = 8; {group}"
    )
    assert (out == CANARY).all()


@pytest.mark.parametrize("ends", [[7, 7, 60, 65], [-3, 90, 20, 50], [30, 10, 70, 70], [0] * 4])
def test_fallback_takes_offsets_as_the_kernels_do(
    monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    """Bad ones are clamped to [0, M] and to the end before them: torch's own products trust them."""
    monkeypatch.setattr(fallback, "announce", lambda device: None)
    x, w = torch.randn(70, 39).bfloat16(), torch.randn(4, 41, 39).bfloat16()
    offs = torch.tensor(ends, dtype=torch.int32)
    y = torch.full((70, 41), float("nan")).bfloat16()
    fallback.ragged_m(y, x, w, offs)
    expected = reference.grouped_mm(x, w, offs.clamp(0, 70).cummax(0).values)
    assert reference.relative_error(y, expected) < reference.tolerance(torch.bfloat16)


def test_h01_empty_experts_of_a_weight_gradient_are_zero(device: torch.device) -> None:
    x, _, g, offs = make(Sizes([162, 0, 2577, 446, 0, 83], n=768, k=2048), device)
    leave_dirty_block((6, 768, 2048), device)
    dw = cake_ops.grouped_mm_wgrad(g, x, offs)
    assert (dw[1] == 0).all() and (dw[4] == 0).all()
    expected = reference.grouped_mm_wgrad(g, x, offs)
    for e in (0, 2, 3, 5):
        assert_close(dw[e], expected[e])


def test_h02_most_of_256_experts_are_empty(device: torch.device) -> None:
    full = [3] * 256
    few = [0] * 256
    few[0], few[7], few[100], few[101], few[255] = 5, 1, 64, 9, 17
    for groups in (full, few, [0] * 256):
        x, _, g, offs = make(Sizes(groups, n=128, k=128), device)
        leave_dirty_block((256, 128, 128), device)
        dw = cake_ops.grouped_mm_wgrad(g, x, offs)
        assert_close(dw, reference.grouped_mm_wgrad(g, x, offs))
        empty = torch.tensor([size == 0 for size in groups])
        assert (dw[empty] == 0).all()


def test_h03_rows_past_the_last_offset_are_zero(device: torch.device) -> None:
    x = torch.randn(256, 64, device=device).to(BF16)
    w = torch.randn(4, 96, 64, device=device).to(BF16)
    offs = torch.tensor([64, 64, 160, 192], dtype=torch.int32, device=device)
    leave_dirty_block((256, 96), device)
    y = cake_ops.grouped_mm(x, w, offs)
    assert (y[192:] == 0).all()
    dx = cake_ops.grouped_mm_dgrad(y, w, offs)
    assert (dx[192:] == 0).all()
    combined = torch.zeros(256, 96, device=device)
    combined.index_add_(0, torch.arange(256, device=device), y.float())
    assert_close(combined, reference.grouped_mm(x, w, offs), reference.tolerance(BF16))


def test_h06_weight_gradient_without_rows_is_written(place: Place) -> None:
    x, _, g, offs = make(Sizes([0] * 5, n=63, k=40), *place)
    assert g.shape == (0, 63) and x.shape == (0, 40)
    dw = cake_ops.grouped_mm_wgrad(g, x, offs)
    assert dw.shape == (5, 63, 40) and (dw == 0).all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_h13_unaligned_sizes_work(place: Place, name: str) -> None:
    x, w, g, offs = make(Sizes([1, 3, 2], n=7, k=13), *place)
    assert_all_forms(name, *select(name, x, w, g, offs))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_h14_group_boundaries_need_no_alignment(
    device: torch.device, name: str, layout: str
) -> None:
    x, w, g, offs = make(Sizes([1, 7, 0, 3, 13, 8], n=72, k=64), device)
    x, g = LAYOUTS[layout](x), LAYOUTS[layout](g)
    assert_all_forms(name, *select(name, x, w, g, offs))


@pytest.mark.parametrize("experts", [3, 12])
def test_h15_no_group_of_a_weight_gradient_is_wrong(device: torch.device, experts: int) -> None:
    groups = (1 + 8 * torch.randint(0, 33, (experts,))).tolist()
    x, _, g, offs = make(Sizes(groups, n=1536, k=512), device)
    dw = cake_ops.grouped_mm_wgrad(g, x, offs)
    expected = reference.grouped_mm_wgrad(g, x, offs)
    for e in range(experts):
        assert_close(dw[e], expected[e])


def test_h31_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    x, w, g, _ = make(Sizes([1024, 100], n=257, k=200), device)
    heads = []
    for size in (16, 32, 64, 128, 1024):
        offs = reference.offsets([size, 100], device)
        y = cake_ops.grouped_mm(torch.cat([x[:size], x[1024:]]), w, offs)
        dx = cake_ops.grouped_mm_dgrad(torch.cat([g[:size], g[1024:]]), w, offs)
        heads.append((y[:16], dx[:16]))
    for y, dx in heads[1:]:
        assert same_bits(y, heads[0][0]) and same_bits(dx, heads[0][1])


@pytest.mark.parametrize("terms", [4096, 16384])
def test_h33_sums_are_fp32(device: torch.device, terms: int) -> None:
    """A BF16 sum of ones stalls at 256."""
    ones = torch.ones(32, terms, dtype=BF16, device=device)
    offs = reference.offsets([8, 24], device)
    y = cake_ops.grouped_mm(ones, ones.expand(2, 32, terms), offs)
    assert (y == terms).all()
    dx = cake_ops.grouped_mm_dgrad(ones, ones.t().expand(2, terms, 32), offs)
    assert (dx == terms).all()
    rows = reference.offsets([terms, 0], device)
    for dtype in (BF16, torch.float32):
        dw = cake_ops.grouped_mm_wgrad(ones.t(), ones.t(), rows, out_dtype=dtype)
        assert (dw[0] == terms).all() and (dw[1] == 0).all()
