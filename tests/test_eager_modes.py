"""The eager fast path leaves to the dispatcher what modes, tracers, transforms, profilers and autograd are to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from forms import Pass
from known_calls import operands
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cake_ops
from cake_ops import _eager
from cake_ops._library import OPS


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def _profiled() -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


@pytest.mark.parametrize(
    "context",
    [
        Pass,
        _FunctionMode,
        lambda: torch.device("cpu"),  # a function mode too
        lambda: FakeTensorMode(allow_non_fake_inputs=True),
        _profiled,
        forward_ad.dual_level,
    ],
    ids=["dispatch mode", "function mode", "device", "fake mode", "profiler", "dual level"],
)
def test_what_watches_a_call_sees_the_dispatcher(watch, context):
    call, dispatched = watch("router_mm")
    tensors = operands("router_mm")
    call(*tensors)
    with context():
        call(*tensors)
        call(*tensors)
    assert len(dispatched) == 3
    call(*tensors)
    assert len(dispatched) == 3


@pytest.mark.parametrize(
    "trace",
    [
        lambda f, t: make_fx(f)(t),
        lambda f, t: make_fx(f, pre_dispatch=True)(t),
        lambda f, t: torch.jit.trace(f, t, check_trace=False),
        lambda f, t: torch.func.functionalize(f)(t),
        lambda f, t: torch.func.vmap(f)(t[None]),
        lambda f, t: torch.func.grad(lambda u: f(u).sum())(t),
        lambda f, t: torch.func.jacrev(f)(t),
    ],
    ids=["fx", "fx-pre", "jit", "functionalize", "vmap", "grad", "jacrev"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_transforms_and_tracers_see_the_dispatcher(watch, trace):
    """Also if they meet a call on tensors of their surroundings, which are plain."""
    call, dispatched = watch("router_mm")
    x, w = operands("router_mm")
    call(x, w)
    seen = []

    def f(t):
        before = len(dispatched)
        y = call(t, w)
        seen.append(len(dispatched) - before)
        return y + call(x, w)

    trace(f, x)
    assert seen == [1]
    assert len(dispatched) == 3


@pytest.mark.parametrize("all_threads", [False, True], ids=["own thread", "all threads"])
def test_a_profile_has_the_event_of_a_known_call(all_threads):
    x, w = operands("router_mm")
    for _ in range(2):
        cake_ops.router_mm(x, w)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    options = {"experimental_config": config} if all_threads else {}
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, **options) as profile:
        cake_ops.router_mm(x, w)
    assert "cake::router_mm" in {event.key for event in profile.key_averages()}


def test_a_tangent_is_refused_by_a_known_call():
    x, w = operands("router_mm")
    for _ in range(2):
        cake_ops.router_mm(x, w)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        cake_ops.router_mm(forward_ad.make_dual(x, x), w)


def test_subclasses_negative_views_and_functional_tensors_take_the_dispatcher(watch):
    call, dispatched = watch("router_mm")
    x, w = operands("router_mm")
    call(x, w)

    class Sub(Tensor):
        pass

    negative = torch.complex(x, -x).conj().imag  # x, with the negative bit
    assert negative.is_neg() and torch.equal(negative, x)
    for other in (x.as_subclass(Sub), negative, torch._efficientzerotensor(x.shape)):
        wanted = OPS["router_mm"].overload(other, w)
        assert torch.equal(call(other, w), wanted) and torch.equal(call(other, w), wanted)
    assert len(dispatched) == 7
    call(torch._to_functional_tensor(x), torch._to_functional_tensor(w))
    assert len(dispatched) == 8


def test_a_meta_tensor_and_what_is_no_tensor(watch):
    call, dispatched = watch("router_mm")
    x, w = operands("router_mm")
    call(x, w)
    assert call(x.to("meta"), w.to("meta")).is_meta and len(dispatched) == 2
    for bad in ((None, w), (x, 1.0), (x, torch.tensor(1.0))):
        with pytest.raises(RuntimeError):
            call(*bad)
    assert len(dispatched) == 5


@pytest.mark.parametrize("dtype, through", [(torch.bfloat16, 1), (torch.float32, 3)])
def test_autocast(watch, dtype, through):
    """Operands that autocast leaves alone are recognised inside it, those it casts are cast each time."""
    call, dispatched = watch("dense_mm")
    x, w = operands("dense_mm", dtype=dtype)
    wanted = cake_ops.dense_mm(x.bfloat16(), w.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            y = call(x, w)
            assert y.dtype == torch.bfloat16 and torch.equal(y, wanted)
    assert len(dispatched) == through
    call(x, w)
    assert len(dispatched) == through + 1  # outside it, it is another call


def test_inference_mode_and_its_tensors(watch):
    call, dispatched = watch("router_mm")
    x, w = operands("router_mm")
    with torch.inference_mode():
        inside = [call(x, w) for _ in range(3)]
        own = x * 1
    assert len(dispatched) == 1 and all(y.is_inference() for y in inside)
    outside = [call(own, w) for _ in range(3)]
    assert len(dispatched) == 2 and not any(y.is_inference() for y in outside)


def test_what_only_the_dispatcher_serves_is_remembered_so(watch, monkeypatch):
    call, dispatched = watch("dense_mm")
    asked = []
    keys = _eager._keys
    monkeypatch.setattr(_eager, "_keys", lambda *args: asked.append(1) or keys(*args))
    x, w = operands("dense_mm")
    meta = x.to("meta"), w.to("meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            assert call(x, w).dtype == torch.bfloat16  # it casts
            assert call(*meta).is_meta
    assert len(dispatched) == 6 and len(asked) == 2


class _Below(TorchDispatchMode):
    """Calls the operator where the dispatcher is below autograd already."""

    def __init__(self, call):
        self.call, self.results = call, []
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.results.append(self.call())
        return func(*args, **(kwargs or {}))


def below_autograd(place: str, call: Callable[[], Tensor]) -> Tensor:
    if place == "inference mode":
        with torch.inference_mode(), torch.enable_grad():
            return call()
    if place == "guard":
        with torch._C._AutoDispatchBelowAutograd():
            return call()
    mode = _Below(call)
    with mode:
        torch.zeros(1) + 1
    return mode.results[-1]


@pytest.mark.parametrize("place", ["inference mode", "guard", "handler of a mode"])
def test_below_autograd_no_graph_is_recorded(watch, place):
    call, _ = watch("router_mm")
    x, w = operands("router_mm", grad=True)
    results = [below_autograd(place, lambda: call(x, w)) for _ in range(3)]
    results.append(below_autograd(place, lambda: OPS["router_mm"].overload(x, w)))
    assert [y.requires_grad for y in results] == [False] * 4
    assert call(x, w).requires_grad


def test_inference_tensors_outside_inference_mode(watch):
    call, _ = watch("router_mm")
    with torch.inference_mode():
        x, w = operands("router_mm")
        w.requires_grad_()
    for _ in range(3):
        assert not call(x, w).requires_grad
    assert not OPS["router_mm"].overload(x, w).requires_grad
