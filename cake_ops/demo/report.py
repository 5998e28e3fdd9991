"""What the demo prints: the opening lines, the progress bar, the summary table."""

from __future__ import annotations

import math
import shutil
import sys
import time
from statistics import median
from typing import TextIO

import torch

import cake_ops

from .train import WARMUP_STEPS, Arm, Run


def opening(run: Run, not_run: dict[str, str]) -> str:
    """What is trained, on what, where and with which kernels."""
    config, shape = run.config, run.model_config
    parameters = sum(p.numel() for p in run.cake.model.parameters())
    experts = sum(
        p.numel()
        for n, p in run.cake.model.named_parameters()
        if ".experts.up" in n or ".experts.down" in n
    )
    active = parameters - experts * (shape.experts - shape.top_k) // shape.experts
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [
        "Training a byte-level mixture-of-experts language model from scratch, with cake_ops.",
        "",
        f"  text     the help pages of Python {python} (pydoc_data.topics): {len(run.corpus.train):,} bytes"
        f" to train on, {len(run.corpus.held_out):,} held out",
        f"  model    {shape.layers} blocks, width {shape.width}, {shape.heads} heads; {shape.experts} experts"
        f" of hidden width {shape.hidden}, {shape.top_k} per byte",
        f"           {parameters:,} parameters, {active:,} of them used for a byte",
        f"  device   {device_name(config.device)}, {str(config.dtype).removeprefix('torch.')} activations,"
        " float32 weights and router",
        f"  kernels  cake_ops {cake_ops.__version__}: grouped_mm for the experts, router_mm for the router,"
        " linear for the projections",
        f"  steps    {config.steps} of {config.batch} x {shape.context} bytes"
        + (", compiled with fullgraph=True" if config.compile else ""),
    ]
    others = [arm.name for arm in run.arms[1:]]
    if others:
        lines.append(
            f"  compare  the first {config.compare_steps} steps also with {' and '.join(others)}:"
            " same weights, same batches, in turn"
        )
    lines += [f"  {name} does not run: {reason}" for name, reason in not_run.items()]
    if config.compile:
        lines += [f"  {a.name} runs eagerly: {a.why_eager}" for a in run.arms if a.why_eager]
    return "\n".join([*lines, ""])


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


class Progress:
    """A bar redrawn in place on a terminal; on anything else a plain line every tenth of the way."""

    def __init__(self, steps: int, out: TextIO) -> None:
        self.total, self.out = steps, out
        self.live = out.isatty()
        self.blocks = "█░" if "utf" in (getattr(out, "encoding", None) or "").lower() else "#."
        self.start = self.drawn = time.perf_counter()
        self.lines = 0

    def __call__(self, run: Run) -> None:
        now, done = time.perf_counter(), len(run.cake.steps)
        if self.live and (now - self.drawn < 0.1 and done < self.total):
            return
        if not self.live and done * 10 // self.total == self.lines:
            return
        self.drawn, self.lines = now, done * 10 // self.total
        comparing = done <= run.config.compare_steps and len(run.arms) > 1
        status = (
            f"step {done:>{len(str(self.total))}}/{self.total}"
            f"  loss {run.cake.losses[-1]:.3f}"
            f"  {tokens_per_second(run, run.cake.seconds[-10:]):,.0f} bytes/s"
            f"  {'comparing' if comparing else self.left(run, now)}"
        )
        if self.live:
            width = max(10, min(40, shutil.get_terminal_size().columns - len(status) - 4))
            filled = width * done // self.total
            self.out.write(
                f"\r\x1b[K{self.blocks[0] * filled}{self.blocks[1] * (width - filled)} {status}"
            )
        else:
            self.out.write(status + "\n")
        self.out.flush()

    def left(self, run: Run, now: float) -> str:
        steps = self.total - len(run.cake.steps)
        seconds = steps * median(run.cake.seconds[-10:])
        return f"{math.ceil(seconds)} s left" if steps else f"done in {now - self.start:.0f} s"

    def close(self) -> None:
        if self.live:
            self.out.write("\n")
            self.out.flush()


def tokens_per_second(run: Run, seconds: list[float]) -> float:
    return run.config.batch * run.model_config.context / median(seconds)


def compared_steps(run: Run) -> int:
    """How many steps every arm has taken."""
    return min(len(arm.steps) for arm in run.arms)


def loss_difference(run: Run, arm: Arm) -> float:
    """The largest difference to cake's loss over the compared steps, in nats per byte."""
    steps = compared_steps(run)
    pairs = zip(run.cake.losses[:steps], arm.losses[:steps], strict=True)
    return max(abs(a - b) for a, b in pairs)


def summary(run: Run) -> str:
    """The table; a figure that the run did not get to is a dash and never an estimate."""
    return "\n".join(["", *_loss_rows(run), "", *_arm_rows(run), "", *_launch_rows(run)])


def _row(label: str, cells: list[str], remark: str = "") -> str:
    return (
        f"{label:<36}"
        + "".join(f"{cell:>12}" for cell in cells)
        + (f"   {remark}" if remark else "")
    )


def _loss_rows(run: Run) -> list[str]:
    last = max(run.held_out, default=0)
    nats = [run.held_out.get(0), run.held_out[last] if last else None]
    return [
        _row("", ["before", f"step {last}" if last else "after"]),
        _row("held-out loss        nats per byte", [_figure(x, ".3f") for x in nats]),
        _row(
            "                     bits per byte",
            [_figure(x and x / math.log(2), ".3f") for x in nats],
        ),
    ]


def _arm_rows(run: Run) -> list[str]:
    steps = compared_steps(run)
    timed = max(0, steps - WARMUP_STEPS)
    rates = [
        tokens_per_second(run, a.seconds[WARMUP_STEPS:steps]) if timed else None for a in run.arms
    ]
    rows = [
        _row("", [arm.name for arm in run.arms]),
        _row(
            "training speed      bytes per second",
            [_figure(rate, ",.0f") for rate in rates],
            f"median of {timed} whole steps each, in turn"
            if len(rates) > 1
            else f"median of {timed} steps",
        ),
    ]
    if len(run.arms) > 1:
        ratios = [rate / rates[0] if rate and rates[0] else None for rate in rates]
        gaps = [loss_difference(run, arm) if steps else None for arm in run.arms[1:]]
        rows += [
            _row("                        cake = 1", [_figure(ratio, ".2f") for ratio in ratios]),
            _row(
                "largest loss difference to cake",
                ["-", *(_figure(gap, ".1e") for gap in gaps)],
                f"over the first {steps} steps",
            ),
        ]
    return rows


def _launch_rows(run: Run) -> list[str]:
    layers = run.model_config.layers
    on, off = (run.forward_launches.get(stop) for stop in (True, False))
    remark = f"{layers} blocks x (up + down), and in the backward "
    if run.config.compile:
        why = [remark + "up again: the compiler drops the unused down"] * 2
    else:
        why = [remark + "up again, the down projection is skipped", remark + "both again"]
    return [
        _row("forward grouped GEMMs in a step", ["launches"]),
        _row("                       early stop on", [_figure(on, "d")], why[0]),
        _row("                      early stop off", [_figure(off, "d")], why[1]),
    ]


def _figure(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
