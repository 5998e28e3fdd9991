"""Activation checkpointing: how often a forward product is launched, and what a stopped recomputation leaves.

A non-reentrant checkpoint stops recomputing at the last tensor that the region saved (early stop). A
built-in operator saves before it computes, so the product at the end of a region is not computed again;
the same holds here, bare and inside a TorchDispatchMode. Launches are counted at the backend.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, OPERATORS, SmallProblem, problem
from forms import Pass
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import cake_ops
from cake_ops.testing import count_launches


@pytest.fixture(params=[contextlib.nullcontext, Pass], ids=["bare", "mode"])
def surroundings(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return request.param


def state() -> tuple[Any, ...]:
    """What a checkpoint or an exception that passes through an operator might leave behind."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        top_hooks(False),
        torch.utils.checkpoint._enable_checkpoint_early_stop,
        torch._C._len_torch_dispatch_stack(),
        torch._C._functorch.peek_interpreter_stack(),
        str(torch._C._dispatch_tls_local_include_set()),
        str(torch._C._dispatch_tls_local_exclude_set()),
    )


@pytest.fixture(autouse=True)
def quiet_debug_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """``debug=True`` logs records that only torch's own handler can format; pytest's raises on them."""
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "disabled", True)


Region = Callable[[Tensor, Tensor], Tensor]


def silu_then(op: SmallProblem) -> Region:
    """The operator as the last of a region: its first operand is computed in the region."""
    return lambda a, b: op(torch.nn.functional.silu(a), b)


def block(op: SmallProblem) -> Callable[..., Tensor]:
    """up -> silu * mul -> down, as in an expert or a gated MLP; ``down`` is the last saver."""

    def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, h = op(x, up).chunk(2, -1)
        return op(torch.nn.functional.silu(gate) * h, down)

    return run


def block_operands(op: SmallProblem) -> tuple[Tensor, Tensor, Tensor]:
    x, w = op.operands()
    *lead, n, k = w.shape
    up, down = (
        torch.randn(*lead, 2 * n, k, dtype=op.dtype),
        torch.randn(*lead, k, n, dtype=op.dtype),
    )
    return x, up.requires_grad_(), down.requires_grad_()


def step(f: Callable[..., Tensor], *leaves: Tensor) -> tuple[list[Tensor], Counter[str]]:
    """The result and the gradients of ``f``, and the launches; the state is left as it was."""
    before = state()
    for leaf in leaves:
        leaf.grad = None
    with count_launches() as launches:
        y = f(*leaves)
        y.pow(2).sum().backward()
    assert state() == before
    return [y.detach(), *(leaf.grad for leaf in leaves)], launches


def wrap(region: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(region, *args, **{"use_reentrant": False, **options})


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


# Launches


@pytest.mark.parametrize(
    ("how", "forwards"),
    [
        (lambda region: region, 1),
        (lambda region: wrap(region), 1),
        (lambda region: wrap(region, early_stop=False), 2),
        (lambda region: wrap(region, use_reentrant=True), 2),
        (lambda region: wrap(wrap(region)), 1),
        (lambda region: wrap(wrap(wrap(region))), 1),
        (lambda region: wrap(lambda *args: region(*args).sigmoid()), 2),
        (lambda region: wrap(region, debug=True), 1),
    ],
    ids=[
        "plain",
        "early",
        "h41-late",
        "reentrant",
        "h44-2-deep",
        "h44-3-deep",
        "saver-last",
        "debug",
    ],
)
@pytest.mark.parametrize("name", OPERATORS)
def test_h40_launches_and_bits(
    name: str, how: Callable[[Region], Region], forwards: int, surroundings: Callable[[], Any]
) -> None:
    op = problem(name)
    region = silu_then(op)
    leaves = op.operands()
    reference = how(region)(*leaves)
    saver_last = type(reference.grad_fn).__name__ == "SigmoidBackward0"
    expected, plain = step(
        (lambda *args: region(*args).sigmoid()) if saver_last else region, *leaves
    )
    with surroundings():
        actual, launches = step(how(region), *leaves)
    assert plain[name] == 1
    assert launches - plain == Counter({name: forwards - 1} if forwards > 1 else {})
    assert same(actual, expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_h41_early_stop_switched_off_for_all(name: str, surroundings: Callable[[], Any]) -> None:
    op = problem(name)
    leaves = op.operands()
    expected, _ = step(silu_then(op), *leaves)
    with set_checkpoint_early_stop(False), surroundings():
        actual, launches = step(wrap(silu_then(op)), *leaves)
    assert launches[name] == 2
    assert same(actual, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_h40_block(name: str, surroundings: Callable[[], Any]) -> None:
    op = problem(name)
    leaves = block_operands(op)
    with surroundings():
        expected, plain = step(block(op), *leaves)
        actual, launches = step(wrap(block(op)), *leaves)
        nested, nested_launches = step(wrap(wrap(block(op))), *leaves)
    assert (plain[name], launches[name], nested_launches[name]) == (2, 3, 3)
    assert same(actual, expected) and same(nested, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_h40_retain_graph(name: str, surroundings: Callable[[], Any]) -> None:
    op = problem(name)
    leaves = op.operands()
    with surroundings(), count_launches() as launches:
        y = wrap(silu_then(op))(*leaves)
        first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(y.sum(), leaves)
    assert launches == Counter({name: 1, f"{name}_dgrad": 2, f"{name}_wgrad": 2})
    assert same(list(first), list(second))


@pytest.mark.parametrize(("a_grad", "b_grad"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_h40_one_operand_frozen(name: str, a_grad: bool, b_grad: bool) -> None:
    op = problem(name)
    a, b = op.operands(a_grad=a_grad, b_grad=b_grad)
    leaf = a if a_grad else b
    expected = torch.autograd.grad(op(a, b).sum(), leaf)
    with count_launches() as launches:
        actual = torch.autograd.grad(wrap(op)(a, b).sum(), leaf)
    assert launches == Counter({name: 1, f"{name}_{'d' if a_grad else 'w'}grad": 1})
    assert same(list(actual), list(expected))


def test_h40_double_backward_through_a_region() -> None:
    op = problem("grouped_mm")
    leaves = op.operands()

    def second(f: Region) -> list[Tensor]:
        (da,) = torch.autograd.grad(f(*leaves).pow(2).sum(), leaves[0], create_graph=True)
        return list(torch.autograd.grad(da.pow(2).sum(), leaves))

    assert same(second(wrap(silu_then(op))), second(silu_then(op)))


@pytest.mark.parametrize("name", FAMILIES)
def test_public_functions_stop_early(name: str) -> None:
    function = getattr(cake_ops, name)
    op = problem(name)
    _, launches = step(wrap(lambda a, b: function(a, b, *op.offs)), *op.operands())
    assert launches[name] == 1


# Memory


def allocations(f: Callable[[], Any]) -> list[int]:
    """Sizes in bytes of all CPU allocations while ``f`` runs."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        f()
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


@pytest.mark.parametrize("early_stop", [True, False])
def test_h40_stopped_recomputation_allocates_no_result(
    early_stop: bool, surroundings: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(101, 37, requires_grad=True), torch.randn(3, 1009, 37, requires_grad=True)
    offs = torch.tensor([10, 60, 101], dtype=torch.int32)
    y_shape = (101, 1009)
    shapes: list[tuple[int, ...]] = []
    allocate = cake_ops._problem.Problem.allocate

    def recording(self, *tensors, out_dtype=None):
        out = allocate(self, *tensors, out_dtype=out_dtype)
        shapes.append(tuple(out.shape))
        return out

    with surroundings():
        y = checkpoint(cake_ops.grouped_mm, x, w, offs, use_reentrant=False, early_stop=early_stop)
        g = torch.randn_like(y)
        monkeypatch.setattr(cake_ops._problem.Problem, "allocate", recording)
        sizes = allocations(lambda: y.backward(g))
    assert (y.numel() * 4 in sizes) == (not early_stop)
    assert (y_shape in shapes) == (not early_stop)
    assert x.numel() * 4 in sizes and tuple(x.shape) in shapes  # dx: both probes do see allocations


# Selective checkpointing


def selective(policy: Any) -> Callable[[], Any]:
    return lambda: create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("warm", [0, 5], ids=["cold", "warm"])
@pytest.mark.parametrize(
    ("policy", "forwards"),
    [(CheckpointPolicy.MUST_SAVE, 2), (CheckpointPolicy.MUST_RECOMPUTE, 3)],
    ids=["save", "recompute"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_h43_policy_by_overload(
    name: str, policy: CheckpointPolicy, forwards: int, warm: int
) -> None:
    op = problem(name)
    leaves = block_operands(op)
    expected, _ = step(block(op), *leaves)
    for _ in range(warm):
        step(block(op), *leaves)
    asked = Counter()

    def decide(context, func, *args, **kwargs):
        asked[func] += 1
        if func is op.overload:
            return policy
        return CheckpointPolicy.MUST_RECOMPUTE

    actual, launches = step(wrap(block(op), context_fn=selective(decide)), *leaves)
    assert asked[op.overload] >= 2  # the policy is asked for both products
    assert launches[name] == forwards
    assert same(actual, expected)


def test_h43_list_of_overloads_and_of_packets() -> None:
    op = problem("grouped_mm")
    leaves = block_operands(op)
    saved = wrap(block(op), context_fn=selective([torch.ops.cake.grouped_mm.default]))
    assert step(saved, *leaves)[1]["grouped_mm"] == 2
    # torch matches overloads: a packet in a policy function is never equal to one, so the product is
    # recomputed, and the list form refuses it.
    packet = torch.ops.cake.grouped_mm

    def decide(context, func, *args, **kwargs):
        matches = func in (packet,)
        return CheckpointPolicy.MUST_SAVE if matches else CheckpointPolicy.MUST_RECOMPUTE

    assert step(wrap(block(op), context_fn=selective(decide)), *leaves)[1]["grouped_mm"] == 3
    with pytest.raises((ValueError, AssertionError)):
        step(wrap(block(op), context_fn=selective([packet])), *leaves)


# Control flow by exceptions


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", OPERATORS)
def test_h44_exception_of_a_pack_hook_passes_and_nothing_is_launched(
    name: str, surroundings: Callable[[], Any]
) -> None:
    op = problem(name)
    a, b = op.operands()

    def attempt(packs: int) -> Counter[str]:
        """Calls the operator under a pack hook that raises when ``packs`` tensors have been packed."""
        packed = []

        def pack(t: Tensor) -> Tensor:
            if len(packed) == packs:
                raise Stop
            packed.append(t)
            return t

        hooks = saved_tensors_hooks(pack, lambda t: t)
        with count_launches() as launches, pytest.raises(Stop), hooks:
            op(a, b)
        return launches

    with surroundings():
        before = state()
        for packs in range(2 + len(op.offs)):
            assert not attempt(packs)
            assert state() == before
        op(a, b).sum().backward()
    assert a.grad is not None and b.grad is not None


def test_h44_failed_launch_leaves_the_state_alone(surroundings: Callable[[], Any]) -> None:
    op = problem("grouped_mm")
    a, b = op.operands()
    bad = torch.tensor([3, 2, 8], dtype=torch.int32)
    with surroundings():
        before = state()
        for hooks in (contextlib.nullcontext(), saved_tensors_hooks(lambda t: t, lambda t: t)):
            with pytest.raises(RuntimeError, match="group 1"), hooks:
                op.overload(a, b, bad)
        assert state() == before
        op(a, b).sum().backward()


def test_h44_state_inside_a_nested_region_under_autocast(surroundings: Callable[[], Any]) -> None:
    op = problem("grouped_mm")
    leaves = op.operands(torch.float32)
    seen = []

    def region(a: Tensor, b: Tensor) -> Tensor:
        y = op(a, b)
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), y.dtype))
        return op(y.repeat(1, 2)[:, :6], b)

    with surroundings(), torch.autocast("cpu", dtype=torch.bfloat16):
        actual, launches = step(wrap(wrap(region)), *leaves)
    assert seen == [(True, True, torch.bfloat16)] * 2
    assert launches["grouped_mm"] == 3  # y twice, the last product once
    assert [t.dtype for t in actual] == [torch.bfloat16, torch.float32, torch.float32]


# A routed region


def test_h42_routing_is_recomputed_alike() -> None:
    tokens, hidden, experts, k, inner = 4096, 16, 128, 8, 8
    gate = torch.randn(experts, hidden, requires_grad=True)
    w = torch.randn(experts, inner, hidden, requires_grad=True)
    logits: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        scores = cake_ops.router_mm(x, gate)
        logits.append(scores.detach())
        weights, chosen = scores.softmax(-1).topk(k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        offs = counts.cumsum(0, dtype=torch.int32)
        rows = (x[order // k] * weights.flatten()[order].unsqueeze(1)).bfloat16()
        return cake_ops.grouped_mm(rows, w.bfloat16(), offs)

    for _ in range(50):
        x = torch.randn(tokens, hidden, requires_grad=True)
        logits.clear()
        with count_launches() as launches:
            checkpoint(region, x, use_reentrant=False).float().square().mean().backward()
        assert launches["grouped_mm"] == 1 and launches["router_mm"] == 2
        assert len(logits) == 2 and torch.equal(*logits)
        assert x.grad is not None and x.grad.isfinite().all()
