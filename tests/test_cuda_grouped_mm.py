"""Values of the sm_90a kernels where only the GPU can tell: every policy, and the same bits each time.

What holds on every device is in test_grouped_mm.py. A test called after a case (h01, ..) is a defect that
users of another package met once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import reference
import torch
from forms import LAYOUTS, NAN, same_bits
from gpu import BF16, DEVICE, GROUPED_PRODUCTS, Problem, assert_repeats, check, problem, wait
from torch import Tensor

import cake_ops
from cake_ops.cuda import grouped_routes
from cake_ops.cuda.grouped_config import GroupedConfig, policies

pytestmark = pytest.mark.gpu

OUTPUTS = ("bf16_store", "bf16_add", "f32_store", "f32_add")
WGRAD = [config for output in OUTPUTS for config in policies("tn", output)]
CONFIGS = [*policies("nt"), *policies("nn"), *WGRAD]

Force = Callable[[GroupedConfig], None]
Call = tuple[str, tuple[Tensor, ...]]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Force]:
    """Makes every call use one configuration, whatever the planner would choose."""

    def force(config: GroupedConfig) -> None:
        monkeypatch.setattr(grouped_routes, "select_config", lambda *problem: config)
        cake_ops.clear_caches()

    yield force
    cake_ops.clear_caches()


def each_config(configs: list[GroupedConfig]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("config", configs, ids=[config.symbol for config in configs])


def calls(config: GroupedConfig, p: Problem) -> list[Call]:
    """The products that a kernel computes, with the weight in the memory order that it reads."""
    if config.layout == "tn":
        return [("grouped_mm_wgrad", (p.g, p.x, p.offs))]
    transposed = LAYOUTS["transposed"](p.w)
    fwd, dgrad = (p.w, transposed) if config.layout == "nt" else (transposed, p.w)
    return [("grouped_mm", (p.x, fwd, p.offs)), ("grouped_mm_dgrad", (p.g, dgrad, p.offs))]


def run(config: GroupedConfig, call: Call, start: Tensor) -> Tensor:
    """The result of a call; one that adds begins from ``start``."""
    name, tensors = call
    if config.layout != "tn":
        assert cake_ops.explain(name, *tensors).kernel == config.symbol
        return getattr(cake_ops, name)(*tensors)
    dtype = torch.float32 if config.output.startswith("f32") else BF16
    if config.output.endswith("_store"):
        assert cake_ops.explain(name, *tensors, out_dtype=dtype).kernel == config.symbol
        return cake_ops.grouped_mm_wgrad(*tensors, out_dtype=dtype)
    out = start.to(dtype, copy=True)
    route = grouped_routes.into_route(grouped_routes.wgrad_add_route, out, *tensors)
    assert route.explanation.kernel == config.symbol
    return cake_ops.grouped_mm_wgrad_(out, *tensors)


def check_policy(config: GroupedConfig, sizes: list[int], n: int, k: int) -> None:
    """Values, zeros in the tail rows and in empty groups, and kept bits where a group adds nothing."""
    p = problem(sizes, n, k, tail=5)
    empty = torch.tensor([size == 0 for size in sizes], device=DEVICE)
    for call in calls(config, p):
        actual = run(config, call, p.w)
        expected = reference.PRODUCTS[call[0]](*call[1])
        if config.output.endswith("_add"):
            check(actual, expected + p.w.double())
            assert same_bits(actual[empty], p.w[empty].to(actual.dtype))
        else:
            check(actual, expected)
            blank = actual[empty] if config.layout == "tn" else actual[-5:]
            assert (blank == 0).all()


def scattered(experts: int, every: int = 1) -> list[int]:
    """Sizes from 0 to 130 rows; with ``every`` most groups are empty."""
    return [0 if e % every else 37 * e % 131 * (e % 5 != 3) for e in range(experts)]


SIZES = {
    "ragged": [300, 0, 1, 700],
    "skewed": [1, 257, 511, 4099, 0, 33],
    "ends-in-an-odd-super-block": [2400, 100, 3328],
    "few-rows": [1, 2, 3, 0, 4],
    "h14-unaligned": [1, 7, 0, 3, 13, 8],
    "one-group-has-all": [0, 0, 1000, 0],
}
COLUMNS = [(8, 1000), (72, 264), (136, 520), (264, 136), (520, 72), (1000, 8)]
MANY = {
    "31": scattered(31),  # the scheduler looks at 32 groups at a time
    "32": scattered(32),
    "33": scattered(33),
    "256": scattered(256, 3),  # and ranks up to 256 by weight
    "257": scattered(257, 3),
    "1000-mostly-empty": scattered(1000, 83),
    "3000": scattered(3000, 2),
    "all-empty": [0] * 40,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@each_config(CONFIGS)
def test_every_policy_at_every_size(force: Force, config: GroupedConfig, sizes: list[int]) -> None:
    force(config)
    for n, k in COLUMNS:
        check_policy(config, sizes, n, k)


@pytest.mark.parametrize("sizes", MANY.values(), ids=MANY)
@each_config(CONFIGS)
def test_every_policy_with_many_groups(
    force: Force, config: GroupedConfig, sizes: list[int]
) -> None:
    force(config)
    check_policy(config, sizes, 72, 136)


@each_config(WGRAD)
def test_h01_h02_empty_experts_of_every_weight_gradient(
    force: Force, config: GroupedConfig
) -> None:
    force(config)
    check_policy(config, [162, 0, 2577, 446, 0, 83], 768, 2048)
    few = [0] * 256
    few[0], few[7], few[100], few[101], few[255] = 5, 1, 64, 9, 17
    for sizes in ([3] * 256, few, [0] * 256):
        check_policy(config, sizes, 128, 128)


@pytest.mark.parametrize("value", [NAN, float("inf")])
@each_config(CONFIGS)
def test_nan_and_inf_reach_no_other_group(
    force: Force, config: GroupedConfig, value: float
) -> None:
    """Rows behind the last group are NaN; then the groups 1 and 3 are poisoned in every operand."""
    force(config)
    sizes = [70, 64, 0, 200, 3]
    p = problem(sizes, 136, 200, tail=9)
    clean = [run(config, call, p.w) for call in calls(config, p)]
    start = p.w.clone()
    for e, rows in ((1, slice(70, 134)), (3, slice(134, 334))):
        p.x[rows], p.g[rows], p.w[e] = value, value, value
    group = torch.arange(5, device=DEVICE)
    if config.layout != "tn":
        group = group.repeat_interleave(torch.tensor([*sizes[:-1], 12], device=DEVICE))
    poisoned = (group == 1) | (group == 3)
    for call, before in zip(calls(config, p), clean, strict=True):
        dirty = run(config, call, start)
        wait()
        assert same_bits(dirty[~poisoned], before[~poisoned])
        assert before.isfinite().all() and not dirty[poisoned].isfinite().any()


def test_h33_every_policy_sums_in_fp32(force: Force) -> None:
    """A BF16 sum of ones stalls at 256."""
    for terms in (4096, 16384):
        ones = torch.ones(32, terms, dtype=BF16, device=DEVICE)
        split, whole = (reference.offsets(sizes, DEVICE) for sizes in ([8, 24], [0, terms]))
        weights = ones.expand(2, 32, terms).contiguous()
        columns = ones.t().contiguous()
        for config in (c for c in CONFIGS if not c.output.endswith("_add")):
            force(config)
            p = Problem(ones, weights, ones, split)
            if config.layout == "tn":
                y = run(config, ("grouped_mm_wgrad", (columns, columns, whole)), weights)
                assert (y[0] == 0).all() and (y[1] == terms).all()
            else:
                y = run(config, calls(config, p)[0], weights)
                assert y.shape == (32, 32) and (y == terms).all()


# The same bits


@pytest.mark.parametrize("configs", [policies("nt"), policies("nn"), policies("tn")])
def test_h31_the_bits_do_not_depend_on_the_policy(
    force: Force, configs: tuple[GroupedConfig, ...]
) -> None:
    p = problem([300, 0, 1, 700], 520, 1000)
    results = []
    for config in configs:
        force(config)
        results.append([run(config, call, p.w) for call in calls(config, p)])
    for result in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(result, results[0], strict=True))


def test_h31_a_row_does_not_depend_on_the_number_of_rows() -> None:
    p = problem([65536, 300], 512, 768)
    heads, used = [], set()
    for size in (16, 32, 64, 128, 1024, 65536):
        rows = torch.cat([torch.arange(size), torch.arange(65536, 65836)]).to(DEVICE)
        part = Problem(p.x[rows], p.w, p.g[rows], reference.offsets([size, 300], DEVICE))
        used.add(cake_ops.explain("grouped_mm", *part.tensors("grouped_mm")).kernel)
        heads.append([part.run(name)[:16] for name in GROUPED_PRODUCTS[:2]])
    assert len(used) > 1, "sizes that take different kernels are the point"
    for head in heads[1:]:
        assert all(same_bits(a, b) for a, b in zip(head, heads[0], strict=True))


@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize(
    "name, options",
    [(name, {}) for name in GROUPED_PRODUCTS]
    + [("grouped_mm_wgrad", {"out_dtype": torch.float32})],
    ids=[*GROUPED_PRODUCTS, "grouped_mm_wgrad-fp32"],
)
def test_h32_500_repeats_have_the_same_bits(
    name: str, options: dict[str, torch.dtype], busy: bool
) -> None:
    """With unrelated work and frees in between, and with another stream that keeps the SMs busy."""
    p = problem([100, 0, 257, 1, 640], 520, 1000)
    first = assert_repeats(
        lambda: p.run(name, **options), lambda: torch.randn_like(p.x).mul_(2), busy
    )
    check(first, p.expected(name))
