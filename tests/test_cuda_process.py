"""Where the CUDA backend runs: first uses in threads and processes, GPUs without kernels.

A test called after a case (h58, ..) is a defect that users of another package met once. Where a case needs a
process whose first use of CUDA it is, the body of that process is a function ``process_..`` of this module.
"""

from __future__ import annotations

import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from forms import NAN, same_bits
from gpu import (
    BF16,
    FP32,
    KERNEL_FAMILIES,
    SIZES,
    Problem,
    check,
    check_all,
    finish,
    problem,
    router,
    small,
    started,
    wait,
)
from torch import Tensor

import cake_ops
from cake_ops.cuda import fallback
from cake_ops.cuda.device import no_kernels_reason

pytestmark = pytest.mark.gpu

each_family = pytest.mark.parametrize("family", KERNEL_FAMILIES)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Makes the GPU claim another compute capability."""

    def forget() -> None:
        no_kernels_reason.cache_clear()
        fallback.announce.cache_clear()
        cake_ops.clear_caches()

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        forget()

    yield pretend
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (10, 3), (12, 0)])
def test_h61_a_gpu_without_kernels_is_served_by_torch(
    pretend: Callable[[tuple[int, int]], None], capability: tuple[int, int]
) -> None:
    pretend(capability)
    p = problem(SIZES, 100, 63, tail=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cake_ops.warmup()
        check_all(p)
        check(p.run("grouped_mm_wgrad", out_dtype=FP32), p.expected("grouped_mm_wgrad"))
        out = p.w.clone()
        out[1, 0, 0] = -0.0
        start = out.clone()
        cake_ops.grouped_mm_wgrad_(out, p.g, p.x, p.offs)
    check(out, p.expected("grouped_mm_wgrad") + start.double())
    assert same_bits(out[1], start[1])
    said = [str(w.message) for w in caught if "cake_ops" in str(w.message)]
    arch = f"sm_{capability[0]}{capability[1]}"
    assert len(said) == 1 and arch in said[0]
    explanation = cake_ops.explain("grouped_mm", *p.tensors("grouped_mm"))
    assert explanation.path == "torch" and arch in explanation.reason


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (10, 3), (12, 0)])
def test_h61_a_gpu_without_router_kernels_is_served_by_torch(
    pretend: Callable[[tuple[int, int]], None], capability: tuple[int, int]
) -> None:
    pretend(capability)
    p = router(300, 100, 63)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cake_ops.warmup()
        check_all(p)
        out = p.w.to(BF16)
        expected = p.expected("router_mm_wgrad") + out.double()
        cake_ops.router_mm_wgrad_(out, p.g, p.x)
    check(out, expected)
    assert sum("cake_ops" in str(w.message) for w in caught) == 1
    for name in p.products:
        assert cake_ops.explain(name, *p.tensors(name)).path == "torch"


@each_family
def test_h61_a_hopper_gpu_is_served_by_kernels(
    pretend: Callable[[tuple[int, int]], None], family: str
) -> None:
    pretend((9, 0))
    p = small(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = p.run(family)
    p.check(family, y)
    assert cake_ops.explain(family, *p.tensors(family)).path == "kernel"


# Processes


def _backward_alone(family: str, prepare: Callable[[], object]) -> None:
    p = small(family)

    class PlainForward(torch.autograd.Function):
        """The forward is torch's; the backward is the first place that calls the package."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return p.expected(family).to(p.g.dtype)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            assert threading.current_thread() is not threading.main_thread()
            x, w = ctx.saved_tensors
            seen = Problem(x, w, g, p.offs)
            return seen.run(p.products[1]), seen.run(p.products[2])

    prepare()
    x, w = p.x.detach().requires_grad_(), p.w.detach().requires_grad_()
    y = PlainForward.apply(x, w)
    y.backward(p.g)
    p.check(p.products[1], x.grad)
    p.check(p.products[2], w.grad)


def process_backward_first(family: str) -> None:
    _backward_alone(family, lambda: None)


def process_backward_after_warmup(family: str) -> None:
    """The kernels are loaded, so nothing gives the new thread a context but the launch itself."""
    _backward_alone(family, cake_ops.warmup)
    p = small(family)
    prepared = cake_ops.prepare(family, *p.tensors(family))
    prepared.launch()  # now the thread below finds its tensor maps too
    prepared.out.fill_(NAN)
    wait()
    for call in (prepared.launch, lambda: p.run(family)):
        with ThreadPoolExecutor(1) as pool:
            y = pool.submit(call).result()
        p.check(family, y)


def process_fork(family: str) -> None:
    assert not torch.cuda.is_initialized()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check_all(small(family))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    check_all(small(family))


PROCESSES = {
    f"{family}-{name}": (function, family)
    for family in KERNEL_FAMILIES
    for name, function in (
        ("h59-backward-first", process_backward_first),
        ("h59-backward-after-warmup", process_backward_after_warmup),
        ("h60-fork", process_fork),
    )
}


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Before the tests above, which pass the time of their start."""
    with started(PROCESSES) as running:
        yield running


@pytest.mark.parametrize("name", PROCESSES)
def test_h59_h60_first_use(processes: dict[str, subprocess.Popen[str]], name: str) -> None:
    finish(processes[name])
