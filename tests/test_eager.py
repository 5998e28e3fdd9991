"""The eager fast path: which calls it recognises, that it gives what the dispatcher gives, and what it keeps."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from families import OPERATORS
from known_calls import operands
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops import _eager
from cake_ops._library import OPS


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_second_call_is_recognised_and_gives_the_same(watch, device, name, grad):
    call, dispatched = watch(name)
    tensors = operands(name, grad=grad, device=device)
    results = [call(*tensors) for _ in range(3)]
    assert len(dispatched) == 1
    direct = OPS[name].overload(*tensors)
    for y in results:
        assert torch.equal(y, direct) and y._version == 0
        assert y.requires_grad == grad and type(y.grad_fn) is type(direct.grad_fn)
    if grad:
        g = torch.randn_like(direct)
        wanted = torch.autograd.grad(direct, tensors[:2], g)
        got = torch.autograd.grad(results[-1], tensors[:2], g)
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(
    "needs", [(True, False), (False, True), (True, True)], ids=["a", "b", "both"]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_h38_a_recognised_call_saves_what_its_gradients_need(watch, device, name, needs):
    call, dispatched = watch(name)
    tensors = operands(name, device=device)
    for t, needed in zip(tensors, needs, strict=False):
        t.requires_grad_(needed)
    *_, y = [call(*tensors) for _ in range(3)]
    assert len(dispatched) == 1
    saved = y.grad_fn.saved_tensors
    assert [t is not None for t in saved[:2]] == [*needs][::-1]
    for t, kept in zip(tensors, saved, strict=True):
        assert kept is None or kept.data_ptr() == t.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["grouped_mm_wgrad", "router_mm_dgrad", "router_mm_wgrad"])
def test_a_dtype_of_the_result_has_calls_of_its_own(watch, device, name, dtype):
    call, dispatched = watch(name, out_dtype=dtype)
    tensors = operands(name, dtype=torch.bfloat16, device=device)
    results = [call(*tensors) for _ in range(3)]
    assert len(dispatched) == 1
    for y in results:
        assert y.dtype == dtype
        assert torch.equal(y, OPS[name].overload(*tensors, out_dtype=dtype))


@pytest.mark.parametrize("name", ["grouped_mm", "grouped_mm_wgrad", "router_mm", "router_mm_wgrad"])
def test_other_rows_are_recognised(watch, device, name):
    """Those of as many bits, on a GPU those of the same bucket."""
    call, dispatched = watch(name)
    for rows in (5, 1, 93, 100, 97, 104, 96, 5, 1):
        tensors = operands(name, rows, device=device)
        assert torch.equal(call(*tensors), OPS[name].overload(*tensors))
    assert len(dispatched) == (3 if device.type == "cpu" else 4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["grouped_mm", "router_mm"])
def test_a_known_call_on_another_stream_and_device_memory(watch, name):
    """The launch takes the addresses and the stream of the moment."""
    call, dispatched = watch(name)
    call(*operands(name, device="cuda"))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensors = operands(name, device="cuda")
        torch.cuda._sleep(10_000_000)
        tensors[0].fill_(2.0)
        y = call(*tensors)
        wanted = OPS[name].overload(*tensors)
    torch.cuda.synchronize()
    assert torch.equal(y, wanted) and len(dispatched) == 1


def test_a_parameter_a_graph_and_no_grad_have_calls_of_their_own(watch):
    call, dispatched = watch("router_mm")
    x, w = operands("router_mm")
    for b in (w, torch.nn.Parameter(w), torch.nn.Parameter(w, requires_grad=False)):
        for _ in range(2):
            assert call(x, b).requires_grad == b.requires_grad
        with torch.no_grad():
            assert not call(x, b).requires_grad
    assert len(dispatched) == 3


def changed(tensors: tuple[Tensor, ...], how: str) -> tuple[Tensor, ...]:
    x, w, offs = tensors
    if how == "dtype":
        return x.double(), w.double(), offs
    if how == "size":
        return x, w[:1].contiguous(), offs[-1:].contiguous()
    if how == "strides":
        return x, w.transpose(1, 2).contiguous().transpose(1, 2), offs
    if how == "strides of offs":
        return x, w, torch.stack([offs, offs], 1)[:, 0]
    assert how == "alignment"
    storage = torch.empty(x.numel() + 1)
    return storage[1:].view_as(x).copy_(x), w, offs


@pytest.mark.parametrize("how", ["dtype", "size", "strides", "strides of offs", "alignment"])
def test_another_geometry_is_not_taken_for_a_known_one(watch, how):
    call, dispatched = watch("grouped_mm")
    tensors = operands("grouped_mm")
    call(*tensors)
    others = changed(tensors, how)
    assert torch.equal(call(*others), OPS["grouped_mm"].overload(*others))
    assert len(dispatched) == 2
    call(*others)
    assert len(dispatched) == (3 if how == "alignment" else 2)


@pytest.mark.parametrize("early_stop, launches", [(True, 1), (False, 2)])
def test_a_known_call_stops_a_recomputation_before_its_launch(early_stop, launches):
    x, w, offs = operands("grouped_mm", grad=True)
    for _ in range(2):  # in its forward and its backward the third step has known calls only
        cake_ops.grouped_mm(x, w, offs).sum().backward()
        with cake_ops.testing.count_launches() as count:
            for _ in range(3):
                count.clear()
                y = checkpoint(
                    cake_ops.grouped_mm, x, w, offs, use_reentrant=False, early_stop=early_stop
                )
                y.sum().backward()
    assert count == {"grouped_mm": launches, "grouped_mm_dgrad": 1, "grouped_mm_wgrad": 1}


def test_known_calls_raise_what_others_raise(watch):
    call, _ = watch("grouped_mm_wgrad")
    g, x, offs = operands("grouped_mm_wgrad")
    call(g, x, offs)
    for bad in ((g, x[:-1], offs), (g, x, offs + 1), (g, x, offs.flip(0))):
        messages = []
        for function in (call, OPS["grouped_mm_wgrad"].overload):
            with pytest.raises(RuntimeError) as error:
                function(*bad)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_exchanged_launches_are_exchanged_for_known_calls():
    x, w = operands("router_mm")
    y = cake_ops.router_mm(x, w)
    with cake_ops.testing.count_launches() as outer:
        for _ in range(3):
            cake_ops.router_mm(x, w)
        with cake_ops.testing.null_kernels():
            cake_ops.router_mm(x, w)
        cake_ops.router_mm(x, w)
    assert outer["router_mm"] == 4
    assert torch.equal(cake_ops.router_mm(x, w), y) and outer["router_mm"] == 4


def test_clear_caches_forgets(watch):
    call, dispatched = watch("router_mm")
    tensors = operands("router_mm")
    for _ in range(2):
        call(*tensors)
    cake_ops.clear_caches()
    call(*tensors)
    assert len(dispatched) == 2


def test_a_call_during_which_all_is_forgotten_is_not_remembered(watch, monkeypatch):
    call, dispatched = watch("router_mm")
    tensors = operands("router_mm")
    keys = _eager._keys

    def interrupted(*args):
        _eager.forget_calls()
        return keys(*args)

    monkeypatch.setattr(_eager, "_keys", interrupted)
    for _ in range(2):
        call(*tensors)
    assert len(dispatched) == 2


def test_what_is_known_is_bounded_and_holds_no_tensor(watch, monkeypatch):
    monkeypatch.setattr(_eager, "MAX_KNOWN", 4)
    monkeypatch.setattr(_eager, "MAX_SIZES", 3)
    call, dispatched = watch("router_mm")
    table = _eager._tables[-1][0]
    for n in range(1, 9):
        call(torch.randn(3, 8), torch.randn(n, 8))
    assert [len(known) for known in table.values()] == [4]
    for n in (8, 7, 6, 5):
        call(torch.randn(3, 8), torch.randn(n, 8))
    assert len(dispatched) == 8
    for k in (8, 12, 16, 20):
        call(torch.randn(3, k), torch.randn(2, k))
    assert [key >> 6 for key in table] == [20]
    for k in (24, 28, 28, 24):  # a full table is not cleared for sizes that it has
        call(torch.randn(3, k), torch.randn(k // 4, k))
        call(torch.randn(3, k), torch.randn(k // 2, k))
    assert [key >> 6 for key in table] == [20, 24, 28]
    x, w = torch.randn(3, 20), torch.randn(2, 20)
    call(x, w)
    held = [weakref.ref(t) for t in (x, w)]
    del x, w
    gc.collect()
    assert [t() for t in held] == [None, None]


def test_one_tensor_twice_takes_the_dispatcher_and_nothing_is_remembered(watch):
    call, dispatched = watch("router_mm")
    x = torch.randn(4, 4)
    for _ in range(3):
        assert torch.equal(call(x, x), OPS["router_mm"].overload(x, x))
    assert len(dispatched) == 3 and not _eager._tables[-1][0]


def test_what_the_garbage_collector_runs_may_clear_the_caches(watch, monkeypatch):
    """It may run in the midst of remembering a call."""
    call, dispatched = watch("router_mm")
    tensors = operands("router_mm")
    guards, cleared = _eager.TensorGuards, []

    class Clears:
        def __init__(self):
            self.me = self

        def __del__(self):
            cake_ops.clear_caches()
            cleared.append(1)

    class WithGarbage:
        def __init__(self, *args, **kwargs):
            self.made = guards(*args, **kwargs)

        @property
        def check(self):
            Clears()
            gc.collect()
            return self.made.check

    monkeypatch.setattr(_eager, "TensorGuards", WithGarbage)
    thread = threading.Thread(target=lambda: [call(*tensors) for _ in range(3)], daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and cleared and len(dispatched) == 3


def test_a_bad_dtype_of_the_result_is_refused_as_ever():
    x, w = operands("dense_mm")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            cake_ops.dense_mm(x, w, out_dtype=[1])


def test_without_guards_every_call_takes_the_dispatcher(watch, monkeypatch):
    monkeypatch.setattr(_eager, "TensorGuards", None)
    call, dispatched = watch("router_mm")
    tensors = operands("router_mm")
    for _ in range(2):
        assert torch.equal(call(*tensors), OPS["router_mm"].overload(*tensors))
    assert len(dispatched) == 2
