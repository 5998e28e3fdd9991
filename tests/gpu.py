"""What the tests of the CUDA backend share: problems, waiting with a limit, kernel names, processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference
import torch
from forms import NAN, assert_close, select
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import cake_ops

BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
PRODUCTS = ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")

# Hopper's tensor cores truncate their FP32 sums: 3.2e-6 after 6144 terms of zero mean on an H200.
FP32_SUMS = 1e-5


class Problem(NamedTuple):
    """The tensors of one grouped GEMM on the GPU."""

    x: Tensor
    w: Tensor
    g: Tensor
    offs: Tensor

    def tensors(self, name: str) -> tuple[Tensor, ...]:
        return select(name, *self)

    def run(self, name: str, **options: Any) -> Tensor:
        return getattr(cake_ops, name)(*self.tensors(name), **options)

    def expected(self, name: str) -> Tensor:
        return reference.PRODUCTS[name](*self.tensors(name))


def problem(sizes: list[int], n: int, k: int, tail: int = 0, device: Any = None) -> Problem:
    """Random operands, and NaN in the ``tail`` rows that belong to no group."""
    device = DEVICE if device is None else device
    rows = sum(sizes)
    x = torch.randn(rows + tail, k, device=device, dtype=BF16)
    g = torch.randn(rows + tail, n, device=device, dtype=BF16)
    w = torch.randn(len(sizes), n, k, device=device, dtype=BF16)
    x[rows:], g[rows:] = NAN, NAN
    return Problem(x, w, g, reference.offsets(sizes, device))


def wait(seconds: float = 30) -> None:
    """Waits for the current stream. A kernel that hangs ends the session, for nothing can run after it."""
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > deadline:
            pytest.exit(f"the GPU has not finished after {seconds} s: a kernel hangs", returncode=1)
        time.sleep(1e-4)


def check(actual: Tensor, expected: Tensor) -> None:
    """Waits with a limit, then compares with an FP64 reference; a weight gradient expert by expert."""
    wait()
    fp32 = actual.dtype == torch.float32
    bound = FP32_SUMS if fp32 else reference.tolerance(actual.dtype)
    assert_close(actual, expected, bound)
    if actual.dim() == 3 and actual.numel():  # a large group must not hide the error of a small one
        difference = (actual.double() - expected).abs().amax((1, 2))
        assert (difference <= bound * expected.abs().amax((1, 2))).all()


def check_all(p: Problem) -> None:
    """The three products of ``p``."""
    for name in PRODUCTS:
        check(p.run(name), p.expected(name))


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


def grouped_kernels(function: Callable[[], object]) -> list[str]:
    """The layouts ("nt", "nn", "wgrad") of the grouped kernels that run during ``function``."""
    prefix = "sm90_grouped_gemm_"
    names = (name for name in kernels(function) if name.startswith(prefix))
    return [name.removeprefix(prefix).split("_")[0] for name in names]


def start(function: Callable[[], None]) -> subprocess.Popen[str]:
    """Runs a function of a test module in a fresh process, where it is the first to use CUDA."""
    module = Path(function.__code__.co_filename).stem
    return subprocess.Popen(
        [sys.executable, "-c", f"import {module} as m; m.{function.__name__}()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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
