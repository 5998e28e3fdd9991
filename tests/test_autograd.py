"""Autograd through every operator: values, what is launched, what is saved and for how long, and errors.

The yardstick is torch's own ``mm``: whatever autograd does for a built-in operator it does here.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from families import FAMILIES, OPERATORS, problem
from torch import Tensor
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    save_on_cpu,
    saved_tensors_hooks,
)

import cake_ops
from cake_ops.testing import count_launches, null_kernels

FP64_OPERATORS = [name for name in OPERATORS if not name.startswith("router")]


def gradient_operators(name: str) -> tuple[str, str]:
    """The operators that compute the gradients of the first and of the second operand."""
    family, _, form = name.partition("_mm")
    forms = {"": ("_dgrad", "_wgrad"), "_dgrad": ("", "_wgrad"), "_wgrad": ("", "_dgrad")}[form]
    return f"{family}_mm{forms[0]}", f"{family}_mm{forms[1]}"


def to_fp64(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


# Values


@pytest.mark.parametrize(("a_grad", "b_grad"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", OPERATORS)
def test_h34_only_the_needed_gradients_are_launched(name: str, a_grad: bool, b_grad: bool) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=a_grad, b_grad=b_grad)
    a64, b64 = to_fp64(a, b)
    g = torch.randn(op.result, dtype=op.dtype)
    op.reference(a64, b64).backward(g.double())
    with count_launches() as launches:
        op(a, b).backward(g)
    expected = Counter([name])
    needed = zip(gradient_operators(name), (a_grad, b_grad), strict=True)
    expected.update(n for n, needs in needed if needs)
    assert launches == expected
    for t, t64, needs in ((a, a64, a_grad), (b, b64, b_grad)):
        assert (t.grad is not None) == needs
        if needs:
            torch.testing.assert_close(t.grad, t64.grad.to(t.dtype))


@pytest.mark.parametrize("name", FAMILIES)
def test_h34_gradient_of_one_input_on_request(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    y = op(a, b)
    with count_launches() as launches:
        (db,) = torch.autograd.grad(y.sum(), b)
    assert db.shape == b.shape
    # As torch.mm's, the node computes only what the engine asks for.
    assert launches == Counter([f"{name}_wgrad"])


@pytest.mark.parametrize("name", OPERATORS)
def test_h34_no_gradient_no_graph(name: str) -> None:
    op = problem(name)
    assert op(*op.operands(a_grad=False, b_grad=False)).grad_fn is None
    with torch.no_grad():
        assert op(*op.operands()).grad_fn is None


@pytest.mark.parametrize("name", FP64_OPERATORS)
def test_h35_gradcheck_twice(name: str) -> None:
    op = problem(name)
    assert torch.autograd.gradcheck(op, op.operands())
    assert torch.autograd.gradgradcheck(op, op.operands())


@pytest.mark.parametrize("name", OPERATORS)
def test_h35_double_backward_matches_torch(name: str) -> None:
    op = problem(name)
    operands = op.operands()

    def second(f: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(f(a, b).pow(2).sum(), (a, b), create_graph=True)
        return torch.autograd.grad(sum(d.pow(2).sum() for d in grads), (a, b))

    actual = second(op, *operands)
    expected = second(op.reference, *to_fp64(*operands))
    for d, d64 in zip(actual, expected, strict=True):
        assert d.norm() > 0
        assert (d - d64).norm() / d64.norm() < (1e-5 if d.dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("name", OPERATORS)
def test_expanded_and_transposed_gradients(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    y = op(a, b)
    rows = torch.randn(y.shape[-1], dtype=op.dtype)
    for g in (
        torch.ones((), dtype=op.dtype).expand(y.shape),
        torch.full((), 1 / y.numel(), dtype=op.dtype).expand(y.shape),
        rows.expand(y.shape),
        torch.randn(y.mT.shape, dtype=op.dtype).mT,
    ):
        actual = torch.autograd.grad(y, (a, b), g, retain_graph=True)
        expected = torch.autograd.grad(y, (a, b), g.contiguous(), retain_graph=True)
        torch.testing.assert_close(actual, expected)
    y.sum().backward()


@pytest.mark.parametrize("name", FAMILIES)
def test_undefined_gradient_stays_undefined(name: str) -> None:
    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx, g: Tensor) -> None:
            return None

    op = problem(name)
    a, b = op.operands()
    with count_launches() as launches:
        Drop.apply(op(a, b)).sum().backward()
    assert a.grad is None and b.grad is None
    assert launches == Counter([name])


# The result


@pytest.mark.parametrize("name", OPERATORS)
def test_result_is_an_ordinary_tensor(name: str) -> None:
    op = problem(name)
    y = op(*op.operands())
    assert y._version == 0
    assert not y._is_view() and not y.is_leaf and y.requires_grad
    assert y.is_contiguous() and y.shape == op.result
    assert y.grad_fn.name() == "".join(part.title() for part in name.split("_")) + "Backward"


@pytest.mark.parametrize(
    "edit",
    [
        lambda y: y.mul_(2),
        lambda y: y[..., :3].mul_(-1),
        lambda y: y[1:].zero_(),
        lambda y: y.relu_(),
    ],
    ids=["result", "columns", "rows", "saved_result"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_result_may_be_changed_in_place(name: str, edit: Callable[[Tensor], Tensor]) -> None:
    op = problem(name)
    a, b = op.operands()
    a64, b64 = to_fp64(a, b)
    for y, name_ in ((op(a, b), "cake"), (op.reference(a64, b64).clone(), "reference")):
        assert y.grad_fn is not None, name_
        edit(y)
        y.pow(2).sum().backward()
    torch.testing.assert_close(a.grad, a64.grad.to(a.dtype))
    torch.testing.assert_close(b.grad, b64.grad.to(b.dtype))


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_on_the_result(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    y = op(a, b)
    seen = []
    y.register_hook(lambda g: seen.append(g) or 3 * g)
    y.retain_grad()
    y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: seen.append(grad_outputs[0]))
    y.sum().backward()
    ones = torch.ones_like(y)
    assert len(seen) == 2 and torch.equal(seen[0], ones) and torch.equal(seen[1], 3 * ones)
    assert torch.equal(y.grad, 3 * ones)
    (da,) = torch.autograd.grad(op(a, b), a, 3 * ones)
    assert torch.equal(a.grad, da)


# What is saved


@pytest.mark.parametrize("name", OPERATORS)
def test_hooks_see_every_saved_tensor_once(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    expected = torch.autograd.grad(op(a, b).sum(), (a, b))
    packed, unpacked = [], []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: unpacked.append(t) or t):
        y = op(a, b)
    assert [id(t) for t in packed] == [id(t) for t in (a, b, *op.offs)]
    assert not unpacked
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    actual = torch.autograd.grad(y.sum(), (a, b))
    assert len(packed) == len(unpacked) == 2 + len(op.offs)
    assert all(map(torch.equal, actual, expected))


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


def test_hooks_run_outside_grad_mode_before_the_launch() -> None:
    op = problem("grouped_mm")
    a, b = op.operands()
    with count_launches() as launches:
        seen = []
        with saved_tensors_hooks(
            lambda t: seen.append((torch.is_grad_enabled(), launches["grouped_mm"])), lambda t: t
        ):
            op(a, b)
    assert seen == [(False, 0)] * 3
    assert launches["grouped_mm"] == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_save_on_cpu_and_double_backward_under_hooks(name: str) -> None:
    op = problem(name)
    a, b = op.operands()

    def second() -> tuple[Tensor, ...]:
        (da,) = torch.autograd.grad(op(a, b).pow(2).sum(), a, create_graph=True)
        return torch.autograd.grad(da.pow(2).sum(), (a, b))

    expected = second()
    with save_on_cpu():
        actual = second()
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_tensors_may_change_where_torch_allows_it(name: str) -> None:
    op = problem(name)
    leaves = op.operands()
    expected = torch.autograd.grad(op(*leaves).sum(), leaves)
    with allow_mutation_on_saved_tensors():
        a, b = (t.clone() for t in leaves)
        y = op(a, b)
        a.zero_(), b.zero_()
        actual = torch.autograd.grad(y.sum(), leaves)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("name", OPERATORS)
def test_second_backward_needs_retain_graph(name: str) -> None:
    op = problem(name)
    a, b = op.operands()
    y = op(a, b)
    g = torch.randn_like(y)
    first = torch.autograd.grad(y, (a, b), g, retain_graph=True)
    second = torch.autograd.grad(y, (a, b), g)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(g)
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        y.grad_fn.saved_tensors  # noqa: B018  (the access raises)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(
    ("name", "which"),
    [(name, i) for name in OPERATORS for i in range(3 if name.startswith("grouped") else 2)],
)
def test_h37_change_of_a_saved_tensor_is_noticed(name: str, which: int, warm: bool) -> None:
    op = problem(name)
    leaves = op.operands()
    for _ in range(3 if warm else 0):
        op(*leaves).sum().backward()
    a, b = (t.clone() for t in leaves)  # a leaf that requires grad may not be changed in place
    base = b.mT.contiguous()
    y = op(a, base.mT)  # b is saved as a view of ``base``
    y.sum().backward(retain_graph=True)
    b.mul_(2)  # not saved
    y.sum().backward(retain_graph=True)
    (a, base, *op.offs)[which].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", OPERATORS)
def test_h38_nothing_outlives_backward(name: str) -> None:
    op = problem(name)
    leaves = op.operands()

    def step(backward: bool, hooks: bool) -> list[weakref.ref[Tensor]]:
        a, b = (t * 1 for t in leaves)
        with saved_tensors_hooks(lambda t: t, lambda t: t) if hooks else torch.enable_grad():
            y = op(a, b)
        g = torch.ones_like(y)
        refs = [weakref.ref(t) for t in (a, b, y, g)]
        if backward:
            y.backward(g)
        return refs

    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            for hooks in (True, False):
                assert [r() for r in step(backward, hooks)] == [None] * 4, (backward, hooks)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", FAMILIES)
def test_h38_backward_frees_what_was_saved(name: str) -> None:
    op = problem(name)
    leaf, b = op.operands()
    a = leaf * 1
    y = op(a, b)
    ref = weakref.ref(a)
    del a
    assert ref() is not None
    y.sum().backward()
    assert ref() is None


@pytest.mark.parametrize("name", FAMILIES)
def test_h38_frozen_weight_does_not_keep_the_activations(name: str) -> None:
    op = problem(name)
    leaf, b = op.operands(b_grad=False)
    a = leaf * 1
    y = op(a, b)
    ref = weakref.ref(a)
    del a
    assert ref() is None
    y.sum().backward()
    assert leaf.grad is not None


def test_deep_graph_is_freed_without_recursion() -> None:
    w = torch.randn(1, 2, 2, requires_grad=True)
    offs = torch.tensor([2], dtype=torch.int32)
    with null_kernels():
        y = torch.ops.cake.grouped_mm(torch.ones(2, 2), w, offs)
        first = weakref.ref(y)
        for _ in range(20_000):
            y = torch.ops.cake.grouped_mm(y, w, offs)
        assert first() is not None
        del y
        assert first() is None


# Operators that write


def written() -> list[str]:
    return [name for name, op in cake_ops._library.OPS.items() if op.mutates]


def call_written(name: str, out: Tensor, a: Tensor, b: Tensor, offs: tuple[Tensor, ...]) -> None:
    overload = getattr(torch.ops.cake, name).default
    if name.endswith("_out"):
        overload(a, b, *offs, out=out)
    else:
        overload(out, a, b, *offs)


@pytest.mark.parametrize("name", written())
def test_writing_operators_refuse_gradients_and_bump_the_version(name: str) -> None:
    op = problem(name.removesuffix("_out").removesuffix("_"))
    a, b = op.operands(a_grad=False, b_grad=False)
    out = torch.zeros(op.result, dtype=op.dtype)
    call_written(name, out, a, b, op.offs)
    assert torch.equal(out, op(a, b))
    assert out._version == 1

    for i in range(3):
        arguments = [out.clone(), a, b]
        arguments[i] = arguments[i].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"cake::{name}: not differentiable.*detach"):
            call_written(name, *arguments, op.offs)
        with torch.no_grad():
            call_written(name, *arguments, op.offs)

    scale = torch.ones((), dtype=op.dtype, requires_grad=True)
    product = scale * out  # saves out
    call_written(name, out, a, b, op.offs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
