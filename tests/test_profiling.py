"""What a profile of a step shows: events of the operators with shapes, and ranges where they are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from families import FAMILIES, problem
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops._library import OPS
from cake_ops.profiling import ranges
from cake_ops.testing import count_launches

BF16 = torch.bfloat16
RANGES_OF_A_STEP = [
    "cake::grouped_mm(bfloat16[10, 64], bfloat16[3, 32, 64], int32[3])",
    "cake::grouped_mm_dgrad(bfloat16[10, 32], bfloat16[3, 32, 64], int32[3])",
    "cake::grouped_mm_wgrad(bfloat16[10, 32], bfloat16[10, 64], int32[3])",
]


def events(record: profile) -> dict[str, FunctionEvent]:
    """The events of the operators, each of which must have happened once."""
    found = [event for event in record.events() if event.name.startswith("cake::")]
    assert max(Counter(event.name for event in found).values(), default=0) <= 1
    return {event.name: event for event in found}


def operands() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(10, 64, dtype=BF16, requires_grad=True)
    w = torch.randn(3, 32, 64, dtype=BF16, requires_grad=True)
    return x, w, torch.tensor([4, 4, 9], dtype=torch.int32)


def step() -> None:
    x, w, offs = operands()
    y = cake_ops.grouped_mm(x, w, offs)
    y.backward(torch.randn_like(y))


# torch.profiler


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_product_is_an_event_with_its_shapes(name: str, grad: bool) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=grad, b_grad=grad)
    with profile(record_shapes=True) as record:
        y = op(a, b)
        if grad:
            y.sum().backward()
    offs = [list(t.shape) for t in op.offs]
    a_shape, b_shape, y_shape = list(op.a), list(op.b), list(op.result)
    expected = {f"cake::{name}": [a_shape, b_shape, *offs]}
    if grad:
        expected[f"cake::{name}_dgrad"] = [y_shape, b_shape, *offs]
        expected[f"cake::{name}_wgrad"] = [y_shape, a_shape, *offs]
    shapes = {event: found.input_shapes[: 2 + len(offs)] for event, found in events(record).items()}
    assert shapes == expected


def test_writing_forms_are_events() -> None:
    x, w, offs = (t.detach() for t in operands())
    y, dw = x.new_empty(10, 32), torch.zeros(3, 32, 64)
    with profile(record_shapes=True) as record:
        cake_ops.grouped_mm(x, w, offs, out=y)
        cake_ops.grouped_mm_wgrad_(dw, y, x, offs)
    found = events(record)
    assert list(found) == ["cake::grouped_mm_out", "cake::grouped_mm_wgrad_"]
    assert found["cake::grouped_mm_out"].input_shapes[:3] == [[10, 64], [3, 32, 64], [3]]
    assert found["cake::grouped_mm_wgrad_"].input_shapes[:2] == [[3, 32, 64], [10, 32]]


def test_a_checkpointed_and_a_compiled_step_show_their_products() -> None:
    x, w, offs = operands()
    with profile() as record:
        checkpoint(cake_ops.grouped_mm, x, w, offs, use_reentrant=False).sum().backward()
    products = {f"cake::{name}" for name in ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")}
    names = Counter(event.name for event in record.events())
    assert products <= set(names)
    compiled = torch.compile(cake_ops.grouped_mm, backend="aot_eager", fullgraph=True)
    compiled(x, w, offs).sum().backward()
    with profile(record_shapes=True) as record:
        compiled(x, w, offs).sum().backward()
    found = events(record)
    assert set(found) == products
    assert found["cake::grouped_mm"].input_shapes[:3] == [[10, 64], [3, 32, 64], [3]]


@pytest.mark.gpu
def test_a_kernel_belongs_to_the_event_of_its_operator() -> None:
    x, w, offs = (t.detach().cuda() for t in operands())
    kernel = cake_ops.explain("grouped_mm", x, w, offs).kernel
    if not kernel:
        pytest.skip("no kernel for this GPU")
    cake_ops.grouped_mm(x, w, offs)
    torch.cuda.synchronize()
    with profile() as record:
        cake_ops.grouped_mm(x, w, offs)
        torch.cuda.synchronize()
    (event,) = (event for event in record.events() if event.name == "cake::grouped_mm")
    assert any(kernel in launched.name for launched in event.kernels)


# Ranges


def test_ranges_are_off_by_default() -> None:
    with profile() as record:
        step()
    assert not any("(" in name for name in events(record))


def test_ranges_lie_within_the_events_and_end_with_the_context() -> None:
    launches = {name: dict(op.launch) for name, op in OPS.items()}
    with ranges(), count_launches() as counted, profile() as record:
        step()
    assert {name: dict(op.launch) for name, op in OPS.items()} == launches
    assert sum(counted.values()) == 3
    found = events(record)
    assert sorted(name for name in found if "(" in name) == RANGES_OF_A_STEP
    for name in RANGES_OF_A_STEP:
        inner, outer = found[name].time_range, found[name.partition("(")[0]].time_range
        assert outer.start <= inner.start <= inner.end <= outer.end


def test_a_range_names_strides_and_the_tensor_that_is_written() -> None:
    x, w, offs = (t.detach() for t in operands())
    w = w.mT.contiguous().mT
    with ranges(), profile() as record:
        cake_ops.grouped_mm(x, w, offs, out=x.new_empty(10, 32))
    expected = (
        "cake::grouped_mm_out(bfloat16[10, 64], bfloat16[3, 32, 64] strides [2048, 1, 32], int32[3],"
        " bfloat16[10, 32])"
    )
    assert expected in events(record)


def test_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    @contextmanager
    def nvtx_range(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    with ranges(nvtx=True):
        step()
    step()
    assert sorted(opened) == RANGES_OF_A_STEP


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch has NVTX")
def test_nvtx_is_refused_without_nvtx() -> None:
    launches = {name: dict(op.launch) for name, op in OPS.items()}
    with pytest.raises(RuntimeError, match="CAKE_NVTX=1.* need a CUDA build"), ranges(nvtx=True):
        raise AssertionError("not reached")
    assert {name: dict(op.launch) for name, op in OPS.items()} == launches


def test_cake_nvtx_opens_ranges_for_the_process() -> None:
    program = """
import contextlib, torch
torch.cuda.nvtx.mark = lambda name: None
torch.cuda.nvtx.range = lambda name: print("range", name) or contextlib.nullcontext()
import gc, cake_ops
gc.collect()
cake_ops.dense_mm(torch.ones(2, 3), torch.ones(4, 3))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CAKE_NVTX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "range cake::dense_mm(float32[2, 3], float32[4, 3])\n"
