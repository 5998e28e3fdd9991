"""The picture of a run: the loss, the compared arms, and which experts got the rows."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from .report import compared_steps, gap_text, loss_difference
from .train import WARMUP_STEPS, Run

COLOURS = {"cake": "#d6336c", "torch": "#1971c2", "loop": "#2f9e44"}
DARK, GREY = "#212529", "#868e96"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e9ecef",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
LOAD_COLUMNS = 50  # at most; a column is the mean over some steps


def draw(run: Run, path: Path) -> None:
    """Writes the PNG. Raises ImportError where matplotlib is missing."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 7.2), layout="constrained", dpi=120)  # without a display
        left, right = figure.subfigures(1, 2, width_ratios=(1.2, 1))
        if len(run.arms) > 1:
            top, bottom = left.subfigures(2, 1, height_ratios=(1.7, 1))
            losses, speed = bottom.subplots(1, 2, width_ratios=(1.6, 1))
            _draw_arms(run, losses)
            _draw_speed(run, speed)
        else:
            top = left
        _draw_loss(run, top.subplots())
        _draw_load(run, right)
        figure.savefig(path, format="png")


def _draw_loss(run: Run, axes: Any) -> None:
    losses = torch.tensor(run.cake.losses)
    steps = list(range(1, len(losses) + 1))
    window = max(1, len(losses) // 40) | 1  # odd, so that the mean has a middle
    smooth = losses.unfold(0, window, 1).mean(1).tolist()
    middle = steps[window // 2 :][: len(smooth)]
    axes.axhline(math.log(256), color=GREY, linestyle=":", linewidth=1)
    axes.text(
        len(losses),
        math.log(256) - 0.08,
        "all bytes equally likely",
        color=GREY,
        ha="right",
        va="top",
    )
    axes.plot(
        steps,
        losses.tolist(),
        color=COLOURS["cake"],
        alpha=0.3 if window > 1 else 1,
        linewidth=0.8,
        label="training",
    )
    if window > 1:
        axes.plot(
            middle, smooth, color=COLOURS["cake"], linewidth=1.8, label=f"mean of {window} steps"
        )
    held_out = {"color": DARK, "marker": "o", "markersize": 4, "linewidth": 1}
    axes.plot(*zip(*run.held_out.items(), strict=True), **held_out, label="held-out text")
    axes.set(
        title="Loss of the model on cake_ops", xlabel="step", ylabel="nats per byte", ylim=(0, 6)
    )
    bits = axes.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    )
    bits.set_ylabel("bits per byte")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.88))


def _draw_arms(run: Run, axes: Any) -> None:
    """The compared losses one on top of the other: a wide line below, dashes and dots above it."""
    steps = compared_steps(run)
    looks = (
        {"linewidth": 5, "alpha": 0.35},
        {"linestyle": "--"},
        {"linestyle": ":", "linewidth": 2},
    )
    for arm, look in zip(run.arms, looks, strict=False):
        gap = None if arm is run.cake else loss_difference(run, arm)
        remark = {None: "", 0.0: ", the same"}.get(gap, f", within {gap_text(gap)}")
        axes.plot(
            range(1, steps + 1),
            arm.losses[:steps],
            color=COLOURS[arm.name],
            **look,
            label=arm.name + remark,
        )
    axes.set(title="Training loss, compared steps", xlabel="step", ylabel="nats per byte")
    axes.legend(loc="upper right")


def _draw_speed(run: Run, axes: Any) -> None:
    """Medians over the compared steps, with the middle half of the steps as a whisker."""
    steps = compared_steps(run)
    for arm in run.arms:
        seconds = arm.seconds[WARMUP_STEPS:steps]
        if len(seconds) < 2:
            continue
        tokens = run.config.batch * run.model_config.context / 1000
        low, median, high = (
            tokens / q for q in reversed(quantiles(seconds, n=4, method="inclusive"))
        )
        whisker = [[median - low], [high - median]]
        axes.bar(arm.name, median, color=COLOURS[arm.name], alpha=0.8, width=0.6)
        axes.errorbar(arm.name, median, whisker, color=DARK, capsize=4, linewidth=1)
    axes.set(title="Speed: median, middle half", ylabel="1000 tokens per second", ylim=(0, None))
    axes.grid(False, axis="x")


def _draw_load(run: Run, figure: Any) -> None:
    """One heat map a block: the rows of each expert over time, white where its share is even."""
    from matplotlib.colors import TwoSlopeNorm

    load = torch.stack([step.load for step in run.cake.steps]).double().cpu()  # [steps, layers, E]
    steps, layers, experts = load.shape
    width = math.ceil(steps / LOAD_COLUMNS)
    share = torch.stack([part.mean(0) for part in load.split(width)])
    share = share / share.mean(-1, keepdim=True)
    norm = TwoSlopeNorm(1, 0, max(2.0, float(share.max())))
    all_axes = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(all_axes):
        image = axes.imshow(
            share[:, layer].T.numpy(),
            aspect="auto",
            cmap="RdBu_r",
            norm=norm,
            interpolation="nearest",
            extent=(0, len(share) * width, experts - 0.5, -0.5),
        )
        axes.set(title=f"Expert load, block {layer + 1}", ylabel="expert", xlim=(0, steps))
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.grid(False)
    all_axes[-1].set_xlabel("step")
    figure.colorbar(
        image, ax=list(all_axes), label="rows, as a multiple of an even share", aspect=40, pad=0.02
    )
