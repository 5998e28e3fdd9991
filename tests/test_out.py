"""``out=``: what it may not share, and what it may not contradict. Values are tested with each family."""

from __future__ import annotations

import pytest
import reference
import torch
from families import OPERATORS
from forms import CANARY, NAN, assert_close, good_arguments, same_bits
from torch import Tensor

import cake_ops

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
