"""``out=``: what it may not share, and what it may not contradict. Values are tested with each family."""

from __future__ import annotations

import pytest
import reference
import torch
from families import OPERATORS
from forms import CANARY, NAN, assert_close, good_arguments, same_bits
from torch import Tensor

import cake_ops
from cake_ops._library import OPS
from cake_ops._problem import Problem

BF16, FP32 = torch.bfloat16, torch.float32
INPUTS = [(name, arg) for name in OPERATORS for arg in good_arguments(name)]
ACCUMULATED = ("grouped_mm_wgrad", "router_mm_wgrad")


def random_arguments(name: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    tensors = {key: t.to(device) for key, t in good_arguments(name).items()}
    return {key: t if key == "offs" else torch.randn_like(t) for key, t in tensors.items()}


@pytest.mark.parametrize("name, arg", INPUTS, ids=["-".join(pair) for pair in INPUTS])
def test_out_that_overlaps_an_input_is_refused(device: torch.device, name: str, arg: str) -> None:
    """``out`` and an input share a buffer: with one element in common, and then side by side."""
    inputs = random_arguments(name, device)
    result, t = getattr(torch.ops.cake, name)(**inputs), inputs[arg]
    out_bytes, input_bytes = result.nbytes, t.nbytes
    for form in (f"{name}_out", f"{name}_") if name in ACCUMULATED else (f"{name}_out",):
        for overlap in (4, 0):
            storage = torch.zeros(out_bytes + input_bytes, dtype=torch.uint8, device=device)
            out = storage[:out_bytes].view(result.dtype).view(result.shape)
            view = storage[out_bytes - overlap :][:input_bytes].view(t.dtype).view(t.shape)
            view.copy_(t)
            before = storage.clone()
            if overlap:
                with pytest.raises(RuntimeError) as error:
                    getattr(torch.ops.cake, form)(**inputs | {arg: view, "out": out})
                assert str(error.value) == (
                    f"cake::{form}: out must not share memory with the input {arg}; their address"
                    " ranges overlap"
                )
                assert torch.equal(storage, before)
            else:
                expected = reference.PRODUCTS[name](*inputs.values())
                if form.endswith("_"):
                    expected += out.normal_()
                else:
                    out.fill_(NAN)
                getattr(torch.ops.cake, form)(**inputs | {arg: view, "out": out})
                assert_close(out, expected)
                assert same_bits(view, t)


FORMS = [name for name, op in OPS.items() if op.mutates]


def call_of(form: str, rows: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs with so many rows, an ``out``, and what it is to become, of a call of ``form``."""
    inputs = random_arguments(form)
    if not form.startswith("batched"):
        inputs = {
            arg: torch.randn(rows, *t.shape[1:], dtype=t.dtype) if arg in ("x", "g") else t
            for arg, t in inputs.items()
        }
    plain = form.removesuffix("_out").removesuffix("_")
    out = getattr(torch.ops.cake, plain)(**inputs).normal_()
    expected = reference.PRODUCTS[plain](*inputs.values())
    return inputs, out, expected + out if form.endswith("_") else expected


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    checked: list[str] = []
    check_out = Problem.check_out

    def counting(self, op, out, *tensors):
        checked.append(op)
        check_out(self, op, out, *tensors)

    monkeypatch.setattr(Problem, "check_out", counting)
    return checked


@pytest.mark.parametrize("form", FORMS)
def test_a_call_like_an_earlier_one_is_not_checked_again(form, monkeypatch) -> None:
    """Whatever its rows, except where they are none; its results are those of any call."""
    call = getattr(torch.ops.cake, form)
    inputs, out, _ = call_of(form, 9)
    call(**inputs, out=out)
    checked = count_checks(monkeypatch)
    for rows in (9, 12, 30, 9):
        inputs, out, expected = call_of(form, rows)
        call(**inputs, out=out)
        assert_close(out, expected)
    assert checked == []


@pytest.mark.parametrize("form", FORMS)
def test_a_known_call_is_refused_as_any(form: str) -> None:
    """One size of ``out`` or of an operand is wrong, or memory is shared with an input, at its first byte or last."""
    call = getattr(torch.ops.cake, form)
    for _ in range(2):
        inputs, out, _ = call_of(form, 9)
        call(**inputs, out=out)
    wrong = [(dict(inputs), out.new_zeros(out.shape[0] + 1, *out.shape[1:]))]
    wrong += [(inputs | {arg: t[:-1]}, out) for arg, t in inputs.items()]
    for tensors, result in wrong:
        with pytest.raises(RuntimeError):
            call(**tensors, out=result)
    for arg, t in inputs.items():
        for begin in (out.nbytes - 16, -(t.nbytes - 16)):
            memory = torch.zeros(t.nbytes + out.nbytes, dtype=torch.uint8)
            first = max(-begin, 0)
            over = memory[first:][: out.nbytes].view(out.dtype).view(out.shape)
            view = memory[max(begin, 0) :][: t.nbytes].view(t.dtype).view(t.shape)
            with pytest.raises(RuntimeError, match=f"share memory with the input {arg};"):
                call(**inputs | {arg: view}, out=over)


@pytest.mark.parametrize(
    "name",
    ["grouped_mm_wgrad", "router_mm_dgrad", "router_mm_wgrad", "dense_mm", "batched_mm_wgrad"],
)
def test_out_dtype_beside_an_out_of_another_dtype(name: str) -> None:
    arguments = random_arguments(name)
    out = torch.full_like(getattr(cake_ops, name)(**arguments, out_dtype=BF16), CANARY)
    with pytest.raises(RuntimeError) as error:
        getattr(cake_ops, name)(**arguments, out_dtype=FP32, out=out)
    assert str(error.value) == (
        f"cake::{name}_out: out_dtype torch.float32 contradicts out, which is torch.bfloat16"
    )
    assert (out == CANARY).all()
    assert getattr(cake_ops, name)(**arguments, out_dtype=BF16, out=out) is out
    assert_close(out, reference.PRODUCTS[name](*arguments.values()))


def test_prepare_refuses_an_out_of_another_dtype_than_asked_for() -> None:
    x, w = torch.randn(3, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    with pytest.raises(RuntimeError, match="out_dtype torch.float32 contradicts out"):
        cake_ops.prepare("dense_mm", x, w, out_dtype=FP32, out=x.new_empty(3, 5))
