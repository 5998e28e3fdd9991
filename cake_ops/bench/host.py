"""``python -m cake_ops.bench host``: what one eager call costs on the host.

Without a GPU the launches are replaced by ones that only allocate (`cake_ops.testing.null_kernels`):
what remains is the way to a launch, autograd and the allocation. The arm torch.ops.cake takes the
dispatcher, as the public functions do where the eager fast path does not apply. The yardstick is torch.mm of 2 x 2
matrices. With a CUDA device the real kernels are compared as well, with torch._grouped_mm and torch.mm
of the same sizes, the router's with torch.mm in FP32, and the parts of a call of either are timed one by
one (`breakdown`).

A host's speed drifts, and one that is shared has slow phases of seconds: beside an H200 some took 1.7
times as long for pure Python. So all arms of all modes of a section take turns in many short rounds. A
budget is judged by the median of the rounds' ratios, as a phase slows both sides of a round. Beside it
stand the undisturbed times, those that a tenth of the rounds undercut, and their ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cake_ops
from cake_ops.testing import null_kernels

from .breakdown import breakdown, timed_parts, undisturbed
from .command import has_folder
from .devices import CpuDevice, CudaDevice, run_meta
from .timing import arm_order

__all__ = ["Budget", "add_arguments", "judge", "main", "rounds_us"]

Call = tuple[Callable[..., object], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Budget:
    """An upper bound of cake's time over a yardstick's in one process, and what to aim at."""

    yardstick: str
    limit: float
    goal: float | None = None


# Null kernels on a CPU, and real ones on an H200; with grad means a forward call that builds a graph.
NULL_BUDGETS = {"no grad": Budget("torch.mm", 4.5), "grad": Budget("torch.mm", 5.0)}
CUDA_BUDGETS = {
    "no grad": Budget("torch._grouped_mm", 0.65, 0.5),
    "grad": Budget("torch._grouped_mm", 0.8, 0.6),
}
ROUTER_BUDGETS = dict.fromkeys(("fwd", "dgrad", "wgrad"), Budget("torch.mm", 1.0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # A round must stay under the 1024 launches that CUDA queues: torch._grouped_mm makes two a call.
    parser.add_argument("--rounds", type=int, default=300, help="default %(default)s")
    parser.add_argument("--calls", type=int, default=100, help="a round (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with 1 past a budget")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def main(args: argparse.Namespace) -> int:
    if not has_folder(args.json):
        return 2
    cuda = torch.cuda.is_available()
    print(f"torch {torch.__version__}, cake_ops {cake_ops.__version__}, host us a call")
    print(f"{args.rounds} rounds of {args.calls} calls: medians, and undisturbed times below them")
    print("\nnull kernels on the CPU")
    with null_kernels():
        rows = _report("null kernels", null_cases(), NULL_BUDGETS, args)
    parts: dict[str, dict[str, float]] = {}
    if cuda:
        name = torch.cuda.get_device_name()
        print(f"\nreal kernels on {name}: E 8, M 512, N 512, K 512")
        rows += _report("grouped", cuda_cases(), CUDA_BUDGETS, args, torch.cuda.synchronize)
        parts |= _report_breakdown("grouped_mm", cuda_cases()["no grad"]["cake"][1], args)
        print("\nFP32 router: T 64, H 1024, N 256, no grad")
        rows += _report("router", router_cases(), ROUTER_BUDGETS, args, torch.cuda.synchronize)
        parts |= _report_breakdown("router_mm", router_cases()["fwd"]["cake"][1], args)
    if args.json is not None:
        meta = run_meta(CudaDevice() if cuda else CpuDevice())
        document = {"meta": meta, "rows": rows, "breakdown": parts}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(args.check and not all(row["within"] for row in rows))


def null_cases() -> dict[str, dict[str, Call]]:
    """Arms by mode, on tensors so small that allocation and dispatch are all there is."""
    cases = {}
    for mode in NULL_BUDGETS:
        grad = mode == "grad"
        a, b = (torch.randn(2, 2, requires_grad=grad) for _ in range(2))
        x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=grad)
        w = torch.randn(2, 8, 8, dtype=torch.bfloat16, requires_grad=grad)
        offs = torch.tensor([2, 4], dtype=torch.int32)
        cases[mode] = {
            "cake": (cake_ops.grouped_mm, (x, w, offs)),
            "torch.ops.cake": (torch.ops.cake.grouped_mm, (x, w, offs)),
            "torch.mm": (torch.mm, (a, b)),
        }
    return cases


def cuda_cases() -> dict[str, dict[str, Call]]:
    """Arms by mode with the real kernels, on a problem that the GPU finishes before the host.

    torch._grouped_mm wants its weight as [E, K, N]: the view is made once, outside the calls.
    """
    experts, m, n, k = 8, 512, 512, 512
    cases = {}
    for mode in CUDA_BUDGETS:
        grad = mode == "grad"

        def normal(*shape: int, grad: bool = grad) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

        x, w, w_mm = normal(m, k), normal(experts, n, k), normal(k, n)
        offs = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (m // experts)
        cases[mode] = {
            "cake": (cake_ops.grouped_mm, (x, w, offs)),
            "torch.ops.cake": (torch.ops.cake.grouped_mm, (x, w, offs)),
            "torch._grouped_mm": (torch._grouped_mm, (x, w.transpose(-2, -1), offs)),
            "torch.mm": (torch.mm, (x, w_mm)),
        }
    return cases


def router_cases(device: str = "cuda") -> dict[str, dict[str, Call]]:
    """Arms by pass of the FP32 router; torch.mm is given the transposed views, made once."""
    tokens, hidden, experts = 64, 1024, 256
    x, w, g = (
        torch.randn(*shape, device=device)
        for shape in ((tokens, hidden), (experts, hidden), (tokens, experts))
    )
    return {
        "fwd": {"cake": (cake_ops.router_mm, (x, w)), "torch.mm": (torch.mm, (x, w.t()))},
        "dgrad": {"cake": (cake_ops.router_mm_dgrad, (g, w)), "torch.mm": (torch.mm, (g, w))},
        "wgrad": {"cake": (cake_ops.router_mm_wgrad, (g, x)), "torch.mm": (torch.mm, (g.t(), x))},
    }


def rounds_us(
    arms: Mapping[Any, Call],
    calls: int,
    rounds: int,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[Any, list[float]]:
    """Microseconds of one call by arm, a figure per round; the arms take turns inside a round."""
    for fn, tensors in arms.values():
        for _ in range(min(calls, 100)):  # caches, lazily loaded kernels
            fn(*tensors)
    us: dict[Any, list[float]] = {name: [] for name in arms}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(rounds):
            for name in arm_order(list(arms), i):
                fn, tensors = arms[name]
                synchronize()
                begin = time.perf_counter()
                for _ in repeat(None, calls):
                    fn(*tensors)
                us[name].append((time.perf_counter() - begin) / calls * 1e6)
    finally:
        synchronize()
        if collecting:
            gc.enable()
    return us


def judge(us: Mapping[str, Sequence[float]], budget: Budget) -> tuple[float, bool]:
    """cake's median ratio to the budget's yardstick, and whether it is within the limit."""
    pairs = zip(us["cake"], us[budget.yardstick], strict=True)
    ratio = statistics.median(cake / yardstick for cake, yardstick in pairs)
    return ratio, ratio <= budget.limit


def _report(
    section: str,
    cases: Mapping[str, Mapping[str, Call]],
    budgets: Mapping[str, Budget],
    args: argparse.Namespace,
    synchronize: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Print two lines per mode, and return what they say."""
    arms = {(mode, arm): call for mode, calls in cases.items() for arm, call in calls.items()}
    measured = rounds_us(arms, args.calls, args.rounds, synchronize)
    rows = []
    for mode, calls in cases.items():
        us = {arm: measured[mode, arm] for arm in calls}
        budget = budgets[mode]
        ratio, within = judge(us, budget)
        goal = "" if budget.goal is None else f", goal {budget.goal:.2f}"
        verdict = f" ({'within' if within else 'OVER'} the budget of {budget.limit:.2f}{goal})"
        medians = {arm: statistics.median(times) for arm, times in us.items()}
        least = {arm: undisturbed(times) for arm, times in us.items()}
        print(f"  {mode:8}", _line(medians, budget, ratio) + verdict)
        print(f"  {'':8}", _line(least, budget, least["cake"] / least[budget.yardstick]))
        rows.append(
            {
                "section": section,
                "mode": mode,
                "median_us": medians,
                "undisturbed_us": least,
                "yardstick": budget.yardstick,
                "ratio": ratio,
                "limit": budget.limit,
                "within": within,
            }
        )
    return rows


def _line(us: Mapping[str, float], budget: Budget, ratio: float) -> str:
    times = ", ".join(f"{arm} {time_us:.2f}" for arm, time_us in us.items())
    return f"{times}; cake / {budget.yardstick} {ratio:.2f}"


def _report_breakdown(
    op: str, tensors: tuple[Tensor, ...], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Print where an eager call's host time goes, if the device has kernels of ours, and return it by ``op``."""
    if cake_ops.explain(op, *tensors).path != "kernel":
        return {}
    parts, held = timed_parts(op, tensors)
    shares = breakdown(rounds_us(parts, args.calls, args.rounds, torch.cuda.synchronize))
    del held
    print(f"  of a call of {op} without grad, undisturbed:")
    for part, time_us in shares.items():
        print(f"    {part:16} {time_us:6.2f}")
    return {op: shares}
