"""The arms of the router benchmark: what each library is asked to do, with equal work for all.

A library is a function for each pass; one call of an operation runs the passes of the operation one after
the other, whatever the library. Every pass allocates its own result.

cake         cake_ops.router_mm, router_mm_dgrad, router_mm_wgrad
cake-nondet  the same with deterministic=False
control      cake once more: its ratio to cake is the noise of the measurement
torch        torch.mm in FP32, TF32 off
cublas       cublasSgemm called directly
cublaslt     the fastest FP32 algorithm that cuBLASLt's heuristics propose for the product, found by timing
             them all on the row's operands
tf32, bf16   torch.mm with TF32 on, and of operands cast to BF16 beforehand: for information, they are not
             as accurate
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import cake_ops

from .arms import Arm, Unavailable
from .cublas import Algorithm, Lt, Sgemm
from .router_cases import OPS, PASSES, RouterData, measure_outputs
from .timing import Device, measure

__all__ = ["ARMS", "Libraries", "fp32_precision", "tf32_mm", "tolerance"]

ARMS = ("cake", "cake-nondet", "control", "torch", "cublas", "cublaslt", "tf32", "bf16")

FP32_BOUND = 2e-6  # the budget of an FP32 router
CHOICE_GROUPS = 3

Pass = Callable[[], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def fp32_precision(setting: str) -> Iterator[None]:
    """torch's precision of FP32 products, "highest" or "high" (TF32), while the context is open."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def tolerance(arm: str) -> float:
    """Largest relative Frobenius error at which an arm is still timed."""
    return {"tf32": 2e-3, "bf16": 1e-2}.get(arm, FP32_BOUND)


def tf32_mm(a: Tensor, b: Tensor) -> Tensor:
    with fp32_precision("high"):
        return torch.mm(a, b)


class Libraries:
    """The libraries of one device, and which algorithms of cuBLASLt were chosen for its cases.

    choices says in words what was chosen, by case and pass.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sgemm: Sgemm | None = None
        self._lt: Lt | None = None
        self._chosen: dict[str, Algorithm] = {}
        self.choices: dict[str, str] = {}

    def build(self, arm: str, op: str, data: RouterData) -> Arm:
        """One call of an operation by an arm: a function of no arguments that returns its outputs."""
        passes = {name: self._pass(arm, name, data) for name in dict.fromkeys(OPS[op])}
        if op == "2fwd+bwd":
            fwd, dgrad, wgrad = passes.values()
            return lambda: {"y": fwd(), "y again": fwd(), "dx": dgrad(), "dw": wgrad()}
        calls = tuple(zip(_outputs(op), passes.values(), strict=True))
        return lambda: {output: call() for output, call in calls}

    def _pass(self, arm: str, name: str, data: RouterData) -> Pass:
        if arm in ("cake", "control", "cake-nondet"):
            return _cake(name, data, deterministic=arm != "cake-nondet")
        a, b = data.operands(name)
        if arm == "bf16":
            a, b = (t.bfloat16() for t in (a, b))
        product = self._product(arm, name, data)
        return lambda: product(a, b)

    def _product(self, arm: str, name: str, data: RouterData) -> Product:
        if arm in ("torch", "bf16"):
            return torch.mm
        if arm == "tf32":
            return tf32_mm
        if self._device.torch_device.type != "cuda":
            raise Unavailable(f"{arm} needs a CUDA device")
        if arm == "cublas":
            self._sgemm = self._sgemm or Sgemm(self._device.torch_device)
            return self._sgemm
        key = f"{data.case.name} {name}"
        if key not in self._chosen:
            self._lt = self._lt or Lt(self._device.torch_device)
            algorithms = self._lt.algorithms(*data.operands(name))
            self._chosen[key], self.choices[key] = fastest(self._device, name, data, algorithms)
        return self._chosen[key]


def fastest(
    device: Device, name: str, data: RouterData, algorithms: list[Algorithm]
) -> tuple[Algorithm, str]:
    """The fastest of the algorithms that run and are accurate, and how it was chosen in words."""
    a, b = data.operands(name)
    output = _outputs(name)[0]
    calls: dict[str, Callable[[], Tensor]] = {}
    for i, algorithm in enumerate(algorithms):
        try:
            algorithm(a, b).fill_(float("nan"))  # the next call finds this memory
            measure_outputs(data, {output: algorithm(a, b)}, FP32_BOUND)
        except RuntimeError:  # it does not run on these operands, or is not FP32 accurate
            continue
        calls[str(i)] = lambda algorithm=algorithm: algorithm(a, b)
    if not calls:
        raise Unavailable(f"cuBLASLt proposes no FP32 algorithm for {name}")
    timings, _ = measure(device, calls, CHOICE_GROUPS)
    us = {i: statistics.median(timing.us) for i, timing in timings.items()}
    best = min(us, key=us.__getitem__)
    first = next(iter(us))
    choice = (
        f"{algorithms[int(best)].problem.compute} proposal {best} of {len(algorithms)} at {us[best]:.2f} us; "
        f"proposal {first} at {us[first]:.2f} us"
    )
    return algorithms[int(best)], choice


def _outputs(op: str) -> list[str]:
    names = dict(zip(PASSES, ("y", "dx", "dw"), strict=True))
    return [names[name] for name in OPS[op]]


def _cake(name: str, data: RouterData, *, deterministic: bool) -> Pass:
    x, w, g = data.x, data.w, data.g
    if name == "fwd":
        return lambda: cake_ops.router_mm(x, w, deterministic=deterministic)
    if name == "dgrad":
        return lambda: cake_ops.router_mm_dgrad(g, w, deterministic=deterministic)
    return lambda: cake_ops.router_mm_wgrad(g, x, deterministic=deterministic)
