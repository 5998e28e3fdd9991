"""What ``explain`` and ``prepare`` take for an operator and its call, and what a prepared launch leaves out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import OPERATORS, problem
from forms import CANARY, same_bits

import cake_ops
from cake_ops._library import OPS
from cake_ops.profiling import ranges
from cake_ops.testing import count_launches, null_kernels

ADDING = [name for name in OPERATORS if f"{name}_" in OPS]


# Which operator


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_its_name_its_public_function_or_its_torch_op(name: str) -> None:
    op = problem(name)
    tensors = (*op.operands(a_grad=False, b_grad=False), *op.offs)
    packet = getattr(torch.ops.cake, name)
    explanation = cake_ops.explain(name, *tensors)
    expected = op(*tensors[:2])
    for given in (getattr(cake_ops, name), packet, packet.default):
        assert cake_ops.explain(given, *tensors) == explanation
        assert same_bits(cake_ops.prepare(given, *tensors).launch(), expected)


FOREIGN: dict[str, Callable[..., Any]] = {
    "cake_ops.functional.grouped_mm": cake_ops.functional.grouped_mm,
    "functools.partial": functools.partial(cake_ops.grouped_mm, deterministic=True),
    "torch.ops.aten.mm.default": torch.ops.aten.mm.default,
    "cake_ops.nn.GroupedLinear": cake_ops.nn.GroupedLinear,
}
if hasattr(F, "grouped_mm"):
    FOREIGN["torch.nn.functional.grouped_mm"] = F.grouped_mm


@pytest.mark.parametrize("function", [cake_ops.explain, cake_ops.prepare])
@pytest.mark.parametrize("named", FOREIGN)
def test_another_function_is_refused_whatever_its_name(
    named: str, function: Callable[..., Any]
) -> None:
    """The drop-in's weight is [E, K, N]; with N = K nothing but the values would tell."""
    x, w = torch.randn(7, 8), torch.randn(2, 8, 8)
    offs = torch.tensor([3, 7], dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match="op must be an operator's name, its public .*, got "
    ) as e:
        function(FOREIGN[named], x, w, offs)
    assert named in str(e.value).partition(", got ")[2]


@pytest.mark.parametrize("function", [cake_ops.explain, cake_ops.prepare])
@pytest.mark.parametrize("op", ["linear", cake_ops.linear, "grouped", "cake::grouped_mm"])
def test_no_operator_has_this_name(op: Any, function: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"op must be one of .*router_mm, .*, got '\S+'$"):
        function(op, torch.zeros(2, 3), torch.zeros(4, 3))


# Which call


@pytest.mark.parametrize("name", OPERATORS)
def test_explain_takes_the_call_that_writes_and_writes_nothing(name: str) -> None:
    op = problem(name)
    tensors = (*op.operands(a_grad=False, b_grad=False), *op.offs)
    out = torch.full(op.result, CANARY, dtype=op.dtype)
    explanation = cake_ops.explain(name, *tensors)
    packet = getattr(torch.ops.cake, f"{name}_out")
    assert cake_ops.explain(getattr(cake_ops, name), *tensors, out=out) == explanation
    assert cake_ops.explain(packet, *tensors, out=out) == explanation
    assert cake_ops.explain(name, *tensors, out=None) == explanation
    if name in ADDING:
        add = getattr(cake_ops, f"{name}_")
        assert cake_ops.explain(add, out, *tensors, deterministic=False) == explanation
    assert (out == CANARY).all()
    with pytest.raises(RuntimeError, match=f"cake::{name}_out: out must have shape"):
        cake_ops.explain(name, *tensors, out=out[..., :1])
    with pytest.raises(RuntimeError, match=f"cake::{name}_out: out must not share memory"):
        cake_ops.explain(
            name,
            *tensors,
            out=tensors[0]
            .new_empty(0)
            .set_(tensors[0].untyped_storage(), 0, out.shape, out.stride()),
        )


def test_explain_refuses_an_out_of_another_dtype_than_asked_for() -> None:
    g, x = torch.randn(5, 4), torch.randn(5, 3)
    with pytest.raises(RuntimeError, match="out_dtype torch.bfloat16 contradicts out"):
        cake_ops.explain("router_mm_wgrad", g, x, out_dtype=torch.bfloat16, out=torch.empty(4, 3))


@pytest.mark.parametrize("function", [cake_ops.explain, cake_ops.prepare])
@pytest.mark.parametrize(
    "name, count, options",
    [
        ("grouped_mm_dgrad", 3, {"out_dtype": torch.bfloat16}),
        ("grouped_mm_dgrad", 3, {"deterministic": False}),
        ("grouped_mm", 2, {}),
        ("grouped_mm", 4, {}),
        ("router_mm", 3, {}),
    ],
)
def test_arguments_that_the_operator_does_not_have(
    name: str, count: int, options: dict[str, Any], function: Callable[..., Any]
) -> None:
    g, w = torch.zeros(7, 8), torch.zeros(2, 8, 8)
    tensors = (g, w, torch.tensor([3, 7], dtype=torch.int32), g)[:count]
    said = f"options {', '.join(options)}" if options else "no options"
    message = rf"cake::{name}\(.*cannot be called with {count} positional tensors and {said}$"
    with pytest.raises(RuntimeError, match=message):
        function(name, *tensors, **options)


@pytest.mark.parametrize(
    "name, options",
    [
        ("router_mm_wgrad", {"out_type": torch.float32}),
        ("router_mm_wgrad_", {}),  # without out
        ("router_mm_wgrad_out", {}),
        ("router_mm", {"out_dtype": torch.float32}),
    ],
)
def test_explain_refuses_what_the_call_would_refuse(name: str, options: dict[str, Any]) -> None:
    t = torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match=rf"cake::{name}\(.*cannot be called with 2 positional"):
        cake_ops.explain(name, t, t, **options)


def test_a_form_without_out_has_none() -> None:
    with pytest.raises(RuntimeError, match=r"cake::split_bf16x3\(.* 1 positional .* options out$"):
        cake_ops.explain("split_bf16x3", torch.zeros(4), out=torch.zeros(3, 4))


@pytest.mark.parametrize("function", [cake_ops.explain, cake_ops.prepare])
def test_arguments_that_are_no_tensors(function: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="must be on a CPU or CUDA device, got cpu, list"):
        function("grouped_mm", torch.zeros(7, 8), torch.zeros(2, 8, 8), [3, 7])


# Prepared launches


def test_what_a_prepared_launch_leaves_out() -> None:
    """It is not counted, not replaced, in no range, and autograd is not told of the write."""
    x, w = torch.randn(5, 6), torch.randn(4, 6)
    prepared = cake_ops.prepare(cake_ops.dense_mm, x, w)
    version = prepared.out._version
    prepared.out.data.fill_(CANARY)
    with (
        null_kernels(),
        count_launches() as launches,
        torch.profiler.profile() as record,
        ranges(),
    ):
        prepared.launch()
        cake_ops.dense_mm(x, w)
    assert same_bits(prepared.out, cake_ops.dense_mm(x, w))
    assert launches == {"dense_mm": 1}
    named = [event.name for event in record.events() if event.name.startswith("cake::dense_mm(")]
    assert len(named) == 1
    assert prepared.out._version == version
