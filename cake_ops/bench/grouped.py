"""``python -m cake_ops.bench grouped``: the grouped GEMM against its peers, row by row.

For every case the operands are drawn once; for every operation and mode each arm is called, its
outputs are filled with NaN, it is called again and checked against FP64, and only then the arms are
timed side by side (`timing.measure`). An arm that cannot run or is inaccurate is left out with its
reason; if that is cake itself, the row fails and the command ends with status 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import arms as arm_module
from .accuracy import Data, Reference, relative_error
from .arms import ARMS, Arm
from .devices import CpuDevice, CudaDevice, run_meta
from .progress import Progress, minutes
from .records import BASE, Results, row_record
from .report import plot, render
from .shapes import (
    MODES,
    OPS,
    Row,
    estimate_seconds,
    flops,
    large_cases,
    quick_rows,
    rows_of,
    select,
    small_cases,
    smoke_cases,
)
from .timing import Call, Device, host_us, measure

__all__ = ["add_arguments", "main", "run", "run_row"]

HOST_BELOW_US = 2000.0  # host time does not depend on the size: longer calls would only cost time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a subset that takes a minute")
    parser.add_argument(
        "--rows",
        metavar="REGEX",
        help='only rows whose name matches, e.g. "^gate_up" or "E8 .*dgrad, graph"; the families '
        "^gate_up, ^down, ^block and ^small split the whole run into calls of under 8 minutes",
    )
    parser.add_argument("--ops", metavar="OP,...", help=f"of {', '.join(OPS)}")
    parser.add_argument("--modes", metavar="MODE,...", help=f"of {', '.join(MODES)}")
    parser.add_argument("--arms", metavar="ARM,...", help=f"of {', '.join(ARMS)}; cake always runs")
    parser.add_argument("--no-deepgemm", action="store_true", help="leave deepgemm out")
    parser.add_argument(
        "--groups", type=int, default=10, help="paired groups a row (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it after every row")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios")
    parser.add_argument("--seed", type=int, help="of the operands (default: from the clock)")
    parser.add_argument(
        "--list", action="store_true", help="print the rows and the time, then stop"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs tiny shapes through the whole harness as a smoke test",
    )


def main(args: argparse.Namespace) -> int:
    arms = _arms(args)
    rows = _rows(args)
    if not rows:
        print("no row matches; --list shows them", file=sys.stderr)
        return 2
    if args.groups < 2:
        print("--groups must be at least 2", file=sys.stderr)
        return 2
    if args.json is not None and not args.json.absolute().parent.is_dir():
        print(f"--json: there is no folder {args.json.parent}", file=sys.stderr)
        return 2
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(row.name for row in rows))
        print(
            f"{len(rows)} rows, about {minutes(total_seconds(rows, arms, args.groups))} on an H200"
        )
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --device cpu runs a smoke test of tiny shapes", file=sys.stderr)
        return 2
    if args.device == "cuda":
        device: Device = CudaDevice()
    else:
        device = CpuDevice()
        torch.set_num_threads(1)  # threads that wait for a shared core would be all one sees
    results = Results(run_meta(device), args.json)
    seed = int(time.time()) if args.seed is None else args.seed
    try:
        status = int(run(rows, device, arms, args.groups, seed, results) > 0)
    except KeyboardInterrupt:
        status = 130
        print("\ninterrupted: what follows are the rows finished so far", file=sys.stderr)
    if results.rows:
        print(render(results))
        if args.plot is not None:
            plot(results, args.plot)
    return status


def _chosen(text: str | None, known: Sequence[str], what: str) -> list[str] | None:
    if text is None:
        return None
    chosen = [item.strip() for item in text.split(",")]
    for item in chosen:
        if item not in known:
            raise SystemExit(f"unknown {what} {item!r}; there are {', '.join(known)}")
    return chosen


def _arms(args: argparse.Namespace) -> list[str]:
    chosen = _chosen(args.arms, ARMS, "arm") or list(ARMS)
    return [
        arm
        for arm in ARMS
        if arm == BASE or (arm in chosen and not (arm == "deepgemm" and args.no_deepgemm))
    ]


def _rows(args: argparse.Namespace) -> list[Row]:
    if args.device == "cpu":
        rows = rows_of(smoke_cases(), ("eager",))
    elif args.quick:
        rows = quick_rows()
    else:
        rows = rows_of(large_cases() + small_cases())
    ops, modes = _chosen(args.ops, list(OPS), "op"), _chosen(args.modes, MODES, "mode")
    return select(rows, args.rows, ops, modes)


def total_seconds(rows: Sequence[Row], arms: Sequence[str], groups: int) -> float:
    return sum(row_seconds(row, arms, groups) for row in rows)


def row_seconds(row: Row, arms: Sequence[str], groups: int) -> float:
    cuda = torch.device("cuda")
    count = sum(arm_module.eligible(arm, row.case, row.op, cuda) for arm in arms)
    return estimate_seconds(row, count, groups)


def run(
    rows: Sequence[Row],
    device: Device,
    arms: Sequence[str],
    groups: int,
    seed: int,
    results: Results,
) -> int:
    """Run the rows in order into results; return in how many of them cake failed."""
    failures = 0
    progress = Progress([(row.name, row_seconds(row, arms, groups)) for row in rows])
    data = reference = None
    for i, row in enumerate(rows):
        progress.begin(i)
        if data is None or data.case is not row.case:
            data = reference = None  # before the next operands are allocated
            release_memory(device)
            data = Data.random(row.case, device.torch_device, seed + i)
            reference = Reference(data, seed + i)
        try:
            record, detail = run_row(row, device, data, reference, arms, groups)
        except RuntimeError as error:  # the other rows are still worth having
            failures += 1
            print(f"\nFAILED {row.name}: {error}", file=sys.stderr)
            continue
        results.add(record, {**detail, "seed": seed + i})
    progress.end()
    return failures


def release_memory(device: Device) -> None:
    gc.collect()
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()


def run_row(
    row: Row,
    device: Device,
    data: Data,
    reference: Reference,
    arms: Sequence[str],
    groups: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row and its detail, as `Results.add` takes them. Raises when cake cannot run it."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for arm in arms:
        if not arm_module.eligible(arm, row.case, row.op, device.torch_device):
            continue
        try:
            call, outputs_of = _prepared(row, device, arm_module.build(arm, row.op, data))
            errors[arm] = relative_error(
                reference, row.op, outputs_of(), rounded=arm_module.rounded(arm, row.op)
            )
            calls[arm] = call
        except Exception as error:  # a peer may raise anything; its reason is reported
            if arm == BASE:
                raise
            skipped[arm] = (str(error) or repr(error)).splitlines()[0]
    timings, clock_mhz = measure(device, calls, groups)
    us = {arm: timing.us for arm, timing in timings.items()}
    census = {arm: timing.census for arm, timing in timings.items() if device.sees_kernels}
    remarks = [
        f"{arm}: {text}" for arm in calls if (text := arm_module.remark(arm, row.op)) is not None
    ]
    record = row_record(row.case.name, row.op, row.mode, us, errors)
    detail = {
        "flops": flops(row.case, row.op),
        "us": us,
        "census": census,
        "host_us": _host(row, device, calls, us, census),
        "clock_mhz": clock_mhz,
        "skipped": skipped,
        "remarks": remarks,
    }
    return record, detail


def _prepared(
    row: Row, device: Device, arm: Arm
) -> tuple[Call, Callable[[], Mapping[str, Tensor]]]:
    """The call to time, and a function that runs it into poisoned memory for the check.

    In mode eager the outputs are new in every call; filled with NaN and freed, their memory is what
    the allocator hands to the next call of the same sizes.
    """
    if row.mode == "eager":

        def eager() -> Mapping[str, Tensor]:
            _poison(arm())
            return arm()

        return arm, eager

    replay, outputs = device.capture(arm)

    def graph() -> Mapping[str, Tensor]:
        _poison(outputs)
        replay()
        return outputs

    return replay, graph


def _poison(outputs: Mapping[str, Tensor]) -> None:
    for output in outputs.values():
        output.fill_(float("nan"))


def _host(
    row: Row,
    device: Device,
    calls: dict[str, Call],
    us: Mapping[str, Sequence[float]],
    census: Mapping[str, Mapping[str, int]],
) -> dict[str, float]:
    """Host microseconds of an eager call by arm; empty where the row does not measure it."""
    longest = max(statistics.median(times) for times in us.values())
    if row.mode != "eager" or longest > HOST_BELOW_US:
        return {}
    launches = max((sum(kernels.values()) for kernels in census.values()), default=1)
    count = min(200, 900 // launches, int(20e3 / longest))
    return host_us(device, calls, calls=max(1, count))
