"""``out=``: what it may not share, and what it may not contradict. Values are tested with each family."""

from __future__ import annotations

import pytest
import torch
from forms import CANARY, PRODUCTS, good_arguments

import cake_ops

BF16, FP32 = torch.bfloat16, torch.float32
INPUTS = [(name, arg) for name in PRODUCTS for arg in good_arguments(name)]


@pytest.mark.parametrize("name, arg", INPUTS, ids=["-".join(pair) for pair in INPUTS])
def test_out_that_overlaps_an_input_is_refused(device: torch.device, name: str, arg: str) -> None:
    """``out`` and an input share a buffer: with one element in common, and then side by side."""
    inputs = {key: t.to(device) for key, t in good_arguments(name).items()}
    result, t = getattr(torch.ops.cake, name)(**inputs), inputs[arg]
    out_bytes, input_bytes = result.nbytes, t.nbytes
    for form in (f"{name}_out", f"{name}_"):
        if not hasattr(torch.ops.cake, form):
            continue
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
                out.fill_(0 if form.endswith("_") else CANARY)
                getattr(torch.ops.cake, form)(**inputs | {arg: view, "out": out})
                assert torch.equal(out, result)


@pytest.mark.parametrize(
    "product",
    ["grouped_mm_wgrad", "router_mm_dgrad", "router_mm_wgrad", "dense_mm", "batched_mm_wgrad"],
)
def test_out_dtype_beside_an_out_of_another_dtype(product: str) -> None:
    arguments = good_arguments(product)
    out = torch.full_like(getattr(cake_ops, product)(**arguments, out_dtype=BF16), CANARY)
    with pytest.raises(RuntimeError) as error:
        getattr(cake_ops, product)(**arguments, out_dtype=FP32, out=out)
    assert str(error.value) == (
        f"cake::{product}_out: out_dtype torch.float32 contradicts out, which is torch.bfloat16"
    )
    assert (out == CANARY).all()
    assert getattr(cake_ops, product)(**arguments, out_dtype=BF16, out=out) is out
    assert (out == 0).all()
