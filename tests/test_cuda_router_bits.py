"""Which results of the router's sm_90a kernels have the same bits: of a row in any batch, of every policy, of every run.

A test called after a case (h31, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import pytest
import reference
import torch
from forms import LAYOUTS, same_bits, select
from gpu import BF16, DEVICE, FP32, ROUTER_PRODUCTS, assert_repeats, router
from test_cuda_router_mm import Force, check, each_product

import cake_ops
from cake_ops.cuda.router_config import all_configs

pytestmark = pytest.mark.gpu

# Routing: the experts are those of FP64


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_h26_a_token_picks_the_same_experts_in_every_batch(x_dtype: torch.dtype) -> None:
    p = router(8192, 256, 7168, x_dtype)
    exact = reference.mm(p.x[:64], p.w)
    logits = cake_ops.router_mm(p.x[:64], p.w)
    for tokens in (1, 16, 63, 129, 4096, 8192):
        rows = min(tokens, 64)
        batch = cake_ops.router_mm(p.x[:tokens], p.w)[:rows]
        assert same_bits(batch, logits[:rows])
        picked = batch.topk(16, 1).indices.sort(1).values
        assert torch.equal(picked, exact[:rows].topk(16, 1).indices.sort(1).values)


TOKENS = (1, 7, 8, 16, 17, 24, 40, 41, 64, 80, 129, 152, 257, 1024, 4096)


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
@pytest.mark.parametrize("hidden", [36, 100, 1000, 4096, 7168])
@pytest.mark.parametrize("experts", [8, 63, 64, 100, 256, 257, 384])
def test_h31_the_bits_of_a_row_do_not_depend_on_the_batch(
    experts: int, hidden: int, x_dtype: torch.dtype
) -> None:
    """Neither on the number of tokens, nor on the row where a token stands."""
    p = router(TOKENS[-1], experts, hidden, x_dtype)
    whole = p.run("router_mm")
    for tokens in TOKENS[:-1]:
        assert same_bits(cake_ops.router_mm(p.x[:tokens], p.w), whole[:tokens]), tokens
    for tokens in (40, 257, TOKENS[-1]):
        order = torch.randperm(TOKENS[-1], device=DEVICE)[:tokens]
        assert same_bits(cake_ops.router_mm(p.x[order], p.w), whole[order]), tokens


@pytest.mark.parametrize("experts, hidden", [(64, 1000), (256, 4096)])
def test_h31_the_bits_of_a_row_of_the_data_gradient(
    force: Force, experts: int, hidden: int
) -> None:
    """They depend neither on the batch nor on the policy: no data gradient splits its sums."""
    p = router(TOKENS[-1], experts, hidden)
    g = torch.randn(TOKENS[-1], experts, device=DEVICE)
    whole = cake_ops.router_mm_dgrad(g, p.w)
    for tokens in TOKENS[:-1]:
        assert same_bits(cake_ops.router_mm_dgrad(g[:tokens], p.w), whole[:tokens]), tokens
    for config in all_configs():
        if config.layout == "nn":
            force(config)
            assert same_bits(cake_ops.router_mm_dgrad(g[:161], p.w), whole[:161]), config.name


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_h31_the_bits_of_a_row_do_not_depend_on_its_layout(x_dtype: torch.dtype) -> None:
    """What is read in place and what is copied first, BF16 numbers in either dtype of the weight."""
    p = router(100, 64, 1000, x_dtype, BF16)
    plain = p.run("router_mm")
    for layout in ("transposed", "sliced", "misaligned", "strided"):
        assert same_bits(cake_ops.router_mm(LAYOUTS[layout](p.x), p.w), plain)
        assert same_bits(cake_ops.router_mm(p.x, LAYOUTS[layout](p.w)), plain)
    assert same_bits(cake_ops.router_mm(p.x, p.w.float()), plain)


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_h31_the_bits_of_a_row_do_not_depend_on_the_policy(
    force: Force, x_dtype: torch.dtype
) -> None:
    p = router(161, 136, 1000, x_dtype)
    plain = p.run("router_mm")
    dtype = "bf16" if x_dtype == BF16 else "f32"
    for config in all_configs():
        if (config.layout, config.b_dtype) == ("nt", dtype):
            force(config)
            assert cake_ops.explain("router_mm", p.x, p.w).kernel == config.symbol
            assert same_bits(p.run("router_mm"), plain), config.name


# The same bits


@each_product
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "busy"])
@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=["x-fp32", "x-bf16"])
def test_h32_500_repeats_have_the_same_bits(x_dtype: torch.dtype, busy: bool, name: str) -> None:
    """With unrelated work and frees in between, and with another stream that keeps the SMs busy."""
    p = router(257, 256, 4096, x_dtype)
    first = assert_repeats(lambda: p.run(name), lambda: torch.randn_like(p.g).mul_(2), busy)
    check(name, first, *p.tensors(name))


def test_h32_a_forward_that_allows_arrival_order_repeats_too() -> None:
    """Routing must not depend on the mode: both give the forward the same bits."""
    for sizes in ((1, 256, 7168), (257, 64, 4096), (2048, 256, 4096)):
        p = router(*sizes)
        first = p.run("router_mm")
        for _ in range(50):
            assert same_bits(p.run("router_mm", deterministic=False), first)
        for name in ROUTER_PRODUCTS[1:]:
            check(name, p.run(name, deterministic=False), *p.tensors(name))


@each_product
def test_bf16_results_are_the_fp32_ones_rounded(name: str) -> None:
    if name == "router_mm":
        pytest.skip("logits are FP32")
    for sizes in ((257, 63, 1000), (64, 256, 4096)):
        a, b = select(name, *router(*sizes).present)
        full = getattr(cake_ops, name)(a, b)
        assert same_bits(getattr(cake_ops, name)(a, b, out_dtype=BF16), full.bfloat16())
