"""The drop-in for ``torch.nn.functional.grouped_mm``: torch's own function is the yardstick.

A test called after a case (h12, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from forms import LAYOUTS, assert_close, assert_refused_alike, seen_operators
from torch import Tensor

import cake_ops

BF16 = torch.bfloat16
GROUPS = [16, 0, 40, 8]  # torch asks for strides of 16 bytes, cake_ops for nothing
E, N, K, M = len(GROUPS), 48, 24, sum(GROUPS)
TORCH_LAYOUTS = ("contiguous", "transposed")
FORMS = {  # shapes of mat_a and mat_b
    "2d-3d": ((M, K), (E, K, N)),
    "2d-2d": ((N, M), (M, K)),
    "3d-2d": ((E, N, K), (K, M)),
    "3d-3d": ((E, M, K), (E, K, N)),
}


def expected_product(form: str, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if form == "2d-3d":
        return reference.grouped_mm(a, b.mT, offs)
    if form == "2d-2d":
        return reference.grouped_mm_wgrad(a.t(), b, offs)
    if form == "3d-2d":
        return reference.grouped_mm(b.t(), a, offs).t()
    return a.double() @ b.double()


def make(form: str, layout_a: str, layout_b: str, device: torch.device) -> tuple[Tensor, Tensor]:
    shape_a, shape_b = FORMS[form]
    a = LAYOUTS[layout_a](torch.randn(shape_a, device=device).to(BF16))
    b = LAYOUTS[layout_b](torch.randn(shape_b, device=device).to(BF16))
    return a, b


def run(
    function: Callable[..., Tensor], a: Tensor, b: Tensor, g: Tensor, **options
) -> tuple[Tensor, ...]:
    """The product and both gradients."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    y = function(a, b, **options)
    y.backward(g)
    return y.detach(), a.grad, b.grad


def test_signature_is_that_of_torch() -> None:
    ours = inspect.signature(cake_ops.functional.grouped_mm, eval_str=True)
    theirs = inspect.signature(torch.nn.functional.grouped_mm)
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("layout_b", TORCH_LAYOUTS)
@pytest.mark.parametrize("layout_a", TORCH_LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_product_and_gradients_are_those_of_torch(
    device: torch.device, form: str, layout_a: str, layout_b: str
) -> None:
    a, b = make(form, layout_a, layout_b, device)
    offs = reference.offsets(GROUPS, device)
    options = {} if form == "3d-3d" else {"offs": offs}
    a64, b64 = (t.detach().double().requires_grad_() for t in (a, b))
    y64 = expected_product(form, a64, b64, offs)
    g = torch.randn(y64.shape, device=device).to(BF16)
    y64.backward(g.double())
    ours = run(cake_ops.functional.grouped_mm, a, b, g, **options)
    theirs = run(torch.nn.functional.grouped_mm, a, b, g, **options)
    for mine, torchs, expected in zip(ours, theirs, (y64, a64.grad, b64.grad), strict=True):
        assert mine.dtype == torchs.dtype
        assert_close(mine, expected)
        assert_close(mine, torchs, 2 * reference.tolerance(BF16))
    if form in ("2d-3d", "3d-2d"):  # the gradient of the weights has the layout of the weights
        weights = 2 if form == "2d-3d" else 1
        assert ours[weights].stride() == theirs[weights].stride() == (a, b)[weights - 1].stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", [0, 1], ids=["mat_a", "mat_b"])
@pytest.mark.parametrize("form", FORMS)
def test_values_in_every_layout(device: torch.device, form: str, operand: int, layout: str) -> None:
    layouts = ["contiguous", "contiguous"]
    layouts[operand] = layout
    a, b = make(form, *layouts, device)
    offs = reference.offsets(GROUPS, device)
    y = cake_ops.functional.grouped_mm(a, b, offs=None if form == "3d-3d" else offs)
    assert_close(y, expected_product(form, a, b, offs))


@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_operands_are_read_in_place(device: torch.device, form: str, layout: str) -> None:
    """Nothing but views and one product."""
    a, b = make(form, layout, layout, device)
    offs = None if form == "3d-3d" else reference.offsets(GROUPS, device)
    with seen_operators() as seen:
        cake_ops.functional.grouped_mm(a, b, offs=offs)
    products = [name for name in seen if name not in ("aten::t", "aten::transpose.int")]
    assert len(products) == 1 and products[0].startswith("cake::")


@pytest.mark.parametrize("form", ["2d-3d", "2d-2d", "3d-2d"])
def test_what_lies_behind_the_last_group_is_zero(device: torch.device, form: str) -> None:
    a, b = make(form, "contiguous", "contiguous", device)
    offs = reference.offsets([16, 0, 20, 8], device)
    y = cake_ops.functional.grouped_mm(a, b, offs=offs)
    assert_close(y, expected_product(form, a, b, offs))
    if form == "2d-3d":
        assert (y[44:] == 0).all()
    if form == "3d-2d":
        assert (y[:, 44:] == 0).all()


@pytest.mark.parametrize("form", ["2d-2d", "3d-3d"])
def test_fp32_result(device: torch.device, form: str) -> None:
    a, b = make(form, "contiguous", "contiguous", device)
    offs = reference.offsets(GROUPS, device)
    y = cake_ops.functional.grouped_mm(
        a, b, offs=None if form == "3d-3d" else offs, out_dtype=torch.float32
    )
    assert y.dtype == torch.float32
    assert_close(y, expected_product(form, a, b, offs))


def test_h12_transposed_weight_with_an_odd_inner_size(device: torch.device) -> None:
    a = torch.randn(8, 1025, device=device).to(BF16)
    w = torch.randn(4, 512, 1025, device=device).to(BF16)
    offs = torch.tensor([2, 4, 6, 8], dtype=torch.int32, device=device)
    y = cake_ops.functional.grouped_mm(a, w.transpose(-2, -1), offs=offs)
    assert_close(y, reference.grouped_mm(a, w, offs))
    meta = cake_ops.functional.grouped_mm(
        a.to("meta"), w.to("meta").transpose(-2, -1), offs=offs.to("meta")
    )
    assert (meta.shape, meta.stride()) == (y.shape, y.stride())


def test_h21_weight_in_the_wrong_order(device: torch.device) -> None:
    """[E, N, K] for mat_b is an error that shows the way; for N = K it means what is documented."""
    x = torch.randn(10, 24, device=device).to(BF16)
    w = torch.randn(3, 40, 24, device=device).to(BF16)
    offs = reference.offsets([3, 0, 7], device)
    assert_refused_alike(
        "cake_ops.functional.grouped_mm: mat_b must have K = mat_a.shape[-1] = 24 in dimension -2"
        " (mat_a [M, K], mat_b [E, K, N]), got [3, 40, 24]; a weight stored as [E, N, K] is passed"
        " as w.transpose(-2, -1)",
        lambda x, w, offs: cake_ops.functional.grouped_mm(x, w, offs=offs),
        (x, w, offs),
    )
    square = w[:, :24]
    y = cake_ops.functional.grouped_mm(x, square, offs=offs)
    assert_close(y, reference.grouped_mm(x, square.mT, offs))


def test_h22_ragged_columns_of_the_second_operand(device: torch.device) -> None:
    """[G, M, K] x [K, N_total]: supported; a contraction that does not match is refused."""
    a = torch.randn(4, 48, 24, device=device).to(BF16)
    b = torch.randn(24, 64, device=device).to(BF16)
    offs = reference.offsets(GROUPS, device)
    y = cake_ops.functional.grouped_mm(a, b, offs=offs)
    for e, (start, end) in enumerate(reference.ranges(offs)):
        assert_close(y[:, start:end], a[e].double() @ b[:, start:end].double())
    assert_refused_alike(
        "cake_ops.functional.grouped_mm: mat_b must have K = mat_a.shape[-1] = 24 in dimension -2"
        " (mat_a [E, N, K], mat_b [K, M]), got [32, 64]",
        lambda a, b, offs: cake_ops.functional.grouped_mm(a, b, offs=offs),
        (a, torch.randn(32, 64, device=device).to(BF16), offs),
    )


NEEDED = "offs is needed unless both operands have 3 dimensions, got offs ="
OUT_DTYPE = (
    "out_dtype must be that of the operands (torch.bfloat16) where the ragged dimension is not"
)
BAD = {  # shapes of mat_a and mat_b, options, message
    "bias": (
        ((M, K), (E, K, N)),
        {"bias": torch.zeros(N)},
        "bias is not supported; add it to the result",
    ),
    "dimensions": (
        ((K,), (E, K, N)),
        {},
        "mat_a and mat_b must have 2 or 3 dimensions, got [24] and [4, 24, 48]",
    ),
    "no-offs": (
        ((M, K), (E, K, N)),
        {"offs": None},
        f"{NEEDED} None with mat_a [64, 24] and mat_b [4, 24, 48]",
    ),
    "offs-of-a-batch": (
        ((E, M, K), (E, K, N)),
        {},
        f"{NEEDED} [4] with mat_a [4, 64, 24] and mat_b [4, 24, 48]",
    ),
    "out-dtype": (
        ((M, K), (E, K, N)),
        {"out_dtype": torch.float32},
        f"{OUT_DTYPE} contracted, got torch.float32",
    ),
}


@pytest.mark.parametrize("shapes, options, message", BAD.values(), ids=BAD)
def test_bad_calls(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], message: str
) -> None:
    mat_a, mat_b = (torch.zeros(shape, dtype=BF16) for shape in shapes)
    tensors = (mat_a, mat_b, reference.offsets(GROUPS))
    assert_refused_alike(
        f"cake_ops.functional.grouped_mm: {message}",
        lambda a, b, offs: cake_ops.functional.grouped_mm(a, b, **{"offs": offs, **options}),
        tensors,
    )
