"""Values of the router's sm_90a kernels where only the GPU can tell: sizes, scales, Inf and NaN, memory.

What holds on every device is in test_router_mm.py, which bits are the same in test_cuda_router_bits.py. A test called after a case (h19, ..) is a defect that
users of another package met once. ``-k small_shapes`` selects what is small enough for compute-sanitizer:
every policy of the kernel, with Inf and NaN too, and operands that are copied first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import reference
import torch
from forms import CANARY, LAYOUTS, NAN, same_bits
from gpu import (
    BF16,
    DEVICE,
    FP32,
    ROUTER_PRODUCTS,
    ROUTER_TOLERANCE,
    Problem,
    assert_borders,
    bordered,
    router,
    wait,
)
from torch import Tensor

import cake_ops
from cake_ops.cuda import router_routes
from cake_ops.cuda.router_config import LAYOUTS as PASSES
from cake_ops.cuda.router_config import RouterConfig, all_configs, is_valid

pytestmark = pytest.mark.gpu

INF = float("inf")
MIXES = {  # the dtypes of an operator's two operands
    "fp32-fp32": (FP32, FP32),
    "bf16-fp32": (BF16, FP32),
    "fp32-bf16": (FP32, BF16),
    "bf16-bf16": (BF16, BF16),
}
OPERATOR = {layout: name for name, layout in PASSES.items()}
each_config = pytest.mark.parametrize("config", all_configs(), ids=lambda config: config.name)
each_product = pytest.mark.parametrize("name", ROUTER_PRODUCTS)
each_mix = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


def check(name: str, actual: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None) -> None:
    """Compares the result of ``name`` on ``a`` and ``b``, added to ``start``, with FP64.

    A sum of few elements may cancel to nearly nothing, which no FP32 sum survives. So both errors are taken
    relative to the larger of the result and what sums of this length and size usually are.
    """
    wait()
    expected = reference.PRODUCTS[name](a, b)
    terms = a.shape[0] if name.endswith("wgrad") else a.shape[1]
    usual = (a.double().norm() * b.double().norm()).item() / math.sqrt(terms or 1)
    if start is not None:
        expected = expected + start.double()
    bound = ROUTER_TOLERANCE if actual.dtype == FP32 else reference.tolerance(actual.dtype)
    difference = actual.double() - expected
    frobenius = difference.norm().item() / (max(expected.norm().item(), usual) or 1)
    peak = difference.abs().max().item() / (
        max(expected.abs().max().item(), usual / math.sqrt(expected.numel())) or 1
    )
    call = f"{name} {tuple(a.shape)} x {tuple(b.shape)}, {a.dtype} x {b.dtype} -> {actual.dtype}"
    # Long FP32 sums lose with the root of their length, single elements first.
    assert frobenius <= bound and peak <= (2 if terms > 2048 else 1) * bound, (
        f"{call}: errors {frobenius:.2e}, {peak:.2e}"
    )


def operands(
    name: str, sizes: tuple[int, int, int], mix: tuple[torch.dtype, ...]
) -> tuple[Tensor, Tensor]:
    a, b = router(*sizes).tensors(name)
    return a.to(mix[0]), b.to(mix[1])


def by_row(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Views of both operands as [row or column of the result, term of its sum]."""
    return a.t() if name.endswith("wgrad") else a, b if name == "router_mm" else b.t()


def check_forms(name: str, a: Tensor, b: Tensor) -> None:
    """Every result dtype, and for a weight gradient the accumulating form of each."""
    function = getattr(cake_ops, name)
    check(name, function(a, b), a, b)
    if name == "router_mm":
        return
    check(name, function(a, b, out_dtype=BF16), a, b)
    if name == "router_mm_wgrad":
        for dtype in (FP32, BF16):
            start = torch.randn(a.shape[1], b.shape[1], device=DEVICE).to(dtype)
            out = start.clone()
            assert cake_ops.router_mm_wgrad_(out, a, b) is out
            check(name, out, a, b, start)


# Sizes and dtypes


@each_product
@each_mix
@pytest.mark.parametrize("experts", [1, 8, 12, 63, 64, 100, 256, 257, 512])
def test_values_at_odd_sizes(experts: int, mix: tuple[torch.dtype, ...], name: str) -> None:
    for tokens, hidden in product((1, 7, 63, 100, 257), (4, 36, 100, 1000, 4096)):
        check_forms(name, *operands(name, (tokens, experts, hidden), mix))


@each_product
@pytest.mark.parametrize("experts", [64, 256, 384])
def test_values_at_the_sizes_of_models(experts: int, name: str) -> None:
    """T from decoding to a long batch: each has a tile and a schedule of its own."""
    for tokens, hidden in product((1, 16, 64, 130, 256, 1024, 2048, 4096, 16384), (4096, 7168)):
        for mix in (
            MIXES["fp32-fp32"],
            MIXES["fp32-bf16" if name[-5:] == "wgrad" else "bf16-fp32"],
        ):
            a, b = operands(name, (tokens, experts, hidden), mix)
            check(name, getattr(cake_ops, name)(a, b), a, b)


def sizes_of(config: RouterConfig, M: int, N: int, K: int) -> tuple[int, int, int]:
    """T, N and H of the operator whose kernel multiplies M x K by K x N."""
    return {"nt": (N, M, K), "nn": (M, K, N), "tn": (K, M, N)}[config.layout]


def operands_of(config: RouterConfig, M: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    b_dtype = BF16 if config.b_dtype == "bf16" else FP32
    mix = (b_dtype, FP32) if config.layout == "nt" else (FP32, b_dtype)
    return operands(OPERATOR[config.layout], sizes_of(config, M, N, K), mix)


Force = Callable[[RouterConfig], str]


@each_config
def test_small_shapes_of_every_policy(force: Force, config: RouterConfig) -> None:
    name = force(config)
    m, n = config.tile_m, config.tile_n
    for sizes in ((4, n + 8, 40), (m + 8, 8, 296), (m, n, 64), (m + 4, n + 8, 8)):
        a, b = operands_of(config, *sizes)
        assert cake_ops.explain(name, a, b).kernel == config.symbol
        check_forms(name, a, b)


@each_config
def test_every_policy_at_every_size(force: Force, config: RouterConfig) -> None:
    """Sizes that end before, at and behind a tile, and sums with fewer chunks than CTAs and with more."""
    name = force(config)
    m, n = config.tile_m, config.tile_n
    columns = (8, n - 8 or 16, n, n + 8, 3 * n)
    for sizes in product((4, m - 4, 2 * m + 4), columns, (8, 32, 40, 264, 1000, 5000)):
        if not is_valid(config, *sizes_of(config, *sizes)):  # the longest sums are split
            assert sizes[2] == 5000
            continue
        a, b = operands_of(config, *sizes)
        assert cake_ops.explain(name, a, b).kernel == config.symbol
        check_forms(name, a, b)


@pytest.fixture
def two_sms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches as on a GPU with two SMs, so that small shapes are several tiles for each CTA."""
    cake_ops.clear_caches()
    monkeypatch.setattr(router_routes, "num_sms", lambda device: 2)
    yield
    cake_ops.clear_caches()


@pytest.mark.parametrize(
    "config", [c for c in all_configs() if c.cluster_k == 1], ids=lambda config: config.name
)
def test_small_shapes_of_several_tiles_a_cta(
    force: Force, two_sms: None, config: RouterConfig
) -> None:
    """Three tiles for one CTA and two for the other, of odd and even numbers of k-blocks, fewer and more than
    stages; Inf and NaN in first and last ones; results that are stored four numbers at a time and one by one."""
    name = force(config)
    for k in (8, 40, 72, 104, 264, 424, 1000):
        a, b = operands_of(config, 8, 4 * config.tile_n + 8, k)
        explanation = cake_ops.explain(name, a, b)
        assert explanation.kernel == config.symbol and explanation.grid == 2
        check_forms(name, a, b)
    check_special(name, operands_of(config, config.tile_m + 8, 2 * config.tile_n + 8, 72))
    for columns in (
        8,
        12,
    ):  # with these and 16 around it, the rows of a BF16 result are in quads or not
        a, b = operands_of(config, config.tile_m + 8, 2 * config.tile_n + columns, 72)
        check_inside_a_buffer(name, a, b)
        for out in unaligned(reference.PRODUCTS[name](a, b).shape):
            getattr(cake_ops, name)(a, b, out=out)
            check(name, out, a, b)


@each_product
def test_small_shapes_of_copied_operands(name: str) -> None:
    for layout in ("transposed", "misaligned", "strided", "rows-expanded"):
        a, b = (LAYOUTS[layout](t) for t in router(33, 12, 36).tensors(name))
        check_forms(name, a, b)


@each_product
@each_mix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_in_every_layout(layout: str, mix: tuple[torch.dtype, ...], name: str) -> None:
    for sizes in ((100, 64, 1000), (257, 100, 36)):
        a, b = operands(name, sizes, mix)
        for first, second in ((LAYOUTS[layout](a), b), (a, LAYOUTS[layout](b))):
            check_forms(name, first, second)


# Scales


@each_product
def test_h29_every_row_at_every_scale_keeps_the_bound(name: str) -> None:
    """The rows of the first operand and the columns of the result have scales from 2^-60 to 2^30."""
    scales = torch.tensor([2.0**-60, 2.0**-30, 1.0, 2.0**30], device=DEVICE)
    for sizes in ((256, 256, 4096), (1024, 100, 1000), (64, 512, 36)):
        a, b = router(*sizes).tensors(name)
        rows = scales[torch.arange(a.shape[name.endswith("wgrad")], device=DEVICE) % 4]
        a = a * (rows if name.endswith("wgrad") else rows.unsqueeze(1))
        result, expected = getattr(cake_ops, name)(a, b), reference.PRODUCTS[name](a, b)
        errors = (result.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.max() <= ROUTER_TOLERANCE, (sizes, errors.max().item())
        columns = scales[torch.arange(b.shape[name != "router_mm"], device=DEVICE) % 4]
        b = b * (columns.unsqueeze(1) if name == "router_mm" else columns)
        result, expected = getattr(cake_ops, name)(a, b), reference.PRODUCTS[name](a, b)
        for i, j in product(range(4), range(4)):
            part = (slice(i, None, 4), slice(j, None, 4))
            error = reference.relative_error(result[part], expected[part])
            assert error <= ROUTER_TOLERANCE, (sizes, i, j, error)


def assert_pattern_of_torch(name: str, result: Tensor, a: Tensor, b: Tensor) -> None:
    """Inf, -Inf and NaN where an FP32 product of torch have them."""
    a, b = a.float(), b.float()
    expected = {
        "router_mm": lambda: a @ b.t(), "router_mm_dgrad": lambda: a @ b, "router_mm_wgrad": lambda: a.t() @ b,
    }[name]()  # fmt: skip
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = kind(result) != kind(expected)
        assert not wrong.any(), f"{kind.__name__} at {wrong.nonzero()[:5].tolist()}"


LARGEST = torch.finfo(FP32).max


@each_product
@pytest.mark.parametrize("operand", [0, 1], ids=["first", "second"])
def test_h28_the_largest_numbers_stay_finite(operand: int, name: str) -> None:
    """They round to Inf in TF32. Each sum has one of them, times 1, -1, 0.5 or 2^-20."""
    a, b = router(130, 64, 100).tensors(name)
    views = by_row(name, a, b)
    large, factor = views[operand], views[1 - operand]
    large.fill_(1.0)
    factor.zero_()
    large[:, 3] = LARGEST
    large[::3, 3] = -LARGEST
    values = torch.tensor([1, -1, 0.5, 2.0**-20], device=DEVICE)
    factor[:, 3] = values[torch.arange(len(factor), device=DEVICE) % 4]
    result, expected = getattr(cake_ops, name)(a, b), reference.PRODUCTS[name](a, b)
    wait()
    assert result.isfinite().all()
    assert ((result.double() - expected).abs() <= ROUTER_TOLERANCE * expected.abs()).all()
    factor[:, 3] *= 4  # what is too large is Inf, as in FP32, and not NaN
    result = getattr(cake_ops, name)(a, b)
    assert_pattern_of_torch(name, result, a, b)
    assert result.isinf().any() and not result.isnan().any()


@each_product
@pytest.mark.parametrize("operand", [0, 1], ids=["first", "second"])
def test_subnormals(operand: int, name: str) -> None:
    """A TF32 number is a multiple of 2^-136, so the two parts of an element are off by less than that.

    The errors have either sign: their sum stays far within 2^-132 times the norm of what they are multiplied
    with, which is far within what is documented.
    """
    a, b = router(100, 64, 1000).tensors(name)
    tiny, factor = by_row(name, a, b)[:: 1 - 2 * operand]
    exponents = torch.randint(-149, -125, tiny.shape, device=DEVICE)
    tiny.copy_(torch.ldexp(tiny.double(), exponents))
    assert 0.5 < ((tiny.abs() < 2.0**-126) & (tiny != 0)).float().mean()
    factor.mul_(2.0**20)
    result, expected = getattr(cake_ops, name)(a, b), reference.PRODUCTS[name](a, b)
    wait()
    error = (result.double() - expected).abs()
    room = 2.0**-132 * factor.double().norm(dim=1) + ROUTER_TOLERANCE * expected.abs().max()
    assert room.max() < 0.2 * expected.abs().max()
    assert (error <= (room if operand == 0 else room.unsqueeze(1))).all()


@each_product
def test_products_that_vanish_are_small(name: str) -> None:
    a, b = (t * 2.0**-70 for t in router(100, 64, 100).tensors(name))
    result = getattr(cake_ops, name)(a, b)
    wait()
    assert result.abs().max() <= 2.0**-126


# Inf and NaN


SPECIAL = {  # neighbouring terms of one sum
    "inf": (INF,),
    "-inf": (-INF,),
    "nan": (NAN,),
    "inf-inf": (INF, INF),
    "inf-minus-inf": (INF, -INF),
    "inf-nan": (INF, NAN),
}


def check_special(name: str, pair: tuple[Tensor, Tensor]) -> None:
    """Puts them in the first and last row and column of each operand and inside; other rows keep their bits.

    The other operand has zeros at some of the places that meet them: 0 x Inf is NaN.
    """
    for operand, special in product((0, 1), SPECIAL.values()):
        a, b = (t.clone() for t in pair)
        views = by_row(name, a, b)
        dirty = views[operand]
        rows, terms = dirty.shape
        views[1 - operand][::3, [0, terms // 2, terms - 1]] = 0
        clean = getattr(cake_ops, name)(a, b)
        bad = [0, rows // 2, rows - 1]
        for row, term in zip(bad, (0, terms // 2, terms - len(special)), strict=True):
            values = torch.tensor(special, device=DEVICE)
            dirty[row, term : term + len(special)] = values.to(dirty.dtype)
        result = getattr(cake_ops, name)(a, b)
        wait()
        assert clean.isfinite().all()
        assert_pattern_of_torch(name, result, a, b)
        before, after = (t if operand == 0 else t.t() for t in (clean, result))
        kept = [row for row in range(rows) if row not in bad]
        assert same_bits(after[kept], before[kept]), (operand, special)
        assert not after[bad].isfinite().any()
        if name != "router_mm":
            low = getattr(cake_ops, name)(a, b, out_dtype=BF16)
            assert_pattern_of_torch(name, low, a, b)
        if name == "router_mm_wgrad":
            start = torch.randn_like(result)
            added = cake_ops.router_mm_wgrad_(start.clone(), a, b)
            assert_pattern_of_torch(name, added, a, b)
            finite = result.isfinite()
            torch.testing.assert_close(
                added[finite], (start + result)[finite], rtol=1e-6, atol=1e-5
            )


@each_mix
@each_product
def test_h28_inf_and_nan_as_in_fp32(name: str, mix: tuple[torch.dtype, ...]) -> None:
    for sizes in ((130, 100, 100), (7, 64, 260), (257, 256, 4096)):
        check_special(name, operands(name, sizes, mix))


@each_config
def test_h28_inf_and_nan_in_every_policy(force: Force, config: RouterConfig) -> None:
    name = force(config)
    for sizes in ((config.tile_m + 68, config.tile_n + 8, 264), (72, 16, 1000)):
        check_special(name, operands_of(config, *sizes))


@each_config
def test_small_shapes_with_inf_and_nan(force: Force, config: RouterConfig) -> None:
    name = force(config)
    a, b = operands_of(config, 72, config.tile_n + 8, 72)
    by_row(name, a, b)[0][3, 5] = INF
    by_row(name, a, b)[1][4, 40] = NAN
    assert_pattern_of_torch(name, getattr(cake_ops, name)(a, b), a, b)


@each_product
@pytest.mark.parametrize("value", [INF, NAN])
def test_h28_rows_full_of_them_reach_no_other_row(name: str, value: float) -> None:
    for sizes in ((257, 256, 1000), (1024, 64, 100)):
        a, b = router(*sizes).tensors(name)
        clean = getattr(cake_ops, name)(a, b)
        rows = a.t() if name.endswith("wgrad") else a
        rows[5], rows[40:44] = value, value
        result = getattr(cake_ops, name)(a, b)
        wait()
        poisoned = torch.zeros(len(rows), dtype=torch.bool, device=DEVICE)
        poisoned[5] = poisoned[40:44] = True
        assert same_bits(result[~poisoned], clean[~poisoned])
        assert not result[poisoned].isfinite().any()


# Memory around the operands and the result


def surrounded(t: Tensor, columns: int) -> Tensor:
    """``t`` inside NaN: before it, behind it and in ``columns`` elements behind each of its rows."""
    rows, width = t.shape
    stride = width + columns
    flat = torch.full(((rows + 64) * stride,), NAN, device=DEVICE).to(t.dtype)
    return flat.as_strided(t.shape, (stride, 1), 32 * stride).copy_(t)


def unaligned(shape: torch.Size) -> Iterator[Tensor]:
    """Results whose rows are not all multiples of four numbers, or do not begin at one."""
    rows, columns = shape
    for dtype in (FP32, BF16):
        for offset, pitch in ((0, columns + 1), (1, columns), (2, columns + 2)):
            buffer = torch.full((rows * pitch + offset,), NAN, device=DEVICE, dtype=dtype)
            yield buffer[offset:].view(rows, pitch)[:, :columns]


def check_inside_a_buffer(name: str, a: Tensor, b: Tensor) -> None:
    """Results in the middle of a larger buffer, of each dtype: stored, and of a weight gradient added."""
    expected = reference.PRODUCTS[name](a, b)
    first, second = surrounded(a, 8), surrounded(b, 8)
    for dtype in (FP32,) if name == "router_mm" else (FP32, BF16):
        buffer, out = bordered(expected.shape, dtype)
        out.fill_(NAN)
        assert getattr(cake_ops, name)(first, second, out=out) is out
        check(name, out, a, b)
        assert_borders(buffer)
        if name == "router_mm_wgrad":
            start = torch.randn(expected.shape, device=DEVICE).to(dtype)
            out.copy_(start)
            cake_ops.router_mm_wgrad_(out, first, second)
            check(name, out, a, b, start)
            assert_borders(buffer)


@each_product
@each_mix
@pytest.mark.parametrize("columns", [0, 8, 64])
def test_nan_around_the_operands_changes_nothing(
    columns: int, mix: tuple[torch.dtype, ...], name: str
) -> None:
    """All of it is read in place, but for BF16 operands that are widened first."""
    for sizes in ((1, 8, 64), (63, 64, 200), (130, 136, 1000), (7, 256, 4096), (257, 72, 328)):
        a, b = operands(name, sizes, mix)
        first, second = surrounded(a, columns), surrounded(b, columns)
        if mix == (FP32, FP32):
            assert cake_ops.explain(name, first, second).path == "kernel"
        result = getattr(cake_ops, name)(first, second)
        check(name, result, a, b)
        assert same_bits(result, getattr(cake_ops, name)(a, b))


@each_product
@each_mix
def test_small_shapes_with_nan_around_and_canaries(name: str, mix: tuple[torch.dtype, ...]) -> None:
    for sizes in ((33, 72, 100), (7, 8, 36), (70, 136, 40)):
        check_inside_a_buffer(name, *operands(name, sizes, mix))


@each_product
@pytest.mark.parametrize("experts", [1, 8, 12, 63, 64, 100, 256, 257])
def test_h19_nothing_is_written_beside_the_result(experts: int, name: str) -> None:
    for tokens, hidden in product((1, 7, 100, 257), (4, 36, 100, 1000)):
        check_inside_a_buffer(name, *operands(name, (tokens, experts, hidden), (FP32, FP32)))


@each_product
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned_results_and_operands(name: str, offset: int) -> None:
    """Bases and rows that are no multiples of 16 bytes are right through a copy or otherwise."""
    a, b = router(100, 63, 100).tensors(name)
    flat = [torch.full((t.numel() + 8,), NAN, device=DEVICE) for t in (a, b)]
    moved = [
        f[offset : offset + t.numel()].view(t.shape).copy_(t)
        for f, t in zip(flat, (a, b), strict=True)
    ]
    shape = reference.PRODUCTS[name](a, b).shape
    for first, second in ((moved[0], b), (a, moved[1]), moved):
        buffer = torch.full((shape.numel() + 8,), CANARY, device=DEVICE)
        out = buffer[offset : offset + shape.numel()].view(shape).fill_(NAN)
        getattr(cake_ops, name)(first, second, out=out)
        check(name, out, a, b)
        assert (buffer[:offset] == CANARY).all()
        assert (buffer[offset + shape.numel() :] == CANARY).all()


# Beyond 2^31 elements


def edges(p: Problem) -> tuple[Tensor, Tensor]:
    """g and x of the rows that the weight gradient sums."""
    return torch.cat([p.g[:100], p.g[-100:]]), torch.cat([p.x[:100], p.x[-100:]])


def test_h24_tokens_beyond_2_to_the_31_elements() -> None:
    """T H > 2^31 as operand (fwd, wgrad) and as result (dgrad): 10 GB. Element 2^31 is row 524288."""
    p = router(600_001, 8, 4096)
    ends = [slice(0, 64), slice(524288 - 64, 524288 + 64), slice(600_001 - 64, 600_001)]
    y = p.run("router_mm")
    for rows in ends:
        check("router_mm", y[rows], p.x[rows], p.w)
    dx = p.run("router_mm_dgrad")
    for rows in ends:
        check("router_mm_dgrad", dx[rows], p.g[rows], p.w)
    del dx
    last = ends[-1]
    p.x[-1, -1], p.g[-1, -1] = INF, NAN  # sums that are made again find their operands
    assert_pattern_of_torch("router_mm", p.run("router_mm")[last], p.x[last], p.w)
    assert_pattern_of_torch("router_mm_dgrad", p.run("router_mm_dgrad")[last], p.g[last], p.w)
    p.x[-1, -1] = p.g[-1, -1] = 1
    p.g[100:-100] = 0  # so that the sum is short and its last rows count
    check("router_mm_wgrad", p.run("router_mm_wgrad"), *edges(p))


def test_h24_logits_beyond_2_to_the_31_elements() -> None:
    """T N > 2^31 as result (fwd) and as operand (dgrad, wgrad): 9 GB. Element 2^31 is row 4194304."""
    p = router(4_200_003, 512, 4)
    ends = [slice(0, 64), slice(4194304 - 64, 4194304 + 64), slice(4_200_003 - 64, 4_200_003)]
    y = p.run("router_mm")
    for rows in ends:
        check("router_mm", y[rows], p.x[rows], p.w)
    del y
    dx = p.run("router_mm_dgrad")
    for rows in ends:
        check("router_mm_dgrad", dx[rows], p.g[rows], p.w)
    p.x[100:-100] = 0
    check("router_mm_wgrad", p.run("router_mm_wgrad"), *edges(p))
