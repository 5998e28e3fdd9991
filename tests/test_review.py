"""Corners of the core that a review found wrong once: autocast around writes, pack hooks, symbolic sizes, tools."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch
from families import FAMILIES, OPERATORS, problem
from forms import PRODUCTS, good_arguments, result_dtypes, same_bits
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cake_ops
from cake_ops.cuda import fallback
from cake_ops.testing import count_launches, null_kernels

DIMENSIONS = {  # x, w, g
    "grouped_mm": ("MK", "ENK", "MN"),
    "router_mm": ("MK", "NK", "MN"),
    "dense_mm": ("LMK", "NK", "LMN"),
    "batched_mm": ("LMK", "LNK", "LMN"),
}


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_casts_no_product_inside_a_writing_or_prepared_call(
    name: str, dtype: torch.dtype
) -> None:
    """They have no autocast rule; the torch products that a backend makes of them must have none either."""
    op = problem(name)
    a, b = (t.float() for t in op.operands(a_grad=False, b_grad=False))
    expected = op(a, b)
    out = torch.empty_like(expected)
    prepared = cake_ops.prepare(name, a, b, *op.offs)
    accumulate = getattr(cake_ops, f"{name}_", None)
    total = torch.zeros_like(expected)
    with torch.autocast("cpu", dtype=dtype):
        getattr(cake_ops, name)(a, b, *op.offs, out=out)
        launched = prepared.launch()
        if accumulate is not None:
            accumulate(total, a, b, *op.offs)
    assert same_bits(out, expected) and same_bits(launched, expected)
    assert accumulate is None or torch.equal(total, expected)


# Saved-tensor hooks


@pytest.mark.parametrize("name", FAMILIES)
def test_pack_hook_that_changes_its_input_is_refused(name: str) -> None:
    """As by torch.mm, and before anything is launched."""
    op = problem(name)
    a, b = (t * 1 for t in op.operands())

    def pack(t: Tensor) -> Tensor:
        return t.add_(1) if t.is_floating_point() else t

    with count_launches() as launches, saved_tensors_hooks(pack, lambda t: t):
        for product in (
            lambda: torch.mm(a[0:1].flatten(0, -2), b.flatten(0, -2).t()),
            lambda: op(a, b),
        ):
            with pytest.raises(RuntimeError, match="pack hook.*in.place"):
                product()
    assert not launches


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
def test_pack_hook_may_call_operators_and_return_anything(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    expected = torch.autograd.grad(op(a, b).sum(), (a, b))
    kept: list[Tensor] = []

    def pack(t: Tensor) -> int:
        with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
            op(*op.operands()).sum().backward()
        kept.append(t)
        return len(kept) - 1

    with saved_tensors_hooks(pack, kept.__getitem__):
        y = op(a, b)
    assert len(kept) == 2 + len(op.offs)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (a, b)), expected))


# Symbolic sizes


@pytest.mark.parametrize("letter", "EMNKL")
@pytest.mark.parametrize("name", OPERATORS)
def test_any_dimension_may_be_unbacked(name: str, letter: str) -> None:
    """Neither the checks, the result, nor the choice of a gradient's memory order branch on a size."""
    family, _, form = name.partition("_mm")
    x, w, g = DIMENSIONS[f"{family}_mm"]
    a, b, y = {"": (x, w, g), "_dgrad": (g, w, x), "_wgrad": (g, x, w)}[form]
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


# vmap


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_over_an_empty_batch(name: str) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=False, b_grad=False)
    empty = a.new_empty(0, *a.shape)
    for dims, tensors in (((0, None), (empty, b)), ((1, 0), (empty.movedim(0, 1), b[None][:0]))):
        y = torch.vmap(op, in_dims=dims)(*tensors)
        assert y.shape == (0, *op.result) and y.dtype == op(a, b).dtype


# Preparing, explaining


@pytest.mark.parametrize("make", ["fake", "negative", "out"])
def test_prepare_takes_plain_tensors_only(make: str) -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    out = torch._neg_view(torch.empty(3, 5)) if make == "out" else None
    if make == "fake":
        mode = FakeTensorMode()
        x, w = mode.from_tensor(x), mode.from_tensor(w)
    if make == "negative":
        x = torch._neg_view(x)
        torch.testing.assert_close(cake_ops.dense_mm(x, w), x.resolve_neg() @ w.t())
    with pytest.raises(RuntimeError, match="plain tensors, got a (FakeTensor|Tensor)"):
        cake_ops.prepare("dense_mm", x, w, out=out)


def test_prepare_refuses_an_out_of_another_dtype_than_asked_for() -> None:
    x, w = torch.randn(3, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    with pytest.raises(RuntimeError, match="out_dtype torch.float32 contradicts out"):
        cake_ops.prepare("dense_mm", x, w, out_dtype=torch.float32, out=x.new_empty(3, 5))


@pytest.mark.parametrize("function", [cake_ops.explain, cake_ops.prepare])
def test_tensors_that_no_backend_has(function: Callable[..., object]) -> None:
    with pytest.raises(RuntimeError, match="must be on a CPU or CUDA device, got no tensors"):
        function("dense_mm")
    with pytest.raises(RuntimeError, match="must be on a CPU or CUDA device, got meta"):
        function("dense_mm", torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta"))


# Tools


@pytest.mark.parametrize("name", PRODUCTS)
def test_null_kernels_make_results_of_the_real_geometry(name: str) -> None:
    tensors = good_arguments(name)
    overload = getattr(torch.ops.cake, name).default
    for dtype in result_dtypes(name, torch.bfloat16):
        options = {} if dtype == result_dtypes(name, torch.bfloat16)[0] else {"out_dtype": dtype}
        real = overload(**tensors, **options)
        with null_kernels():
            null = overload(**tensors, **options)
        assert (null.shape, null.dtype, null.stride()) == (real.shape, real.dtype, real.stride())


def test_launches_of_several_threads_are_all_counted() -> None:
    op = problem("dense_mm")
    a, b = op.operands(a_grad=False, b_grad=False)
    with null_kernels(), count_launches() as launches, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [op(a, b) for _ in range(500)], range(4)))
    assert launches["dense_mm"] == 2000


# The way of GPUs without kernels


@pytest.mark.parametrize("ends", [[7, 7, 60, 65], [-3, 90, 20, 50], [30, 10, 70, 70], [0] * 4])
def test_fallback_takes_offsets_as_the_kernels_do(
    monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    """Bad ones are clamped to [0, M] and to the end before them: torch's own products trust them."""
    monkeypatch.setattr(fallback, "announce", lambda device: None)
    x, w = torch.randn(70, 39).bfloat16(), torch.randn(4, 41, 39).bfloat16()
    offs = torch.tensor(ends, dtype=torch.int32)
    y = torch.full((70, 41), float("nan")).bfloat16()
    fallback.ragged_rows(y, x, w, offs)
    expected = reference.grouped_mm(x, w, offs.clamp(0, 70).cummax(0).values)
    assert reference.relative_error(y, expected) < reference.tolerance(torch.bfloat16)
