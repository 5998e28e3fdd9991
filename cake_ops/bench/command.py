"""The command line that all benchmarks of a :class:`~.suite.Suite` share: arguments, file, tables."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .devices import CpuDevice, CudaDevice, run_meta
from .progress import minutes
from .records import BASE, Results
from .report import plot, render
from .shapes import MODES, Row, select
from .suite import Suite, run, total_seconds
from .timing import Device

__all__ = ["add_arguments", "can_run", "chosen", "has_folder", "main", "open_device", "pattern"]


def add_arguments(parser: argparse.ArgumentParser, suite: Suite) -> None:
    parser.add_argument("--quick", action="store_true", help="a subset that takes a minute")
    parser.add_argument("--rows", metavar="REGEX", type=pattern, help=suite.rows_help)
    parser.add_argument("--ops", metavar="OP,...", help=f"of {', '.join(suite.ops)}")
    parser.add_argument("--modes", metavar="MODE,...", help=f"of {', '.join(MODES)}")
    parser.add_argument(
        "--arms", metavar="ARM,...", help=f"of {', '.join(suite.arms)}; cake always runs"
    )
    parser.add_argument(
        "--groups", type=int, default=suite.groups, help="paired groups a row (default %(default)s)"
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


def main(args: argparse.Namespace, suite: Suite) -> int:
    arms = chosen(args.arms, suite.arms, "arm") or list(suite.arms)
    arms = [arm for arm in suite.arms if arm == BASE or arm in arms]
    rows = _rows(args, suite)
    if not can_run(rows, args.groups, args.json):
        return 2
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(row.name for row in rows))
        seconds = total_seconds(suite, rows, arms, args.groups)
        print(f"{len(rows)} rows, about {minutes(seconds)} on an H200")
        return 0
    device = open_device(args.device)
    if device is None:
        return 2
    results = Results(run_meta(device), args.json)
    seed = int(time.time()) if args.seed is None else args.seed
    try:
        status = int(run(suite, rows, device, arms, args.groups, seed, results) > 0)
    except KeyboardInterrupt:
        status = 130
        print("\ninterrupted: what follows are the rows finished so far", file=sys.stderr)
    if results.rows:
        print(render(results))
        if args.plot is not None:
            plot(results, args.plot)
    return status


def pattern(text: str) -> re.Pattern[str]:
    """The argument of ``--rows``."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def can_run(rows: Sequence[object], groups: int, json: Path | None) -> bool:
    """Whether there are rows, groups enough and a place for the file; says what is missing."""
    if not rows:
        print("no row matches; --list shows them", file=sys.stderr)
        return False
    if groups < 2:
        print("--groups must be at least 2", file=sys.stderr)
        return False
    return has_folder(json)


def has_folder(path: Path | None) -> bool:
    """Whether the file of ``--json`` can be written; says so if not."""
    if path is None or path.absolute().parent.is_dir():
        return True
    print(f"--json: there is no folder {path.parent}", file=sys.stderr)
    return False


def open_device(kind: str) -> Device | None:
    """The device of ``--device``, or None when there is none, which is said."""
    if kind == "cpu":
        torch.set_num_threads(1)  # threads that wait for a shared core would be all one sees
        return CpuDevice()
    if torch.cuda.is_available():
        return CudaDevice()
    print("no CUDA device; --device cpu runs a smoke test of tiny shapes", file=sys.stderr)
    return None


def chosen(text: str | None, known: Sequence[str], what: str) -> list[str] | None:
    if text is None:
        return None
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if item not in known:
            raise SystemExit(f"unknown {what} {item!r}; there are {', '.join(known)}")
    return items


def _rows(args: argparse.Namespace, suite: Suite) -> list[Row]:
    rows = suite.rows("smoke" if args.device == "cpu" else "quick" if args.quick else "all")
    ops, modes = chosen(args.ops, suite.ops, "op"), chosen(args.modes, MODES, "mode")
    return select(rows, args.rows, ops, modes)
