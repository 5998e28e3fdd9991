"""What the tests of the CUDA backend share: problems, waiting with a limit, kernel names, processes."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference
import torch
from forms import CANARY, NAN, assert_close, select
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import cake_ops

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = torch.device("cuda")
GROUPED_PRODUCTS = ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")
ROUTER_PRODUCTS = ("router_mm", "router_mm_dgrad", "router_mm_wgrad")
KERNEL_FAMILIES = ("grouped_mm", "router_mm")  # those with kernels of their own
KERNEL_PRODUCTS = (*GROUPED_PRODUCTS, *ROUTER_PRODUCTS)

# Hopper's tensor cores truncate their FP32 sums: 3.2e-6 after 6144 terms of zero mean on an H200.
FP32_SUMS = 1e-5
ROUTER_TOLERANCE = 5e-7  # of every FP32 result of the router, as its module says

SIZES = [97, 0, 64, 1, 138]
OTHER_SIZES = ([0, 300, 0, 0, 0], [60, 60, 60, 60, 60], [0, 0, 0, 0, 0], [1, 2, 290, 3, 4], SIZES)


def settled_memory() -> int:
    """GPU memory in use, when what other tests left to the garbage collector is gone."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


class Problem(NamedTuple):
    """The tensors of one grouped GEMM, or without ``offs`` those of one router GEMM, on the GPU."""

    x: Tensor
    w: Tensor
    g: Tensor
    offs: Tensor | None = None

    @property
    def products(self) -> tuple[str, str, str]:
        """The forward, the data gradient and the weight gradient."""
        return ROUTER_PRODUCTS if self.offs is None else GROUPED_PRODUCTS

    @property
    def present(self) -> tuple[Tensor, ...]:
        return self[:3] if self.offs is None else self

    def tensors(self, name: str) -> tuple[Tensor, ...]:
        return select(name, *self.present)

    def run(self, name: str, **options: Any) -> Tensor:
        return getattr(cake_ops, name)(*self.tensors(name), **options)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """The forward of other operands, such as leaves of autograd."""
        return getattr(cake_ops, self.products[0])(x, w, *self.present[3:])

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """y, dx and dw of a forward and backward pass."""
        x, w = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()
        y = self.forward(x, w)
        return (y.detach(), *torch.autograd.grad(y, (x, w), self.g))

    def renew(self, sizes: list[int]) -> None:
        """Other values and other offsets in the same memory."""
        for t in (self.x, self.w, self.g):
            t.normal_()
        if self.offs is not None:
            self.offs.copy_(reference.offsets(sizes))

    def expected(self, name: str) -> Tensor:
        return reference.PRODUCTS[name](*self.tensors(name))

    @property
    def fp32_bound(self) -> float:
        return ROUTER_TOLERANCE if self.offs is None else FP32_SUMS

    def check(self, name: str, actual: Tensor) -> None:
        check(actual, self.expected(name), self.fp32_bound)

    def check_step(self, results: tuple[Tensor, ...]) -> None:
        for name, result in zip(self.products, results, strict=True):
            self.check(name, result)


def problem(sizes: list[int], n: int, k: int, tail: int = 0, device: Any = None) -> Problem:
    """Random operands, and NaN in the ``tail`` rows that belong to no group."""
    device = DEVICE if device is None else device
    rows = sum(sizes)
    x = torch.randn(rows + tail, k, device=device, dtype=BF16)
    g = torch.randn(rows + tail, n, device=device, dtype=BF16)
    w = torch.randn(len(sizes), n, k, device=device, dtype=BF16)
    x[rows:], g[rows:] = NAN, NAN
    return Problem(x, w, g, reference.offsets(sizes, device))


def router(
    tokens: int,
    experts: int,
    hidden: int,
    x_dtype: torch.dtype = FP32,
    w_dtype: torch.dtype = FP32,
    g_dtype: torch.dtype = FP32,
    device: Any = None,
) -> Problem:
    """Random operands of the router."""
    device = DEVICE if device is None else device
    return Problem(
        torch.randn(tokens, hidden, device=device).to(x_dtype),
        torch.randn(experts, hidden, device=device).to(w_dtype),
        torch.randn(tokens, experts, device=device).to(g_dtype),
    )


def small(family: str, device: Any = None) -> Problem:
    """300 rows, N = 136, K = H = 72: what every kernel reads and writes in place."""
    if family == "router_mm":
        return router(300, 136, 72, device=device)
    return problem(SIZES, 136, 72, device=device)


def small_of(name: str) -> Problem:
    return small(name.partition("_mm")[0] + "_mm")


def bordered(shape: torch.Size, dtype: torch.dtype, value: float = CANARY) -> tuple[Tensor, Tensor]:
    """A buffer of ``value``, and a view with eight rows and columns of it on every side."""
    buffer = torch.full((*shape[:-2], shape[-2] + 16, shape[-1] + 16), value, device=DEVICE)
    buffer = buffer.to(dtype)
    return buffer, buffer[..., 8:-8, 8:-8]


def assert_borders(buffer: Tensor) -> None:
    border = buffer.clone()
    border[..., 8:-8, 8:-8] = CANARY
    assert (border == CANARY).all()


def wait(seconds: float = 30) -> None:
    """Waits for the current stream. A kernel that hangs ends the session, for nothing can run after it."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > deadline:
            pytest.exit(f"the GPU has not finished after {seconds} s: a kernel hangs", returncode=1)
        time.sleep(1e-4)


def assert_repeats(
    run: Callable[[], Tensor], other_work: Callable[[], object], busy: bool
) -> Tensor:
    """Has 500 runs give the same bits, with ``other_work`` and frees in between and, if ``busy``, another stream
    that keeps the SMs busy. Returns the first result."""
    first = run()
    bits = torch.int16 if first.element_size() == 2 else torch.int32
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    other, square = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=BF16)
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(500):
        if busy:
            with torch.cuda.stream(other):
                torch.mm(square, square)
        other_work()
        differs |= (run().view(bits) != first.view(bits)).any()
    wait()
    torch.cuda.current_stream().wait_stream(other)
    assert not differs
    return first


def check(actual: Tensor, expected: Tensor, fp32_bound: float = FP32_SUMS) -> None:
    """Waits with a limit, then compares with an FP64 reference; a weight gradient expert by expert."""
    wait()
    bound = fp32_bound if actual.dtype == FP32 else reference.tolerance(actual.dtype)
    assert_close(actual, expected, bound)
    if actual.dim() == 3 and actual.numel():  # a large group must not hide the error of a small one
        difference = (actual.double() - expected).abs().amax((1, 2))
        assert (difference <= bound * expected.abs().amax((1, 2))).all()


def check_all(p: Problem) -> None:
    """The three products of ``p``."""
    for name in p.products:
        p.check(name, p.run(name))


def kernels(function: Callable[[], object]) -> list[str]:
    """The names of everything that runs on the GPU during ``function``, in order of start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        function()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == DeviceType.CUDA]
    if not events:
        pytest.skip("the profiler sees no kernels on this machine")
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


GEMM_KERNEL = re.compile(r"sm90_(?:grouped|router)_gemm_(nt|nn|tn|wgrad)_")


def gemms(function: Callable[[], object]) -> list[str]:
    """The passes ("fwd", "dgrad", "wgrad") of the package's kernels that run during ``function``.

    A weight of the grouped GEMM must be stored [E, N, K]: the layout tells the pass.
    """
    layouts = {"nt": "fwd", "nn": "dgrad", "tn": "wgrad", "wgrad": "wgrad"}
    matches = map(GEMM_KERNEL.match, kernels(function))
    return [layouts[match[1]] for match in matches if match]


def start(function: Callable[..., None], *arguments: str) -> subprocess.Popen[str]:
    """Runs a function of a test module in a fresh process, where it is the first to use CUDA."""
    module = Path(function.__code__.co_filename).stem
    return subprocess.Popen(
        [sys.executable, "-c", f"import {module} as m; m.{function.__name__}(*{arguments})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def started(
    calls: dict[str, tuple[Callable[..., None], str]],
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The processes of all calls, by name: all at once, for most of their time is the import of torch."""
    running = {name: start(*call) for name, call in calls.items()}
    yield running
    for process in running.values():
        process.kill()


def finish(process: subprocess.Popen[str], seconds: float = 100) -> str:
    """The output of a process that must end well and in time."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"no end after {seconds} s:\n{output}")
    assert process.returncode == 0, output
    return output
