"""The eager fast path: what it recognises, what it leaves to the dispatcher, and that both say the same."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cake_ops
from cake_ops import _eager
from cake_ops._library import OPS
from cake_ops.cuda.geometry import bucket_range, rows_bucket

Watch = Callable[..., tuple[Callable[..., Tensor], list[int]]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The fast path of an operator, new, and a list that grows when a call takes the dispatcher."""

    def watched(name: str, **options: Any) -> tuple[Callable[..., Tensor], list[int]]:
        op, dispatched = OPS[name], []

        def overload(*tensors, **options):
            dispatched.append(1)
            return op.overload(*tensors, **options)

        class Watched:
            def __getattr__(self, attribute):
                return overload if attribute == "overload" else getattr(op, attribute)

        monkeypatch.setitem(OPS, name, Watched())
        call = _eager.eager.__wrapped__(name, **options)
        monkeypatch.setitem(OPS, name, op)
        return call, dispatched

    return watched


def operands(
    name: str, rows: int = 5, *, dtype=torch.float32, grad=False, device: object = "cpu"
) -> tuple[Tensor, ...]:
    e, n, k = 2, 8, 16
    family, _, form = name.partition("_mm")
    if torch.device(device).type == "cuda" and family != "router":
        dtype = torch.bfloat16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_(grad)

    x, g = normal(rows, k), normal(rows, n)
    weight = normal(n, k) if family in ("router", "dense") else normal(e, n, k)
    if family == "batched":
        x, g = normal(e, rows, k), normal(e, rows, n)
    a, b = {"": (x, weight), "_dgrad": (g, weight), "_wgrad": (g, x)}[form]
    if family == "grouped":
        return a, b, torch.tensor([rows // 2, rows], dtype=torch.int32, device=device)
    return a, b


NAMES = [
    f"{family}_mm{form}"
    for family in ("grouped", "router", "dense", "batched")
    for form in ("", "_dgrad", "_wgrad")
]


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("name", NAMES)
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


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


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
        _DispatchMode,
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


def test_a_profile_has_the_event_of_a_known_call():
    x, w = operands("router_mm")
    for _ in range(2):
        cake_ops.router_mm(x, w)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
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


def test_a_profile_of_all_threads_has_the_event_of_a_known_call():
    x, w = operands("router_mm")
    for _ in range(2):
        cake_ops.router_mm(x, w)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=config) as profile:
        cake_ops.router_mm(x, w)
    assert "cake::router_mm" in {event.key for event in profile.key_averages()}


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
            gc.set_threshold(1)
            Clears()
            return self.made.check

    monkeypatch.setattr(_eager, "TensorGuards", WithGarbage)
    threshold = gc.get_threshold()
    thread = threading.Thread(target=lambda: [call(*tensors) for _ in range(3)], daemon=True)
    try:
        thread.start()
        thread.join(20)
    finally:
        gc.set_threshold(*threshold)
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


def test_a_bucket_is_a_range():
    for m in range(3000):
        first, last = bucket_range(m)
        assert first <= m <= last and {rows_bucket(i) for i in range(max(first, 0), last + 1)} == {
            rows_bucket(m)
        }
        assert m == 0 or rows_bucket(first - 1) != rows_bucket(m) != rows_bucket(last + 1)
