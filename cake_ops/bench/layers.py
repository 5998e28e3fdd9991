"""``python -m cake_ops.bench layers``: MoE layers of transformers on cake against transformers' own.

A layer is transformers' block (router and experts) in BF16, with the shapes of a published model and
random weights; a call is its forward and its backward to the tokens and all weights. The arms share the
weights and differ in ``experts_implementation`` alone: cake, cake again as the control, transformers'
grouped_mm (``torch.nn.functional.grouped_mm``) and its eager loop over the experts. Modes are eager,
graph (the call captured by hand) and compile (``torch.compile(mode="reduce-overhead")``). The eager
loop reads the routing on the host, so it has mode eager alone.

Before anything is timed, the second of two calls (the first one's results filled with NaN) is compared
with an FP64 computation that takes the routing from the layer's own router. Times are GPU intervals from the
first kernel to the last (`timing.measure`): where the host makes the GPU wait inside a call, that counts.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import command
from .devices import run_meta
from .layer_data import LAYERS, TINY, Data, Layer, Outputs
from .progress import Progress
from .records import BASE, META_KEYS, Results, row_record
from .suite import poison, release_memory
from .timing import Call, Device, measure

__all__ = ["ARMS", "Row", "add_arguments", "main", "render", "rows"]

ARMS = {"cake": "cake", "control": "cake", "grouped_mm": "grouped_mm", "eager": "eager"}
MODES = ("eager", "graph", "compile")
OP = "fwd+bwd"
LEGEND = (
    "time ratio: an arm's time over cake's, median [min, max] over paired groups; above 1 cake is "
    "faster. control is cake again. peak: memory of a call beside weights and input."
)
HEADING = (
    f"  {'':10} {'ms':>8} {'tokens/s':>10} {'TFLOP/s':>8} {'peak GiB':>8} {'error':>8}  time ratio"
)


@dataclass(frozen=True)
class Row:
    layer: Layer
    tokens: int
    mode: str

    @property
    def shape(self) -> str:
        return f"{self.layer.name}, {self.tokens} tokens"

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.mode}"

    @property
    def seconds(self) -> float:
        """About how long it takes on an H200."""
        return {"eager": 6.0, "graph": 4.0, "compile": 25.0}[self.mode]


def rows(
    pattern: str | re.Pattern[str] | None = None, *, quick: bool = False, tiny: bool = False
) -> list[Row]:
    """Rows whose name matches; without a pattern all but compile at the larger size."""
    layers, sizes = (TINY, (40,)) if tiny else (LAYERS, (8192, 32768))
    every = [Row(*row) for row in _product(layers, sizes, MODES[:1] if tiny else MODES)]
    if quick:
        every = [row for row in every if row.tokens == sizes[0] and row.mode != "compile"]
    if pattern is not None:
        return [row for row in every if re.search(pattern, row.name)]
    return [row for row in every if row.mode != "compile" or row.tokens == sizes[0]]


def _product(layers: Iterable[Layer], sizes: Iterable[int], modes: Iterable[str]) -> list[Any]:
    return [(layer, size, mode) for layer in layers for size in sizes for mode in modes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="8192 tokens, eager and graph")
    parser.add_argument(
        "--rows",
        metavar="REGEX",
        type=command.pattern,
        help='only rows whose name matches, e.g. "Mixtral.*graph"; the rows "32768.*compile" run '
        "only so",
    )
    parser.add_argument(
        "--groups", type=int, default=6, help="paired groups a row (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it after every row")
    parser.add_argument("--seed", type=int, help="of the data (default: from the clock)")
    parser.add_argument("--list", action="store_true", help="print the rows, then stop")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs tiny layers through the whole harness as a smoke test",
    )


def main(args: argparse.Namespace) -> int:
    chosen = rows(args.rows, quick=args.quick, tiny=args.device == "cpu")
    if not command.can_run(chosen, args.groups, args.json):
        return 2
    if args.list:
        print("\n".join(row.name for row in chosen))
        return 0
    from ..integrations.transformers import register

    try:
        register()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    device = command.open_device(args.device)
    if device is None:
        return 2
    versions = {"versions": {"transformers": importlib.metadata.version("transformers")}}
    results = Results(run_meta(device) | versions, args.json)
    torch.manual_seed(int(time.time()) if args.seed is None else args.seed)
    try:
        status = int(run(chosen, device, args.groups, results) > 0)
    except KeyboardInterrupt:
        status = 130
        print("\ninterrupted: what follows are the rows finished so far", file=sys.stderr)
    print(render(results))
    return status


def run(chosen: list[Row], device: Device, groups: int, results: Results) -> int:
    """Run the rows in order into results; return in how many of them cake failed."""
    failures = 0
    progress = Progress([(row.name, row.seconds) for row in chosen])
    data = None
    for i, row in enumerate(chosen):
        progress.begin(i)
        if data is None or (data.layer, data.tokens) != (row.layer, row.tokens):
            data = None  # before the next weights are allocated
            _release(device)
            data = Data(row.layer, row.tokens, set(ARMS.values()), device.torch_device)
        try:
            results.add(*run_row(row, device, data, groups))
        except (RuntimeError, AssertionError) as error:  # other rows are still worth having
            failures += 1
            print(f"\nFAILED {row.name}: {error!r}", file=sys.stderr)
        _release(device)
    progress.end()
    return failures


def _release(device: Device) -> None:
    torch._dynamo.reset()  # compiled layers hold the memory of their graphs
    release_memory(device)


def run_row(row: Row, device: Device, data: Data, groups: int) -> tuple[dict, dict]:
    """One row and its detail, as `Results.add` takes them. Raises when cake cannot run it."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    shared: dict[str, tuple[Call, float]] = {}  # the control is the very call of cake
    for arm, implementation in ARMS.items():
        if arm == "eager" and row.mode != "eager":
            skipped[arm] = "it reads the routing on the host"
            continue
        try:
            if implementation not in shared:
                shared[implementation] = _prepared(row.mode, device, data, implementation)
            calls[arm], errors[arm] = shared[implementation]
        except Exception as error:  # a peer may raise anything; its reason is reported
            if arm == BASE:
                raise
            skipped[arm] = (str(error) or repr(error)).splitlines()[0]
    peaks = {arm: peak_bytes(device, call) for arm, call in calls.items() if row.mode == "eager"}
    timings, clock_mhz = measure(device, calls, groups)
    us = {arm: timing.us for arm, timing in timings.items()}
    record = row_record(row.shape, OP, row.mode, us, errors)
    for arm, values in record["arms"].items():
        values["tokens_per_s"] = row.tokens / values["median_us"] * 1e6
        if peaks.get(arm) is not None:
            values["peak_bytes"] = peaks[arm]
    detail = {
        "flops": row.layer.flops(row.tokens),
        "us": us,
        "launches": {arm: sum(t.census.values()) for arm, t in timings.items()},
        "clock_mhz": clock_mhz,
        "group_sizes": [min(data.group_sizes), max(data.group_sizes)],
        "skipped": skipped,
    }
    return record, detail


def _prepared(mode: str, device: Device, data: Data, implementation: str) -> tuple[Call, float]:
    """The call to time and its error; its results are NaN before the call that is checked."""
    block = data.blocks[implementation]
    outputs: Any
    if mode == "graph":
        call, outputs = device.capture(lambda: data.step(block))
        poison(outputs)
        call()
        return call, data.error(outputs)
    if mode == "eager":

        def call() -> Outputs:
            return data.step(block)
    else:
        compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)

        def call() -> Outputs:
            torch.compiler.cudagraph_mark_step_begin()
            return data.step(block, compiled)

        call(), call()  # warms up, then records; from here on it replays
    poison(call())
    return call, data.error(call())


def peak_bytes(device: Device, call: Call) -> int | None:
    """What a call needs beside the weights, the tokens and their gradient; its results count."""
    if device.torch_device.type != "cuda":
        return None
    gc.collect()
    device.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    device.synchronize()
    return torch.cuda.max_memory_allocated() - before


def render(results: Results) -> str:
    """A table for each row: time, tokens a second, memory and error of every arm."""
    meta = results.meta
    run_of = {key: meta.get(key) for key in META_KEYS[:-1]} | meta["versions"]
    parts = [
        ", ".join(f"{key} {value}" for key, value in run_of.items()),
        LEGEND,
    ]
    for row, detail in zip(results.rows, results.details, strict=True):
        low, high = detail["group_sizes"]
        lines = [
            f"{row['shape']}, {row['op']}, {row['mode']} ({low} to {high} rows an expert)",
            HEADING,
        ]
        lines += [_line(row, detail["flops"], arm) for arm in row["arms"]]
        lines += [f"  {arm} left out: {why}" for arm, why in detail["skipped"].items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: Mapping[str, Any], flops: int, arm: str) -> str:
    values = row["arms"][arm]
    us, peak = values["median_us"], values.get("peak_bytes")
    memory = f"{'-':>8}" if peak is None else f"{peak / 2**30:8.2f}"
    ratio = row["ratios"].get(arm)
    text = "" if ratio is None else "  {:.3f} [{:.3f}, {:.3f}]".format(*ratio)
    return (
        f"  {arm:10} {us / 1e3:8.3f} {values['tokens_per_s']:10.0f} {flops / us / 1e6:8.1f} {memory} "
        f"{values['rel_error']:8.1e}{text}"
    )
