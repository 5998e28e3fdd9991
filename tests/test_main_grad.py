"""Weight gradients that are added to ``weight.main_grad``: values, what is launched, and what is refused."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import reference
import torch
from forms import assert_close, same_bits
from main_grad import (
    BF16,
    FP32,
    KINDS,
    ROWS,
    TAIL,
    K,
    N,
    make,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops.nn import RouterLinear
from cake_ops.testing import count_launches

# Values


@pytest.mark.parametrize("main_dtype", [FP32, BF16], ids=["main-fp32", "main-bf16"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("router", FP32), ("router", BF16), ("grouped", BF16)],
    ids=["router-fp32", "router-bf16", "grouped-bf16"],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_micro_batches_have_the_bits_of_the_adding_operator(
    device: torch.device, kind: str, dtype: torch.dtype, main_dtype: torch.dtype, bias: bool
) -> None:
    case = make(kind, device, bias=bias, dtype=dtype, main_dtype=main_dtype)
    main_grad = case.weight.main_grad
    start = main_grad.clone()
    expected, expected64 = main_grad.clone(), main_grad.double()
    product = getattr(reference, f"{kind}_mm_wgrad", reference.mm_wgrad)
    for rows in (ROWS, ROWS + 20):
        x, g = case.batch(rows)
        twin = x.detach().requires_grad_()
        with count_launches() as launches:
            y = case.fused(x, *case.offs)
            y.backward(g)
        y_plain = case.plain(twin, *case.offs)
        y_plain.backward(g)
        assert launches[f"{case.name}_wgrad_"] == launches[f"{case.name}_dgrad"] == 1
        assert launches[f"{case.name}_wgrad"] == (1 if kind == "grouped" and bias else 0)
        assert same_bits(y, y_plain) and same_bits(x.grad, twin.grad)
        case.add(expected, g, x)
        expected64 += product(g, x.detach(), *case.offs)
    assert case.weight.main_grad is main_grad and case.weight.grad is None
    assert same_bits(main_grad, expected)
    assert_close(main_grad, expected64, 2 * reference.tolerance(main_dtype))
    if bias:
        assert same_bits(case.fused.bias.grad, case.plain.bias.grad)
    if kind == "grouped":
        assert same_bits(main_grad[1], start[1])  # the expert without rows


@pytest.mark.parametrize("main_dtype", [FP32, BF16], ids=["main-fp32", "main-bf16"])
def test_experts_have_the_bits_of_an_fp32_gradient_that_is_added(main_dtype: torch.dtype) -> None:
    case = make("grouped", main_dtype=main_dtype)
    start, (x, g) = case.weight.main_grad.clone(), case.batch()
    case.fused(x, *case.offs).backward(g)
    dw = cake_ops.grouped_mm_wgrad(g, x.detach(), *case.offs, out_dtype=FP32)
    assert same_bits(case.weight.main_grad, (start + dw).to(main_dtype))


def test_a_gate_rounds_the_sum_once_and_from_zero_has_the_bits_of_a_gradient() -> None:
    case = make("router")
    start, (x, g) = case.weight.main_grad.clone(), case.batch()
    case.fused(x).backward(g)
    total = reference.mm_wgrad(g, x.detach()) + start.double()
    assert same_bits(case.weight.main_grad, total.float())
    case.weight.main_grad.zero_()
    case.fused(x).backward(g)
    case.plain(x).backward(g)
    assert same_bits(case.weight.main_grad, case.plain.weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_several_uses_in_one_graph(device: torch.device, kind: str) -> None:
    """One module three times, and another module that shares the weight."""
    case = make(kind, device)
    other = copy.copy(case.fused)
    expected = case.weight.main_grad.double()
    total = torch.zeros((), device=device)
    for module in (case.fused, case.fused, other, case.fused):
        x, g = case.batch()
        rows = slice(None, ROWS - TAIL)
        total = total + (module(x, *case.offs)[rows].float() * g[rows]).sum()
        product = reference.grouped_mm_wgrad if case.offs else reference.mm_wgrad
        x, g = (
            x.detach(),
            g if case.offs else g * (torch.arange(ROWS, device=device) < ROWS - TAIL)[:, None],
        )
        expected += product(g, x, *case.offs)
    with count_launches() as launches:
        total.backward()
    assert launches[f"{case.name}_wgrad_"] == 4
    assert_close(case.weight.main_grad, expected, 1e-5)
    assert case.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_add_nothing(device: torch.device, kind: str) -> None:
    case = make(kind, device, bias=False)
    start = case.weight.main_grad.clone()
    x = torch.zeros(0, K, device=device, dtype=case.weight.dtype, requires_grad=True)
    case.fused(x, *(torch.zeros_like(offs) for offs in case.offs)).sum().backward()
    assert same_bits(case.weight.main_grad, start)
    assert case.weight.grad is None and x.grad.shape == (0, K)


def test_a_gate_of_any_leading_dimensions(device: torch.device) -> None:
    case = make("router", device)
    x, g = torch.randn(2, 5, K, device=device), torch.randn(2, 5, N, device=device)
    expected = case.weight.main_grad.clone()
    case.fused(x).backward(g)
    case.add(expected, g.flatten(0, 1), x.flatten(0, 1))
    assert same_bits(case.weight.main_grad, expected)


def test_experts_under_autocast_add_the_gradient_of_the_cast(device: torch.device) -> None:
    case = make("grouped", device, dtype=FP32, bias=False)
    start, (x, g) = case.weight.main_grad.clone(), case.batch()
    with torch.autocast(device.type, dtype=BF16):
        y, y_plain = case.fused(x, *case.offs), case.plain(x, *case.offs)
    with count_launches() as launches:
        y.backward(g)
    y_plain.backward(g)
    assert launches[f"{case.name}_wgrad"] == 1
    assert same_bits(case.weight.main_grad, start + case.plain.weight.grad)
    assert case.weight.grad is None


# What is launched and asked for


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_added_where_no_gradient_is_wanted(kind: str) -> None:
    case = make(kind, bias=False)
    start, (x, g) = case.weight.main_grad.clone(), case.batch()
    with count_launches() as launches:
        torch.autograd.grad(case.fused(x, *case.offs), x, g)
        case.fused(x, *case.offs).backward(g, inputs=[x])
        del case.weight.main_grad
        with torch.no_grad():
            assert not case.fused(x, *case.offs).requires_grad
        case.weight.requires_grad_(False)
        case.fused(x, *case.offs).backward(g)
        assert not case.fused(x.detach(), *case.offs).requires_grad
    assert launches == Counter({case.name: 5, f"{case.name}_dgrad": 3})
    assert case.weight.grad is None and not hasattr(case.weight, "main_grad")
    case.weight.requires_grad_().main_grad = start.clone()
    with count_launches() as launches:
        case.fused(x.detach(), *case.offs).backward(g)
    assert launches == Counter({case.name: 1, f"{case.name}_wgrad_": 1})
    assert not torch.equal(case.weight.main_grad, start)


@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        ({"use_reentrant": False}, 0),
        ({"use_reentrant": False, "early_stop": False}, 1),
        ({"use_reentrant": True}, 1),
    ],
    ids=["early-stop", "no-early-stop", "reentrant"],
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_spare_the_recomputed_launch(
    device: torch.device, kind: str, depth: int, options: dict[str, bool], recomputed: int
) -> None:
    case = make(kind, device, bias=False)
    expected, (x, g) = case.weight.main_grad.clone(), case.batch()

    def region(x: Tensor) -> Tensor:
        return case.fused(x.sigmoid(), *case.offs)

    f: Callable[[Tensor], Tensor] = region
    for _ in range(depth):
        f = partial(checkpoint, f, **options)
    with count_launches() as launches:
        f(x).backward(g)
    adds = {f"{case.name}_dgrad": 1, f"{case.name}_wgrad_": 1}
    assert launches == Counter({case.name: 1 + recomputed * depth, **adds})
    case.add(expected, g, x.sigmoid())
    assert same_bits(case.weight.main_grad, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensor_hooks_and_version_checks(kind: str) -> None:
    case = make(kind, bias=False)
    expected, (x, g) = case.weight.main_grad.clone(), case.batch()
    with save_on_cpu():
        y = case.fused(x, *case.offs)
    case.weight.main_grad.mul_(1)  # the buffer may change at any time
    y.backward(g)
    case.add(expected, g, x)
    assert same_bits(case.weight.main_grad, expected)
    y = case.fused(x, *case.offs)
    with torch.no_grad():
        case.weight.mul_(2)  # the weight may not
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


@pytest.mark.parametrize("kind", KINDS)
def test_retained_graph_adds_twice(kind: str) -> None:
    case = make(kind, bias=False)
    expected, (x, g) = case.weight.main_grad.clone(), case.batch()
    y = case.fused(x, *case.offs)
    y.backward(g, retain_graph=True)
    y.backward(g)
    for _ in range(2):
        case.add(expected, g, x)
    assert same_bits(case.weight.main_grad, expected)


# Double backward


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_was_added_has_no_graph(kind: str) -> None:
    case = make(kind, bias=False)
    start, (x, g) = case.weight.main_grad.clone(), case.batch()
    message = (
        "added to main_grad cannot be differentiated again; call backward without create_graph"
    )
    for inputs in (None, [case.weight]):
        with pytest.raises(RuntimeError, match=message):
            case.fused(x, *case.offs).backward(g, create_graph=True, inputs=inputs)
    assert same_bits(case.weight.main_grad, start)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_penalty_of_the_input(kind: str) -> None:
    case = make(kind, bias=False)
    start, (x, _) = case.weight.main_grad.clone(), case.batch()
    if case.offs:
        x = x.detach().nan_to_num().requires_grad_()
    for module in (case.fused, case.plain):
        y = module(x, *case.offs).float().square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        dx.float().square().sum().backward()
    tolerance = 2 * reference.tolerance(case.weight.dtype)
    assert_close(case.weight.main_grad - start, case.plain.weight.grad.double(), tolerance)
    assert case.weight.grad is None


def test_autograd_grad_of_the_weight_is_none() -> None:
    case = make("router")
    expected, (x, g) = case.weight.main_grad.clone(), case.batch()
    assert torch.autograd.grad(case.fused(x), case.weight, g, allow_unused=True) == (None,)
    case.add(expected, g, x)
    assert same_bits(case.weight.main_grad, expected)


# Errors


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_names_what_is_wrong_with_the_buffer(kind: str) -> None:
    case = make(kind)
    name, shape = type(case.fused).__name__, list(case.weight.shape)
    x, _ = case.batch()

    def refusal() -> str:
        with count_launches() as launches, pytest.raises(RuntimeError) as error:
            case.fused(x, *case.offs)
        assert not launches
        return str(error.value)

    case.weight.overwrite_main_grad = True
    assert refusal() == (
        f"cake_ops.nn.{name}: fuse_wgrad_accumulation adds to weight.main_grad, but"
        " weight.overwrite_main_grad asks to overwrite it"
    )
    case.weight.main_grad = torch.zeros(3)
    assert refusal() == (
        f"cake_ops.nn.{name}: fuse_wgrad_accumulation needs weight.main_grad of the weight's shape and"
        f" device, {shape} on cpu, got [3] on cpu"
    )
    del case.weight.main_grad
    assert refusal() == (
        f"cake_ops.nn.{name}: fuse_wgrad_accumulation needs weight.main_grad, which weight {shape} does"
        " not have; allocate it before the forward: weight.main_grad = torch.zeros_like(weight,"
        " dtype=torch.float32)"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_refuses_a_buffer_that_it_cannot_write(kind: str) -> None:
    case = make(kind, main_dtype=torch.float64)
    x, g = case.batch()
    with pytest.raises(RuntimeError, match=f"cake::{case.name}_wgrad_: out must be .*float64"):
        case.fused(x, *case.offs).backward(g)
    case.weight.main_grad = torch.zeros_like(case.weight, dtype=FP32).mT.contiguous().mT
    with pytest.raises(RuntimeError, match=f"cake::{case.name}_wgrad_: out must be row-major"):
        case.fused(x, *case.offs).backward(g)


# Modules


def test_from_linear_can_fuse() -> None:
    linear = nn.Linear(K, N)
    linear.weight.main_grad = torch.zeros_like(linear.weight)
    x = torch.randn(7, K)
    RouterLinear.from_linear(linear)(x).sum().backward()
    gate = RouterLinear.from_linear(linear, fuse_wgrad_accumulation=True)
    assert not linear.weight.main_grad.any()
    gate(x).sum().backward()
    assert same_bits(linear.weight.main_grad, linear.weight.grad)


def test_export_without_grad() -> None:
    case = make("router")
    x, _ = case.batch()
    with torch.no_grad():
        program = torch.export.export(case.fused, (x.detach(),))
    assert same_bits(program.module()(x.detach()), case.plain(x))
