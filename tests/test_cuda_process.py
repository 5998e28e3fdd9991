"""Where the CUDA backend runs: first uses in threads and processes, several GPUs, GPUs without kernels.

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
import reference
import torch
from forms import NAN, assert_close, same_bits
from gpu import BF16, PRODUCTS, check, check_all, finish, problem, start, wait
from torch import Tensor

import cake_ops
from cake_ops.cuda import fallback
from cake_ops.cuda.device import no_kernels_reason

pytestmark = pytest.mark.gpu

SIZES = [97, 0, 64, 1, 138]


@pytest.mark.parametrize("current, used", [(0, 1), (1, 0)])
def test_h58_operands_decide_the_device(current: int, used: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(current):
        p = problem(SIZES, 136, 72, device=f"cuda:{used}")
        for name in PRODUCTS:
            y = p.run(name)
            assert y.device == p.x.device and torch.cuda.current_device() == current
            assert_close(y, p.expected(name))
        x, w = p.x.requires_grad_(), p.w.requires_grad_()
        cake_ops.grouped_mm(x, w, p.offs).backward(p.g)
        assert x.grad.device == w.grad.device == x.device
        with pytest.raises(RuntimeError, match="all tensors must be on one device"):
            cake_ops.grouped_mm(p.x, p.w.detach().to(f"cuda:{current}"), p.offs)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Makes the GPU claim another compute capability."""

    def forget() -> None:
        no_kernels_reason.cache_clear()
        fallback._announce.cache_clear()
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
        check(p.run("grouped_mm_wgrad", out_dtype=torch.float32), p.expected("grouped_mm_wgrad"))
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


def test_h61_a_hopper_gpu_is_served_by_kernels(
    pretend: Callable[[tuple[int, int]], None],
) -> None:
    pretend((9, 0))
    p = problem(SIZES, 136, 72)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = p.run("grouped_mm")
    check(y, p.expected("grouped_mm"))
    assert cake_ops.explain("grouped_mm", *p.tensors("grouped_mm")).path == "kernel"


# Processes


def _backward_alone(prepare: Callable[[], object]) -> None:
    class PlainForward(torch.autograd.Function):
        """The forward is torch's; the backward is the first place that calls the package."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
            ctx.save_for_backward(x, w, offs)
            return reference.grouped_mm(x, w, offs).to(BF16)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
            assert threading.current_thread() is not threading.main_thread()
            x, w, offs = ctx.saved_tensors
            dx = cake_ops.grouped_mm_dgrad(g, w, offs)
            return dx, cake_ops.grouped_mm_wgrad(g, x, offs), None

    p = problem(SIZES, 136, 72)
    prepare()
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    y = PlainForward.apply(x, w, p.offs)
    y.backward(p.g)
    check(x.grad, p._replace(x=x.detach(), w=w.detach()).expected("grouped_mm_dgrad"))
    check(w.grad, p._replace(x=x.detach(), w=w.detach()).expected("grouped_mm_wgrad"))


def process_backward_is_the_first_call() -> None:
    _backward_alone(lambda: None)


def process_backward_after_a_warmup() -> None:
    """The kernels are loaded, so nothing gives the new thread a context but the launch itself."""
    _backward_alone(cake_ops.warmup)
    p = problem(SIZES, 72, 136)
    prepared = cake_ops.prepare("grouped_mm", *p.tensors("grouped_mm"))
    prepared.launch()  # now the thread below finds its tensor maps too
    prepared.out.fill_(NAN)
    wait()
    for call in (prepared.launch, lambda: p.run("grouped_mm")):
        with ThreadPoolExecutor(1) as pool:
            y = pool.submit(call).result()
        check(y, p.expected("grouped_mm"))


def process_fork() -> None:
    assert not torch.cuda.is_initialized()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check_all(problem(SIZES, 136, 72))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    check_all(problem(SIZES, 136, 72))


PROCESSES = {
    "h59-backward-first": process_backward_is_the_first_call,
    "h59-backward-after-warmup": process_backward_after_a_warmup,
    "h60-fork": process_fork,
}


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once, and before the tests above: most of their time is the import of torch."""
    running = {name: start(function) for name, function in PROCESSES.items()}
    yield running
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("name", PROCESSES)
def test_h59_h60_first_use(processes: dict[str, subprocess.Popen[str]], name: str) -> None:
    finish(processes[name])
