"""``python -m cake_ops.bench merge``: join the JSON files of runs that each measured some rows.

A row is kept as it was measured, never assembled from two runs, and runs of different GPUs or versions
are not joined. With one file it prints that file's tables again, or draws its picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .records import Results
from .report import plot, render

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the joined rows")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios")


def main(args: argparse.Namespace) -> int:
    results = Results.load(args.files[0])
    for path in args.files[1:]:
        try:
            replaced = results.update(Results.load(path))
        except RuntimeError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        for row in replaced:
            print(f"measured again in {path}, which is kept: {row}", file=sys.stderr)
    if args.json is not None:
        results.path = args.json
        results.save()
    print(render(results))
    if args.plot is not None:
        plot(results, args.plot)
    return 0
