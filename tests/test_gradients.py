"""Gradients as a training step meets them: expanded incoming gradients, empty ranks, padding, layouts.

The values are compared with FP64 autograd through the reference. tests/test_autograd.py has the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import reference
import torch
from families import FAMILIES
from forms import LAYOUTS, assert_close, same_bits
from torch import Tensor

import cake_ops
from cake_ops.testing import count_launches

BF16 = torch.bfloat16
GROUPS, TAIL, N, K = [9, 0, 64, 7], 3, 40, 24
ROWS = sum(GROUPS) + TAIL
SHAPES = {  # x and w
    "grouped_mm": ((ROWS, K), (len(GROUPS), N, K)),
    "router_mm": ((ROWS, K), (N, K)),
    "dense_mm": ((3, 7, K), (N, K)),
    "batched_mm": ((3, 7, K), (3, N, K)),
}


def leaves(name: str, device: torch.device) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """x and w, which need grad, and what else the operator takes."""
    dtype = torch.float32 if name == "router_mm" else BF16
    x, w = (torch.randn(shape, device=device).to(dtype) for shape in SHAPES[name])
    offs = (reference.offsets(GROUPS, device),) if name == "grouped_mm" else ()
    return x.requires_grad_(), w.requires_grad_(), offs


def expected_gradients(
    name: str, x: Tensor, w: Tensor, offs: tuple[Tensor, ...], g: Tensor
) -> tuple[Tensor, ...]:
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    y = reference.PRODUCTS[name](x64, w64, *offs)
    if not y.requires_grad:  # no experts: a loop of no steps
        return torch.zeros_like(x64), torch.zeros_like(w64)
    return torch.autograd.grad(y, (x64, w64), g.double())


INCOMING: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda g: g,
    "stride-0": lambda g: g.flatten()[:1].view((1,) * g.dim()).expand(g.shape),
    "stride-0-1": lambda g: g[..., :1, :].expand(g.shape),
    "stride-1-0": lambda g: g[..., :1].expand(g.shape),
    "transposed": LAYOUTS["transposed"],
    "sliced": LAYOUTS["sliced"],
}


@pytest.mark.parametrize("incoming", INCOMING)
@pytest.mark.parametrize("name", FAMILIES)
def test_h10_incoming_gradient_of_any_strides(
    device: torch.device, name: str, incoming: str
) -> None:
    x, w, offs = leaves(name, device)
    y = getattr(cake_ops, name)(x, w, *offs)
    g = INCOMING[incoming](torch.randn(y.shape, device=device).to(y.dtype))
    gradients = torch.autograd.grad(y, (x, w), g, retain_graph=True)
    for actual, expected in zip(gradients, expected_gradients(name, x, w, offs, g), strict=True):
        assert_close(actual, expected)
    for actual, plain in zip(
        gradients, torch.autograd.grad(y, (x, w), g.contiguous()), strict=True
    ):
        assert same_bits(actual, plain)


@pytest.mark.parametrize("reduce", [Tensor.sum, Tensor.mean], ids=["sum", "mean"])
@pytest.mark.parametrize("name", FAMILIES)
def test_h10_sum_and_mean(
    device: torch.device, name: str, reduce: Callable[[Tensor], Tensor]
) -> None:
    x, w, offs = leaves(name, device)
    y = getattr(cake_ops, name)(x, w, *offs)
    reduce(y).backward()
    scale = 1 if reduce is Tensor.sum else 1 / y.numel()
    g = torch.full_like(y, scale)
    for t, expected in zip((x, w), expected_gradients(name, x, w, offs, g), strict=True):
        assert_close(t.grad, expected)


def test_h04_loss_over_a_padded_buffer(device: torch.device) -> None:
    """The buffer has room for padding; its tail rows are zero and stay out of loss and gradients."""
    groups = [260, 0, 251, 300, 1, 511, 512, 213]
    rows = sum(groups)
    assert rows == 2048
    x = torch.randn(rows + 8 * 16, 256, device=device).to(BF16)
    x[rows:] = 0
    w = torch.randn(8, 512, 256, device=device).to(BF16)
    offs = reference.offsets(groups, device)
    x.requires_grad_(), w.requires_grad_()
    y = cake_ops.grouped_mm(x, w, offs)
    assert (y[rows:] == 0).all()
    loss = y.float().square().mean()
    loss.backward()
    assert loss.isfinite()
    assert (x.grad[rows:] == 0).all()
    g = (2 * y.detach().float() / y.numel()).to(BF16)
    for t, expected in zip((x, w), expected_gradients("grouped_mm", x, w, (offs,), g), strict=True):
        assert_close(t.grad, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_h07_a_rank_without_rows_keeps_its_weights_in_the_graph(
    device: torch.device, name: str
) -> None:
    _, w, _ = leaves(name, device)
    shape = list(SHAPES[name][0])
    shape[-2] = 0
    x = torch.empty(shape, dtype=w.dtype, device=device, requires_grad=True)
    offs = (torch.zeros(len(GROUPS), dtype=torch.int32, device=device),)
    y = getattr(cake_ops, name)(x, w, *(offs if name == "grouped_mm" else ()))
    assert y.shape == (*shape[:-1], N) and y.grad_fn is not None
    fired = []
    w.register_hook(lambda g: fired.append(tuple(g.shape)))
    w.register_post_accumulate_grad_hook(lambda t: fired.append("accumulated"))
    y.sum().backward()
    assert w.grad.shape == w.shape and (w.grad == 0).all()
    assert x.grad.shape == x.shape
    assert fired == [tuple(w.shape), "accumulated"]


@pytest.mark.parametrize("zero", ["M", "N", "K", "E"])
@pytest.mark.parametrize("name", FAMILIES)
def test_h09_backward_of_zero_sizes(device: torch.device, name: str, zero: str) -> None:
    """Each dimension in turn is zero; E is the batch of the batched GEMM and dense leading dimension."""
    size = {"E": 2, "M": 6, "N": 5, "K": 4} | {zero: 0}
    e, m, n, k = size.values()
    shapes = {
        "grouped_mm": ((m, k), (e, n, k)),
        "router_mm": ((m, k), (n, k)),
        "dense_mm": ((e, m, k), (n, k)),
        "batched_mm": ((e, m, k), (e, n, k)),
    }
    dtype = torch.float32 if name == "router_mm" else BF16
    x, w = (torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes[name])
    offs = (reference.offsets([m // 2] * e, device),) if name == "grouped_mm" else ()
    y = getattr(cake_ops, name)(x, w, *offs)
    assert_close(y, reference.PRODUCTS[name](x.detach(), w.detach(), *offs))
    g = torch.randn(y.shape, device=device).to(y.dtype)
    gradients = torch.autograd.grad(y, (x, w), g)
    for t, actual, expected in zip(
        (x, w), gradients, expected_gradients(name, x, w, offs, g), strict=True
    ):
        assert actual.dtype == t.dtype and actual.device == t.device
        assert_close(actual, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_h34_only_the_needed_gradients_are_launched(device: torch.device, name: str) -> None:
    x, w, offs = leaves(name, device)
    function = getattr(cake_ops, name)

    def launched(a: Tensor, b: Tensor) -> dict[str, int]:
        with count_launches() as launches:
            y = function(a, b, *offs)
            if y.requires_grad:
                y.sum().backward()
        return dict(launches)

    assert launched(x, w.detach()) == {name: 1, f"{name}_dgrad": 1}
    assert x.grad is not None and w.grad is None
    x.grad = None
    assert launched(x.detach(), w) == {name: 1, f"{name}_wgrad": 1}
    assert x.grad is None and w.grad is not None
    assert launched(x.detach(), w.detach()) == {name: 1}
    with count_launches() as launches:
        torch.autograd.grad(function(x, w, *offs).sum(), w)
    assert launches == {name: 1, f"{name}_wgrad": 1}
    assert function(x.detach(), w.detach(), *offs).grad_fn is None


@pytest.mark.parametrize("stored", ["contiguous", "transposed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_h39_weight_gradient_is_adopted_without_a_copy(
    device: torch.device, name: str, stored: str
) -> None:
    """Also for a parameter that is itself a transposed view of storage [.., K, N]."""
    x, w, offs = leaves(name, device)
    if stored == "transposed":
        w = w.detach().mT.contiguous().mT.requires_grad_()
    made = []
    w.register_hook(lambda g: made.append(g.data_ptr()))
    getattr(cake_ops, name)(x, w, *offs).sum().backward()
    assert w.grad.stride() == w.stride()
    assert made == [w.grad.data_ptr()]


@pytest.mark.parametrize("name", FAMILIES)
def test_h39_weight_used_through_a_transpose(device: torch.device, name: str) -> None:
    x, w, offs = leaves(name, device)
    stored = w.detach().mT.contiguous().requires_grad_()
    made = []
    stored.register_hook(lambda g: made.append(g.data_ptr()))
    y = getattr(cake_ops, name)(x, stored.mT, *offs)
    g = torch.randn_like(y)
    y.backward(g)
    assert stored.grad.stride() == stored.stride() and stored.grad.is_contiguous()
    assert made == [stored.grad.data_ptr()]
    assert_close(stored.grad.mT, expected_gradients(name, x, w, offs, g)[1])


def test_h11_gate_and_up_in_one_product_then_chunk(device: torch.device) -> None:
    """One product with the merged weight [E, 2 H, D] gives the gradients of two products."""
    e, m, d, h = len(GROUPS), sum(GROUPS), 24, 40
    offs = reference.offsets(GROUPS, device)
    x = torch.randn(m, d, device=device).to(BF16)
    w13 = (torch.randn(e, 2 * h, d, device=device) / d**0.5).to(BF16)
    w2 = (torch.randn(e, d, h, device=device) / h**0.5).to(BF16)
    g = torch.randn(m, d, device=device).to(BF16)

    def merged(x: Tensor, w13: Tensor) -> Tensor:
        return cake_ops.functional.grouped_mm(x, w13.transpose(-2, -1), offs=offs)

    def separate(x: Tensor, w13: Tensor) -> Tensor:
        halves = (w.transpose(-2, -1) for w in w13.chunk(2, -2))
        return torch.cat([cake_ops.functional.grouped_mm(x, w, offs=offs) for w in halves], -1)

    results = []
    for product in (merged, separate):
        a, b = x.clone().requires_grad_(), w13.clone().requires_grad_()
        h1, h3 = product(a, b).chunk(2, -1)
        y = cake_ops.functional.grouped_mm(
            torch.nn.functional.silu(h1) * h3, w2.transpose(-2, -1), offs=offs
        )
        y.backward(g)
        results.append((y.detach(), a.grad, b.grad))
    for (y, dx, dw), (y2, dx2, dw2) in pairwise(results):
        assert same_bits(y, y2) and same_bits(dw, dw2)
        assert_close(dx, dx2, 3 * reference.tolerance(BF16))  # rounded once, and twice and summed
