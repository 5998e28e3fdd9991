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
    config, shape, corpus = run.config, run.model_config, run.corpus
    parameters = sum(p.numel() for p in run.cake.model.parameters())
    experts = sum(p.numel() for block in run.cake.model.blocks for p in block.experts.parameters())
    used = parameters - experts + experts * shape.top_k // shape.experts
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    others = " and ".join(arm.name for arm in run.arms[1:])
    facts = [
        ("text", f"the help pages of Python {python} (pydoc_data.topics)"),
        ("", f"{len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out"),
        ("model", f"{shape.layers} blocks of width {shape.width} with {shape.heads} heads"),
        (
            "",
            f"{shape.experts} experts of hidden width {shape.hidden}, {shape.top_k} for each byte",
        ),
        ("", f"{parameters:,} parameters, {used:,} of them used for a byte"),
        ("device", device_name(config.device)),
        ("types", f"{_name(config.dtype)} activations, float32 weights and router"),
        *zip(("kernels", "", ""), kernels(run), strict=True),
        ("steps", f"{config.steps} of {config.batch} x {shape.context} bytes, each byte a token"),
    ]
    if others:
        facts.append(("compared", f"the first {config.compare_steps} steps also with {others}:"))
        facts.append(("", "same weights, same batches, in turn"))
    facts += [("", f"{name} does not run: {reason}") for name, reason in not_run.items()]
    if config.compile:
        facts.append(("compiled", "with torch.compile(fullgraph=True)"))
        facts += [("", f"{a.name} runs eagerly: {a.why_eager}") for a in run.arms if a.why_eager]
    title = "cake_ops demo: a byte-level mixture-of-experts language model, trained from scratch"
    return "\n".join([title, "", *(f"  {name:<10}{fact}" for name, fact in facts), ""])


def kernels(run: Run) -> list[str]:
    """How cake serves the GEMMs of a step, in its own words."""
    config, shape = run.config, run.model_config
    tokens = config.batch * shape.context

    def tensor(*size: int, dtype: torch.dtype = config.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=config.device)

    x = tensor(tokens, shape.width)
    rows = tensor(tokens * shape.top_k, shape.width)
    offs = tensor(shape.experts, dtype=torch.int32)
    up = tensor(shape.experts, 2 * shape.hidden, shape.width)
    gate = tensor(shape.experts, shape.width, dtype=torch.float32)
    qkv = tensor(3 * shape.width, shape.width)
    return [
        f"experts      grouped_mm  {cake_ops.explain(cake_ops.grouped_mm, rows, up, offs)}",
        f"router       router_mm   {cake_ops.explain(cake_ops.router_mm, x, gate)}",
        f"projections  linear      {cake_ops.explain(cake_ops.dense_mm, x, qkv)}",
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} ({threads} thread{'s' * (threads > 1)})"


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
            f"  {tokens_per_second(run, run.cake.seconds[-10:]):,.0f} tokens/s"
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
    losses = torch.tensor([run.cake.losses[:steps], arm.losses[:steps]], dtype=torch.float64)
    return (losses[0] - losses[1]).abs().max().item()  # NaN if there is one


def summary(run: Run) -> str:
    """The table; a figure that the run did not get to is a dash."""
    return "\n".join([*_loss_rows(run), "", *_arm_rows(run), "", *_launch_rows(run)])


def _row(label: str, cells: list[str]) -> str:
    return f"  {label:<34}" + "".join(f"{cell:>12}" for cell in cells)


def _figure(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def gap_text(gap: float | None) -> str:
    """A loss difference; ``0`` is said of equal bits alone."""
    return "0" if gap == 0 else _figure(gap, ".1e")


def _loss_rows(run: Run) -> list[str]:
    last = max(run.held_out, default=0)
    nats = [run.held_out.get(0), run.held_out[last] if last else None]
    bits = [None if x is None else x / math.log(2) for x in nats]
    return [
        _row("", ["before", f"step {last}" if last else "after"]),
        _row("held-out loss, nats per byte", [_figure(x, ".3f") for x in nats]),
        _row("               bits per byte", [_figure(x, ".3f") for x in bits]),
    ]


def _arm_rows(run: Run) -> list[str]:
    steps = compared_steps(run)
    timed = max(0, steps - WARMUP_STEPS)
    rates: list[float | None] = [None] * len(run.arms)
    if timed:
        rates = [tokens_per_second(run, arm.seconds[WARMUP_STEPS:steps]) for arm in run.arms]
    rows = [
        _row("", [arm.name for arm in run.arms]),
        _row("training speed, tokens per second", [_figure(rate, ",.0f") for rate in rates]),
    ]
    if len(run.arms) == 1:
        return [*rows, f"    median of {timed} whole steps"]
    ratios = [rate / rates[0] if rate and rates[0] else None for rate in rates]
    gaps = [loss_difference(run, arm) if steps else None for arm in run.arms[1:]]
    cpu_note = ["    on a CPU every arm runs products of torch: this says nothing of a GPU"]
    return [
        *rows,
        _row("                relative to cake", [_figure(ratio, ".2f") for ratio in ratios]),
        _row("largest difference to cake's loss", ["-", *map(gap_text, gaps)]),
        f"    speed: medians of {timed} whole steps each, in turn; loss: over the first {steps} steps",
        *(cpu_note if run.config.device.type == "cpu" else []),
    ]


def _launch_rows(run: Run) -> list[str]:
    counts = [run.forward_launches.get(early_stop) for early_stop in (True, False)]
    if run.config.compile:
        why = "up alone, the compiler drops the unused down"
    else:
        why = "up alone where it stops early, else both"
    return [
        _row("early stop of checkpoint", ["on", "off"]),
        _row("forward grouped GEMMs in a step", [_figure(count, "d") for count in counts]),
        f"    {run.model_config.layers} blocks x (up + down), and again in the backward: {why}",
    ]
