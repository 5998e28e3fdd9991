"""The operators under what wraps a call: torch.func, modes, threads, tensor subclasses, tracers."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import FAMILIES, OPERATORS, problem
from forms import good_arguments, result_dtypes
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import cake_ops
from cake_ops.testing import count_launches, null_kernels

DIMENSIONS = {  # x, w, g
    "grouped_mm": ("MK", "ENK", "MN"),
    "router_mm": ("MK", "NK", "MN"),
    "dense_mm": ("LMK", "NK", "LMN"),
    "batched_mm": ("LMK", "LNK", "LMN"),
}


def family_of(name: str) -> str:
    return name.partition("_mm")[0] + "_mm"


def squared(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: op(a, b).pow(2).sum()


# torch.func


@pytest.mark.parametrize("name", OPERATORS)
def test_h36_grad_and_vjp(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    expected = torch.autograd.grad(squared(op)(a, b), (a, b))
    with count_launches() as launches:
        actual = torch.func.grad(squared(op), argnums=(0, 1))(a.detach(), b.detach())
    assert sum(launches.values()) == 3
    assert all(map(torch.equal, actual, expected))
    y, vjp = torch.func.vjp(op, a.detach(), b.detach())
    assert all(map(torch.equal, vjp(2 * y), expected))


@pytest.mark.parametrize("name", OPERATORS)
def test_h36_nested_grad(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    f = squared(op)

    def of_gradient(a: Tensor, b: Tensor) -> Tensor:
        return torch.func.grad(f)(a, b).pow(2).sum()

    (da,) = torch.autograd.grad(f(a, b), a, create_graph=True)
    expected = torch.autograd.grad(da.pow(2).sum(), (a, b))
    nested = torch.func.grad(of_gradient, argnums=(0, 1))(a.detach(), b.detach())
    outer = torch.autograd.grad(of_gradient(a, b), (a, b))  # autograd around torch.func
    assert all(map(torch.equal, nested, expected))
    assert all(map(torch.equal, outer, expected))
    assert torch.autograd.grad(op(a, b).sum(), a)[0].shape == a.shape  # the next plain call


@pytest.mark.parametrize("name", OPERATORS)
def test_h36_vmap(name: str) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=False, b_grad=False)
    many_a, many_b = torch.stack([a, 2 * a, -a], 1), torch.stack([b, b, b + 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's slow fallback warns
        both = torch.vmap(op, in_dims=(1, 0))(many_a, many_b)
        one = torch.vmap(op, in_dims=(1, None))(many_a, b)
        grads = torch.vmap(torch.func.grad(squared(op)), in_dims=(1, None))(many_a, b)
        through = torch.func.grad(lambda m: torch.vmap(op, (1, None))(m, b).pow(2).sum())(many_a)
    each = many_a.unbind(1)
    assert torch.equal(both, torch.stack([op(s, t) for s, t in zip(each, many_b, strict=True)]))
    assert torch.equal(one, torch.stack([op(s, b) for s in each]))
    expected = torch.stack([torch.func.grad(squared(op))(s, b) for s in each])
    assert torch.equal(grads, expected)
    torch.testing.assert_close(through, expected.movedim(0, 1))


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_over_an_empty_batch(name: str) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=False, b_grad=False)
    empty = a.new_empty(0, *a.shape)
    for dims, tensors in (((0, None), (empty, b)), ((1, 0), (empty.movedim(0, 1), b[None][:0]))):
        y = torch.vmap(op, in_dims=dims)(*tensors)
        assert y.shape == (0, *op.result) and y.dtype == op(a, b).dtype


@pytest.mark.parametrize("name", FAMILIES)
def test_h36_batched_gradients(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    y = op(a, b)
    g = torch.randn(4, *y.shape, dtype=op.dtype)
    actual = torch.autograd.grad(y, (a, b), g, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        expected = torch.autograd.grad(y, (a, b), g[i], retain_graph=True)
        assert all(torch.equal(d[i], e) for d, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("module", ["grouped", "router"])
def test_h36_functional_call(module: str) -> None:
    x = torch.randn(10, 6)
    if module == "grouped":
        layer, rest = cake_ops.nn.GroupedLinear(3, 6, 5), problem("grouped_mm").offs
    else:
        layer, rest = cake_ops.nn.RouterLinear(6, 5), ()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    grads = torch.func.grad(
        lambda p: torch.func.functional_call(layer, p, (x, *rest)).pow(2).sum()
    )(parameters)
    layer(x, *rest).pow(2).sum().backward()
    assert grads.keys() == parameters.keys()
    for name, p in layer.named_parameters():
        assert torch.equal(grads[name], p.grad)


def test_h36_tensor_that_left_a_transform() -> None:
    op = problem("grouped_mm")
    a, b = op.operands(a_grad=False)
    leaked = []
    torch.func.grad(lambda a: leaked.append(a) or op(a, b).sum())(a)
    y = op(leaked[0], b)
    assert torch.equal(y, op(a, b))
    y.sum().backward()
    assert b.grad is not None


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_mode_is_refused_and_never_dropped(name: str) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=False, b_grad=False)
    match = f"cake::{name}: forward-mode differentiation is not implemented"
    for grad_enabled in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad_enabled):
            dual_a, dual_b = (forward_ad.make_dual(t, torch.ones_like(t)) for t in (a, b))
            with pytest.raises(NotImplementedError, match=match):
                op(dual_a, b)
            with pytest.raises(NotImplementedError, match=match):
                op(a, dual_b)
            assert torch.equal(op(a, b), op(a, b))  # no tangent: an ordinary call
    with pytest.raises(NotImplementedError, match=match):
        torch.func.jvp(op, (a, b), (a, b))
    with pytest.raises(NotImplementedError, match=match):
        torch.func.jacfwd(op)(a, b)
    with pytest.raises(NotImplementedError, match="forward-mode"):  # forward over reverse
        torch.func.jvp(lambda a: torch.func.grad(squared(op))(a, b), (a,), (a,))
    with pytest.raises(NotImplementedError, match="forward-mode"):  # reverse over forward
        torch.func.grad(lambda a: torch.func.jvp(op, (a, b), (a, b))[1].sum())(a)


# Anomaly mode, inference mode, threads


@pytest.mark.parametrize("name", FAMILIES)
def test_anomaly_mode_names_the_operator(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    node = "".join(part.title() for part in name.split("_")) + "Backward"
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        op(a, b).sum().backward()
        y = op(a, torch.full_like(b, float("inf"), requires_grad=True))
        with (
            pytest.raises(RuntimeError, match=f"'{node}' returned nan"),
            pytest.warns(UserWarning, match=f"Error detected in {node}"),
        ):
            y.mul(0).nan_to_num().sum().backward()


@pytest.mark.parametrize("name", OPERATORS)
def test_inference_mode(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    with torch.inference_mode():
        y = op(a, b)
        made_in_inference_mode = a * 1
    assert y.is_inference()
    assert torch.equal(y, op(a, b))
    assert not op(made_in_inference_mode, b.detach()).requires_grad
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        op(made_in_inference_mode, b)


def test_inference_tensor_under_hooks_is_refused_as_by_autograd() -> None:
    with torch.inference_mode():
        x = torch.ones(3, 4)
    w = torch.randn(5, 4, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        for product in (lambda: torch.mm(x, w.t()), lambda: cake_ops.dense_mm(x, w)):
            with pytest.raises(
                RuntimeError, match="Inference tensors cannot be saved for backward"
            ):
                product()


@pytest.mark.parametrize("name", FAMILIES)
def test_threads_agree(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    expected = torch.autograd.grad(op(a, b).sum(), (a, b))

    def work(hooks: bool) -> None:
        for _ in range(25):
            if hooks:
                with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                    y = op(a, b)
            else:
                y = op(a, b)
            assert all(map(torch.equal, torch.autograd.grad(y.sum(), (a, b)), expected))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [True, False] * 2))  # raises what a thread has raised


def test_backward_in_another_thread_than_forward() -> None:
    op = problem("grouped_mm")
    a, b = op.operands()
    y = op(a, b)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert torch.equal(a.grad, torch.autograd.grad(op(a, b).sum(), a)[0])


def test_launches_of_several_threads_are_all_counted() -> None:
    op = problem("dense_mm")
    a, b = op.operands(a_grad=False, b_grad=False)
    with null_kernels(), count_launches() as launches, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [op(a, b) for _ in range(500)], range(4)))
    assert launches["dense_mm"] == 2000


# Subclasses, modes, fake tensors


class Tagged(Tensor):
    """A ``__torch_function__`` subclass with torch's default behaviour."""


class Record(TorchDispatchMode):
    """Notes the operators of the namespace that a dispatch mode sees, and whether grad mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cake":
            self.seen[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPERATORS)
def test_subclasses(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    expected = torch.autograd.grad(squared(op)(a, b), (a, b))

    y = op(a.detach().as_subclass(Tagged), b)
    assert type(y) is Tagged and torch.equal(y.as_subclass(Tensor), op(a, b))

    p, q = torch.nn.Parameter(a.detach()), torch.nn.Parameter(b.detach())
    squared(op)(p, q).backward()
    assert torch.equal(p.grad, expected[0]) and torch.equal(q.grad, expected[1])

    inner = a.detach(), 2 * a.detach()
    two = TwoTensor(*inner).requires_grad_()  # a __torch_dispatch__ subclass
    y = op(two, b)
    assert type(y) is TwoTensor and torch.equal(y.b, op(inner[1], b))
    y.pow(2).sum().backward()
    assert type(two.grad) is TwoTensor and torch.equal(two.grad.a, expected[0])


@pytest.mark.parametrize("name", OPERATORS)
def test_dispatch_mode_sees_the_call_and_its_gradients(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    expected = torch.autograd.grad(op(a, b).sum(), (a, b))
    with count_launches() as launches, Record() as mode:
        actual = torch.autograd.grad(op(a, b).sum(), (a, b))
    assert mode.seen == launches and sum(launches.values()) == 3
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_and_meta_tensors(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t) for t in (a, b, *op.offs)]

    def step() -> Tensor:
        y = op.overload(*fake)
        y.sum().backward()
        return y

    with count_launches() as launches:
        with mode:
            inside = step()
        outside = step()
        y = op.overload(
            *(t.detach().to("meta").requires_grad_(t.is_floating_point()) for t in (a, b, *op.offs))
        )
        y.sum().backward()
    assert not launches
    for t in (inside, outside):
        assert isinstance(t, FakeTensor) and t.device.type == "cpu"
    real = op(a, b)
    for t in (inside, outside, y):
        assert (t.shape, t.stride(), t.dtype) == (real.shape, real.stride(), real.dtype)
        assert t.requires_grad
    assert y.is_meta
    for t, leaf in zip(fake[:2], (a, b), strict=True):
        assert isinstance(t.grad, FakeTensor) and t.grad.shape == leaf.shape


@pytest.mark.parametrize(
    ("name", "letter"),
    [(name, d) for name in OPERATORS for d in sorted({*"".join(DIMENSIONS[family_of(name)])})],
)
def test_any_dimension_may_be_unbacked(name: str, letter: str) -> None:
    """Neither the checks, the result, nor the choice of a gradient's memory order branch on a size."""
    x, w, g = DIMENSIONS[family_of(name)]
    a, b, y = {"": (x, w, g), "_dgrad": (g, w, x), "_wgrad": (g, x, w)}[
        name.removeprefix(family_of(name))
    ]
    op = problem(name)
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        unbacked = env.create_unbacked_symint()

        def fake(letters: str, sizes: tuple[int, ...]) -> Tensor:
            shape = [unbacked if d == letter else n for d, n in zip(letters, sizes, strict=True)]
            return torch.empty(shape, dtype=op.dtype)

        operands = [fake(a, op.a).requires_grad_(), fake(b, op.b).requires_grad_()]
        offs = [fake("E", (3,)).int()] if op.offs else []
        inputs = [t * 1 for t in operands]  # a gradient that reaches a leaf is compared with it
        result = op.overload(*inputs, *offs)
        assert list(result.shape) == list(fake(y, op.result).shape)
        grads = torch.autograd.grad(result, inputs, fake(y, op.result))
        assert [list(d.shape) for d in grads] == [list(t.shape) for t in inputs]


@pytest.mark.parametrize("name", OPERATORS)
def test_null_kernels_make_results_of_the_real_geometry(name: str) -> None:
    tensors = good_arguments(name)
    overload = getattr(torch.ops.cake, name).default
    for dtype in result_dtypes(name, torch.bfloat16):
        options = {} if dtype == result_dtypes(name, torch.bfloat16)[0] else {"out_dtype": dtype}
        real = overload(**tensors, **options)
        with null_kernels():
            null = overload(**tensors, **options)
        assert (null.shape, null.dtype, null.stride()) == (real.shape, real.dtype, real.stride())


# Tracers


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_jit_trace(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    traced = torch.jit.trace(lambda a, b, *offs: 2 * op.overload(a, b, *offs), (a, b, *op.offs))
    kinds = Counter(node.kind() for node in traced.graph.nodes())
    assert kinds[f"cake::{name}"] == 1
    y = traced(a + 1, b, *op.offs)
    assert torch.equal(y, 2 * op(a + 1, b))
    expected = torch.autograd.grad(2 * op(a, b).sum(), (a, b))
    actual = torch.autograd.grad(traced(a, b, *op.offs).sum(), (a, b))
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_autograd(name: str) -> None:
    torch._dynamo.reset()
    op = problem(name)
    graphs = []

    def compiler(gm: torch.fx.GraphModule):
        def record(gm: torch.fx.GraphModule, inputs):
            graphs.append(gm)
            return gm

        return torch.compile(gm, backend=record, fullgraph=True)

    for _ in range(2):
        a, b = op.operands()
        expected = torch.autograd.grad(squared(op)(a, b), (a, b))
        y = squared(op)(a, b)
        with compiled_autograd._enable(compiler):
            y.backward()
        torch.testing.assert_close((a.grad, b.grad), expected)
    assert len(graphs) == 1  # the second iteration runs the graph of the first
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert any(f"{name}_dgrad" in t for t in targets) and any(f"{name}_wgrad" in t for t in targets)
