"""Training steps on a GPU: memory, copies, checkpointing and compilation, told by the kernels that run.

A test called after a case (h38, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from forms import assert_close, same_bits
from gpu import (
    BF16,
    DEVICE,
    KERNEL_FAMILIES,
    SIZES,
    Problem,
    gemms,
    kernels,
    problem,
    settled_memory,
    small,
    wait,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import cake_ops

pytestmark = pytest.mark.gpu

each_family = pytest.mark.parametrize("family", KERNEL_FAMILIES)


@pytest.fixture
def unpoisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NaN in fresh results, whose kernels would be counted."""
    monkeypatch.undo()


def leaves(p: Problem) -> tuple[Tensor, Tensor]:
    return p.x.detach().requires_grad_(), p.w.detach().requires_grad_()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the cycle collector: what is not freed by its last reference stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("backward", [True, False])
@each_family
def test_h38_nothing_outlives_a_step(uncollected: None, family: str, backward: bool) -> None:
    def step() -> list[weakref.ref[Tensor]]:
        p = small(family)
        x, w = leaves(p)
        y = p.forward(x, w)
        held = [weakref.ref(t) for t in (x, w, p.g, y)]
        if backward:
            y.backward(p.g)
            held += [weakref.ref(x.grad), weakref.ref(w.grad)]
        return held

    step()
    before = settled_memory()
    assert all(ref() is None for ref in step())
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    "family, stored",
    [("grouped_mm", "[E, N, K]"), ("grouped_mm", "[E, K, N]"), ("router_mm", "[N, H]")],
)
def test_h39_the_weight_gradient_is_adopted_without_a_copy(
    unpoisoned: None, family: str, stored: str
) -> None:
    p = small(family)
    x, w = leaves(p)
    swapped = stored == "[E, K, N]"
    if swapped:
        w = w.detach().mT.contiguous().requires_grad_()

    def weight() -> Tensor:
        return w.mT if swapped else w

    p.forward(x, weight()).backward(p.g)
    x.grad = w.grad = None
    y = p.forward(x, weight())
    ran = kernels(lambda: y.backward(p.g))
    prefix = f"sm90_{family.removesuffix('_mm')}_gemm_"
    assert len(ran) == 2 and all(name.startswith(prefix) for name in ran)
    assert w.grad.stride() == w.stride()
    p.check(p.products[2], w.grad.mT if swapped else w.grad)


# Checkpointing


Block = Callable[[Problem, Tensor, Tensor], Tensor]


def last(p: Problem, x: Tensor, w: Tensor) -> Tensor:
    return p.forward(F.silu(x), w)


def followed(p: Problem, x: Tensor, w: Tensor) -> Tensor:
    return p.forward(F.silu(x), w).sin()


@pytest.mark.parametrize(
    "block, early_stop, forwards", [(last, True, 1), (last, False, 2), (followed, True, 2)]
)
@each_family
def test_h40_early_stop_skips_exactly_one_forward_kernel(
    unpoisoned: None, family: str, block: Block, early_stop: bool, forwards: int
) -> None:
    p = small(family)
    x, w = leaves(p)
    expected = torch.autograd.grad(block(p, x, w), (x, w), p.g)
    grads: list[Tensor] = []

    def step() -> None:
        with set_checkpoint_early_stop(early_stop):
            y = checkpoint(block, p, x, w, use_reentrant=False)
            grads[:] = torch.autograd.grad(y, (x, w), p.g)

    step()
    ran = gemms(step)
    assert sorted(ran) == ["dgrad", *["fwd"] * forwards, "wgrad"]
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


def state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.cuda.current_stream(),
        torch.cuda.current_device(),
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@each_family
def test_h44_nested_regions_leave_the_state_as_it_was(
    unpoisoned: None, family: str, depth: int
) -> None:
    p = small(family)
    x, w = leaves(p)
    expected = torch.autograd.grad(last(p, x, w), (x, w), p.g)

    def nested(levels: int, *args: Tensor) -> Tensor:
        if levels == 0:
            return last(p, *args)
        return checkpoint(nested, levels - 1, *args, use_reentrant=False)

    grads: list[Tensor] = []

    def step() -> None:
        grads[:] = torch.autograd.grad(nested(depth, x, w), (x, w), p.g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        before = state()
        step()
        assert state() == before
        ran = gemms(step)
        wait()
    assert sorted(ran) == ["dgrad", "fwd", "wgrad"]
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))
    p.check(family, p.run(family))


# Compilation


def test_h46_operands_that_the_compiler_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that come out of a transpose and cast, a concatenation, and a padding of odd sizes."""
    pytest.importorskip("triton")
    from torch._inductor import config

    def f(x: Tensor, w: Tensor, halves: Tensor, odd: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
        return (
            cake_ops.grouped_mm(x, w.transpose(1, 2).to(BF16), offs),
            cake_ops.grouped_mm(x * 2, torch.cat([halves, halves + 1], 2), offs),
            cake_ops.grouped_mm(F.pad(x, (0, 3)), F.pad(odd, (0, 4)), offs),
        )

    p = problem(SIZES, 136, 72)
    arguments = (
        p.x,
        torch.randn(5, 72, 136, device=DEVICE),
        p.w[..., :36].contiguous(),
        p.w[..., :71].contiguous(),
        p.offs,
    )
    monkeypatch.undo()  # the compiler's own allocations stay as they are
    with config.patch(compile_threads=1):
        actual = torch.compile(f, fullgraph=True, dynamic=False)(*arguments)
    for a, b in zip(actual, f(*arguments), strict=True):
        assert_close(a, b.double(), 1e-2)
    torch._dynamo.reset()
