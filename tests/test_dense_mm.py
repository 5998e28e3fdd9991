"""Values of the dense and batched projection GEMMs against FP64, and of ``linear``.

A test called after a case (h09, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import pytest
import reference
import torch
from families import SUFFIXES
from forms import LAYOUTS, NAN, Place, assert_all_forms, assert_close, same_bits, select
from torch import Tensor

import cake_ops

BF16 = torch.bfloat16
DENSE = tuple(f"dense_mm{suffix}" for suffix in SUFFIXES)
BATCHED = tuple(f"batched_mm{suffix}" for suffix in SUFFIXES)
DENSE_SIZES = {  # leading dimensions, N, K
    "vector": ((), 63, 100),
    "matrix": ((257,), 100, 63),
    "sequences": ((2, 7, 5), 63, 40),
    "one-row": ((1,), 100, 257),
    "n-1": ((63,), 1, 100),
    "k-1": ((63,), 100, 1),
    "aligned": ((4, 64), 128, 64),
    "no-sequences": ((0, 7), 8, 16),
    "no-rows": ((3, 0), 8, 16),
    "n-0": ((7,), 0, 16),
    "k-0": ((7,), 16, 0),
}
BATCHED_SIZES = {  # L, M, N, K
    "odd": (7, 63, 100, 257),
    "one-batch": (1, 100, 63, 7),
    "m-1": (5, 1, 63, 100),
    "n-1": (5, 63, 1, 100),
    "k-1": (5, 63, 100, 1),
    "aligned": (4, 64, 128, 64),
    "l-0": (0, 7, 8, 16),
    "m-0": (3, 0, 8, 16),
    "n-0": (3, 7, 0, 16),
    "k-0": (3, 7, 8, 0),
}


def randn(*shape: int, place: Place) -> Tensor:
    return torch.randn(shape, device=place.device).to(place.dtype)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("sizes", DENSE_SIZES.values(), ids=DENSE_SIZES)
def test_h09_dense_values_at_every_size(
    place: Place, sizes: tuple[tuple[int, ...], int, int], name: str
) -> None:
    leading, n, k = sizes
    x, w, g = (randn(*s, place=place) for s in ((*leading, k), (n, k), (*leading, n)))
    assert_all_forms(name, *select(name, x, w, g))


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("sizes", BATCHED_SIZES.values(), ids=BATCHED_SIZES)
def test_h09_batched_values_at_every_size(
    place: Place, sizes: tuple[int, int, int, int], name: str
) -> None:
    batch, m, n, k = sizes
    x, w, g = (randn(batch, *s, place=place) for s in ((m, k), (n, k), (m, n)))
    assert_all_forms(name, *select(name, x, w, g))


@pytest.mark.parametrize("name", (*DENSE, *BATCHED))
@pytest.mark.parametrize("operand", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_in_every_layout(device: torch.device, name: str, operand: int, layout: str) -> None:
    place = Place(device, BF16)
    batch = (3,) if name in BATCHED else ()
    tensors = [
        randn(3, 63, 40, place=place),
        randn(*batch, 72, 40, place=place),
        randn(3, 63, 72, place=place),
    ]
    tensors = list(select(name, *tensors))
    tensors[operand] = LAYOUTS[layout](tensors[operand])
    assert_all_forms(name, *tensors)


@pytest.mark.parametrize("name", BATCHED)
def test_batched_head_views_are_read_in_place(device: torch.device, name: str) -> None:
    """Buffers of heads [T, L, .] as views [L, T, .]."""
    place = Place(device, BF16)
    x, g = randn(63, 5, 40, place=place), randn(63, 5, 24, place=place)
    w = randn(5, 24, 40, place=place)
    tensors = select(name, x.permute(1, 0, 2), w, g.permute(1, 0, 2))
    assert any(not t.is_contiguous() for t in tensors)
    assert_all_forms(name, *tensors)


@pytest.mark.parametrize("name", (*DENSE, *BATCHED))
def test_nan_stays_in_its_row(device: torch.device, name: str) -> None:
    place = Place(device, BF16)
    batch = (3,) if name in BATCHED else ()
    x, w, g = (randn(*s, place=place) for s in ((3, 63, 40), (*batch, 72, 40), (3, 63, 72)))
    a, b = select(name, x, w, g)
    clean = getattr(cake_ops, name)(a, b)
    a[1, 5, 7] = NAN
    dirty = getattr(cake_ops, name)(a, b)
    row = {"dense_mm_wgrad": (7,), "batched_mm_wgrad": (1, 7)}.get(name, (1, 5))
    assert dirty[row].isnan().all()
    dirty[row] = clean[row]
    assert same_bits(dirty, clean)


@pytest.mark.parametrize("name", (*DENSE, *BATCHED))
@pytest.mark.parametrize("deterministic", [True, False])
def test_results_are_bitwise_repeatable(
    device: torch.device, name: str, deterministic: bool
) -> None:
    """In the deterministic mode; the other one need only be right."""
    place = Place(device, BF16)
    batch = (3,) if name in BATCHED else ()
    x, w, g = (randn(*s, place=place) for s in ((3, 257, 200), (*batch, 136, 200), (3, 257, 136)))
    tensors = select(name, x, w, g)
    first = getattr(cake_ops, name)(*tensors, deterministic=deterministic)
    assert_close(first, reference.PRODUCTS[name](*tensors))
    if not deterministic:
        return
    for _ in range(5):
        torch.randn(100, 1000, device=device).mul_(2)
        assert same_bits(getattr(cake_ops, name)(*tensors, deterministic=True), first)


@pytest.mark.parametrize("terms", [4096, 16384])
def test_h33_sums_are_fp32(device: torch.device, terms: int) -> None:
    """A BF16 sum of ones stalls at 256."""
    ones = torch.ones(32, terms, dtype=BF16, device=device)
    batch = ones.expand(2, 32, terms)
    for out_dtype in (BF16, torch.float32):
        for result in (
            cake_ops.dense_mm(ones, ones, out_dtype=out_dtype),
            cake_ops.dense_mm_dgrad(ones, ones.t(), out_dtype=out_dtype),
            cake_ops.dense_mm_wgrad(ones.t(), ones.t(), out_dtype=out_dtype),
            cake_ops.batched_mm(batch, batch, out_dtype=out_dtype),
            cake_ops.batched_mm_dgrad(batch, batch.mT, out_dtype=out_dtype),
            cake_ops.batched_mm_wgrad(batch.mT, batch.mT, out_dtype=out_dtype),
        ):
            assert result.dtype == out_dtype and (result == terms).all()


@pytest.mark.parametrize("name", (*DENSE, *BATCHED))
def test_h13_unaligned_sizes_work(place: Place, name: str) -> None:
    batch = (3,) if name in BATCHED else ()
    shapes = ((3, 6, 13), (*batch, 7, 13), (3, 6, 7))
    assert_all_forms(name, *select(name, *(randn(*s, place=place) for s in shapes)))


@pytest.mark.parametrize("name", ["dense_mm", "batched_mm"])
def test_gradients_of_an_fp32_result(device: torch.device, name: str) -> None:
    """An FP32 gradient of a BF16 product is rounded to BF16 first."""
    place = Place(device, BF16)
    batch = (3,) if name == "batched_mm" else ()
    x, w = randn(3, 63, 40, place=place), randn(*batch, 72, 40, place=place)
    x.requires_grad_(), w.requires_grad_()
    y = getattr(cake_ops, name)(x, w, out_dtype=torch.float32)
    assert_close(y, reference.mm(x, w))
    g = torch.randn(y.shape, device=device)
    y.backward(g)
    assert_close(x.grad, reference.mm_dgrad(g.to(BF16), w))
    assert_close(w.grad, reference.PRODUCTS[f"{name}_wgrad"](g.to(BF16), x))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(40,), (7, 40), (2, 3, 40), (0, 40)])
def test_linear_is_that_of_torch(place: Place, shape: tuple[int, ...], bias: bool) -> None:
    x, w = randn(*shape, place=place), randn(63, 40, place=place)
    b = randn(63, place=place) if bias else None
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    y = cake_ops.linear(x, w, b)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.nn.functional.linear(*wide)
    bound = 2 * reference.tolerance(place.dtype)  # the product is rounded, then the sum
    assert y.dtype == place.dtype
    assert_close(y, expected, bound)
    g = randn(*y.shape, place=place)
    y.backward(g)
    expected.backward(g.double())
    for t, t64 in zip(leaves, wide, strict=True):
        assert_close(t.grad, t64.grad, bound)


def test_linear_under_autocast_is_bf16(device: torch.device) -> None:
    x = torch.randn(7, 40, device=device, requires_grad=True)
    w = torch.randn(63, 40, device=device, requires_grad=True)
    b = torch.randn(63, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=BF16):
        y = cake_ops.linear(x, w, b)
        assert y.dtype == torch.nn.functional.linear(x, w, b).dtype == BF16
    x16, w16, b16 = (t.detach().to(BF16).double() for t in (x, w, b))
    assert_close(y, torch.nn.functional.linear(x16, w16, b16), 2 * reference.tolerance(BF16))
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32
    ones = torch.ones(7, 63, device=device)
    assert_close(x.grad, reference.mm_dgrad(ones, w16), reference.tolerance(BF16))
    assert_close(w.grad, reference.mm_wgrad(ones, x16), reference.tolerance(BF16))
    assert (b.grad == 7).all()
