"""Values of the router GEMMs against FP64: FP32 quality whatever the dtypes, sizes, scales and switches.

A test called after a case (h20, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import reference
import torch
from forms import LAYOUTS, NAN, assert_all_forms, assert_close, same_bits, seen_operators, select
from torch import Tensor

import cake_ops

BF16, FP32 = torch.bfloat16, torch.float32
INF = float("inf")
PRODUCTS = ("router_mm", "router_mm_dgrad", "router_mm_wgrad")
ROUTER_TOLERANCE = 5e-7  # of every FP32 result, Frobenius and peak
DTYPES = {
    "fp32-fp32": (FP32, FP32),
    "bf16-fp32": (BF16, FP32),
    "fp32-bf16": (FP32, BF16),
    "bf16-bf16": (BF16, BF16),
}
SIZES = {  # T, N, H
    "odd": (257, 63, 100),
    "one-token": (1, 100, 257),
    "one-expert": (63, 1, 100),
    "h-1": (100, 63, 1),
    "h-7": (63, 100, 7),
    "aligned": (128, 256, 512),
    "t-0": (0, 8, 64),
    "n-0": (7, 0, 64),
    "h-0": (7, 8, 0),
}


def make(
    tokens: int, experts: int, hidden: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, g in FP32."""
    x = torch.randn(tokens, hidden, device=device)
    w = torch.randn(experts, hidden, device=device)
    g = torch.randn(tokens, experts, device=device)
    return x, w, g


def top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest of each row as a mask."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(k, 1).indices, True)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_h09_values_at_every_size(
    device: torch.device,
    sizes: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    name: str,
) -> None:
    a, b = select(name, *make(*sizes, device))
    assert_all_forms(name, a.to(dtypes[0]), b.to(dtypes[1]), tolerance=ROUTER_TOLERANCE)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("operand", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_in_every_layout(device: torch.device, name: str, operand: int, layout: str) -> None:
    tensors = list(select(name, *make(63, 40, 72, device)))
    tensors[operand] = LAYOUTS[layout](tensors[operand])
    assert_all_forms(name, *tensors, tolerance=ROUTER_TOLERANCE)


@pytest.mark.parametrize("experts", [8, 12, 64, 128, 256, 257])
@pytest.mark.parametrize("hidden", [3072, 6144])
def test_h20_few_experts_and_odd_token_counts(
    device: torch.device, hidden: int, experts: int
) -> None:
    for tokens in (1, 48, 96, 129):
        x, w, _ = make(tokens, experts, hidden, device)
        assert_close(cake_ops.router_mm(x, w), reference.mm(x, w), ROUTER_TOLERANCE)


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_h25_tokens_pick_the_experts_of_fp64(device: torch.device, x_dtype: torch.dtype) -> None:
    """8 of 256 experts at H = 7168; on a GPU for more than 10^5 tokens.

    Two logits may change places if FP64 puts them closer together than twice the error that each may have.
    """
    batches, tokens = (13, 8192) if device.type == "cuda" else (1, 512)
    tied = 0
    for _ in range(batches):
        x, w, _ = make(tokens, 256, 7168, device)
        x = x.to(x_dtype)
        exact, logits = reference.mm(x, w), cake_ops.router_mm(x, w)
        assert_close(logits, exact, ROUTER_TOLERANCE)
        values = exact.topk(9, 1).values
        tie = values[:, 7] - values[:, 8] <= 2 * ROUTER_TOLERANCE * values[:, 0]
        same = (top_k(logits, 8) == top_k(exact, 8)).all(1)
        assert (same | tie).all()
        tied += tie.sum().item()
    assert tied <= 2e-4 * batches * tokens  # so there is nothing to hide behind


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_h26_a_token_picks_the_same_experts_in_every_batch(
    device: torch.device, x_dtype: torch.dtype
) -> None:
    """The sets of 16 out of 256 are those of FP64, and the logits have the same bits at every T (h31)."""
    x, w, _ = make(8192, 256, 128, device)
    x = x.to(x_dtype)
    exact = reference.mm(x[:64], w)
    values = exact.sort(1).values
    ties = (values[:, -16] - values[:, -17]) <= ROUTER_TOLERANCE * values[:, -1]
    assert ties.sum() <= 1
    logits = cake_ops.router_mm(x[:64], w)
    assert torch.equal(top_k(logits, 16)[~ties], top_k(exact, 16)[~ties])
    for tokens in (1, 16, 129, 4096, 8192):
        rows = min(tokens, 64)
        assert same_bits(cake_ops.router_mm(x[:tokens], w)[:rows], logits[:rows])


@pytest.mark.parametrize("name", ["router_mm", "router_mm_dgrad"])
def test_h31_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device, name: str) -> None:
    a, b = select(name, *make(1024, 100, 257, device))
    head = getattr(cake_ops, name)(a[:16], b)
    for tokens in (32, 64, 128, 1024):
        assert same_bits(getattr(cake_ops, name)(a[:tokens], b)[:16], head)


@pytest.mark.parametrize("w_dtype", [FP32, BF16], ids=["w-fp32", "w-bf16"])
@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_h27_gradients_have_the_dtype_of_their_operand(
    device: torch.device, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    x, w, g = make(63, 40, 100, device)
    x, w = x.to(x_dtype).requires_grad_(), w.to(w_dtype).requires_grad_()
    y = cake_ops.router_mm(x, w)
    assert y.dtype == FP32
    with seen_operators() as seen:
        y.backward(g)
    assert {"cake::router_mm_dgrad", "cake::router_mm_wgrad"} <= set(seen)
    assert "aten::_to_copy" not in seen  # each product writes its dtype itself
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    reference.mm(x64, w64).backward(g.double())
    for t, t64 in ((x, x64), (w, w64)):
        assert t.grad.dtype == t.dtype
        assert_close(t.grad, t64.grad, ROUTER_TOLERANCE if t.dtype == FP32 else None)


def test_h28_inf_and_nan_as_in_fp32(device: torch.device) -> None:
    x, w, g = make(40, 63, 100, device)
    w[3, 5], w[3, 7] = INF, 1
    x[2, 7], x[2, 5] = -INF, 1
    x[11, 20] = NAN
    g[8, 9] = INF
    for name in PRODUCTS:
        a, b = select(name, x, w, g)
        result = getattr(cake_ops, name)(a, b)
        expected = reference.PRODUCTS[name](a, b)
        finite = expected.isfinite()
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isposinf(), expected.isposinf())
        assert torch.equal(result.isneginf(), expected.isneginf())
        assert 0 < finite.sum() < finite.numel()
        assert_close(result[finite], expected[finite], ROUTER_TOLERANCE)
    logits = cake_ops.router_mm(x, w)
    assert logits[11].isnan().all() and logits[2, 3].isnan()  # Inf - Inf
    assert logits.isnan().sum() == 63 + 1
    assert logits.isinf().sum() == 38 + 62


def test_h28_finite_stays_finite_up_to_the_maximum(device: torch.device) -> None:
    """The largest FP32 values round to Inf in BF16; a split must not let that through."""
    largest = torch.finfo(FP32).max
    x = torch.full((7, 64), largest, device=device)
    w = torch.zeros(9, 64, device=device)
    w[range(9), range(9)] = torch.tensor([1, -1, 0.5, 2**-20, 1, 1, 1, 1, 1], device=device)
    assert_close(cake_ops.router_mm(x, w), reference.mm(x, w), ROUTER_TOLERANCE)
    assert_close(cake_ops.router_mm(w, x), reference.mm(w, x), ROUTER_TOLERANCE)


SCALES = (2.0**-60, 2.0**-30, 1.0, 2.0**30)


@pytest.mark.parametrize("name", PRODUCTS)
def test_h29_rows_of_any_scale_keep_their_accuracy(device: torch.device, name: str) -> None:
    """Each row and column of the result has a scale of its own; the bound holds for every pair."""
    a, b = select(name, *make(64, 48, 200, device))
    scale = torch.tensor(SCALES, device=device)

    def scaled(t: Tensor, dim: int) -> Tensor:
        return (t * scale.repeat(t.shape[dim] // 4).unsqueeze(1 - dim)).contiguous()

    rows, columns = {
        "router_mm": (0, 0), "router_mm_dgrad": (0, 1), "router_mm_wgrad": (1, 1),
    }[name]  # fmt: skip
    a, b = scaled(a, rows), scaled(b, columns)
    result, expected = getattr(cake_ops, name)(a, b), reference.PRODUCTS[name](a, b)
    for i in range(4):
        for j in range(4):
            assert_close(result[i::4, j::4], expected[i::4, j::4], ROUTER_TOLERANCE)


@contextmanager
def changed(target: Any, attribute: str, value: Any) -> Iterator[None]:
    before = getattr(target, attribute)
    setattr(target, attribute, value)
    try:
        yield
    finally:
        setattr(target, attribute, before)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CUDA, MKLDNN = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
SWITCHES: dict[str, Callable[[torch.device], AbstractContextManager]] = {
    "precision-high": lambda _: matmul_precision("high"),
    "precision-medium": lambda _: matmul_precision("medium"),
    "cuda-allow-tf32": lambda _: changed(CUDA, "allow_tf32", True),
    "cuda-tf32": lambda _: changed(CUDA, "fp32_precision", "tf32"),
    "mkldnn-bf16": lambda _: changed(MKLDNN, "fp32_precision", "bf16"),
    "mkldnn-tf32": lambda _: changed(MKLDNN, "fp32_precision", "tf32"),
    "cuda-bf16-sums": lambda _: changed(CUDA, "allow_bf16_reduced_precision_reduction", True),
    "deterministic": lambda _: deterministic_algorithms(),
    "autocast": lambda device: torch.autocast(device.type, dtype=BF16),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_h30_switches_of_torch_change_no_bit(device: torch.device, switch: str) -> None:
    x, w, g = make(63, 40, 200, device)

    def results() -> list[Tensor]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = cake_ops.router_mm(a, b)
        y.backward(g)
        direct = (getattr(cake_ops, name)(*select(name, x, w, g)) for name in PRODUCTS)
        return [y.detach(), a.grad, b.grad, *direct]

    plain = results()
    with SWITCHES[switch](device):
        switched = results()
    for before, after in zip(plain, switched, strict=True):
        assert same_bits(before, after)


@pytest.mark.parametrize("terms", [4096, 16384])
def test_h33_sums_of_ones_are_exact(device: torch.device, terms: int) -> None:
    ones = torch.ones(32, terms, dtype=BF16, device=device)
    assert (cake_ops.router_mm(ones, ones) == terms).all()
    assert (cake_ops.router_mm_dgrad(ones, ones.t()) == terms).all()
    assert (cake_ops.router_mm_wgrad(ones.t(), ones.t()) == terms).all()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_results_are_bitwise_repeatable(
    device: torch.device, name: str, deterministic: bool
) -> None:
    """The forward in both modes, the gradients in the deterministic one."""
    tensors = select(name, *make(257, 63, 200, device))
    function = partial(getattr(cake_ops, name), *tensors, deterministic=deterministic)
    first = function()
    assert_close(first, reference.PRODUCTS[name](*tensors), ROUTER_TOLERANCE)
    if name != "router_mm" and not deterministic:
        return
    for _ in range(5):
        torch.randn(100, 1000, device=device).mul_(2)
        assert same_bits(function(), first)


# The split


def fp32(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(FP32)


def test_split_is_exact_at_every_exponent(device: torch.device) -> None:
    """Random and extreme significands from 2^-110 to FP32's maximum, both signs, and zero."""
    exponents = torch.arange(127 - 110, 255).unsqueeze(1)
    significands = torch.cat([
        torch.randint(0, 1 << 23, (100,)),
        torch.tensor([0, 1, 0x7FFFFF, 0x7FFFFE, 0x7F8000, 0x7FFF, 0x8000, 0x8001, 0x400000]),
    ])  # fmt: skip
    x = fp32((exponents << 23) | significands).to(device)
    x = torch.cat([x, -x, torch.zeros(1, x.shape[1], device=device)])
    assert x.max() == torch.finfo(FP32).max and x.abs()[x != 0].min() == 2.0**-110
    parts = cake_ops.split_bf16x3(x)
    assert parts.shape == (3, *x.shape) and parts.dtype == BF16 and parts.is_contiguous()
    assert torch.equal(parts.double().sum(0), x.double())
    magnitudes = parts.double().abs()
    assert (magnitudes[1] <= magnitudes[0] * 2**-7).all()
    assert (magnitudes[2] <= magnitudes[1] * 2**-7).all()


def test_split_of_small_values(device: torch.device) -> None:
    """Below 2^-110: exact for multiples of 2^-133, else off by half of that at most."""
    exponents = torch.arange(0, 127 - 110).unsqueeze(1)
    x = fp32((exponents << 23) | torch.randint(0, 1 << 23, (200,))).double()
    coarse = (x / 2.0**-133).round() * 2.0**-133
    fine = x.float().to(device)
    error = cake_ops.split_bf16x3(fine).double().sum(0) - fine.double()
    assert 0 < error.abs().max() <= 2.0**-134
    coarse = coarse.float().to(device)
    assert torch.equal(cake_ops.split_bf16x3(coarse).double().sum(0), coarse.double())


@pytest.mark.parametrize("value", [INF, -INF, NAN, 0.0, -0.0])
def test_split_puts_special_values_in_the_first_part(device: torch.device, value: float) -> None:
    parts = cake_ops.split_bf16x3(torch.full((7,), value, device=device))
    first = torch.full((7,), value, dtype=BF16, device=device)
    if math.isnan(value):
        assert parts[0].isnan().all()
    else:
        assert same_bits(parts[0], first)
    assert (parts[1:] == 0).all()


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 5), (2, 3, 63)])
def test_split_of_any_shape(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device)
    parts = cake_ops.split_bf16x3(x)
    assert parts.shape == (3, *shape)
    assert torch.equal(parts.double().sum(0), x.double())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_in_every_layout(device: torch.device, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(63, 40, device=device))
    parts = cake_ops.split_bf16x3(x)
    assert parts.is_contiguous()
    assert torch.equal(parts.double().sum(0), x.double())
