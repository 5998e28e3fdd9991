"""The picture of a run: the loss, how closely the arms agree, and which experts got the rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from .report import compared_steps
from .train import Run

COLOURS = {"cake": "#c2255c", "torch": "#1c7ed6", "loop": "#2b8a3e"}
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
}
LOAD_COLUMNS = 50  # at most; a column is the mean over some steps


def draw(run: Run, path: Path) -> None:
    """Writes the PNG. Raises ImportError where matplotlib is missing."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(12.5, 7), layout="constrained", dpi=120
        )  # no pyplot: draws with Agg
        left, right = figure.subfigures(1, 2, width_ratios=(1.2, 1))
        if len(run.arms) > 1:
            loss, difference = left.subplots(2, 1, height_ratios=(2.4, 1))
            _draw_difference(run, difference)
        else:
            loss = left.subplots()
        _draw_loss(run, loss)
        _draw_load(run, right)
        figure.savefig(path)


def _draw_loss(run: Run, axes: Any) -> None:
    losses = torch.tensor(run.cake.losses)
    window = max(1, len(losses) // 30)
    smooth = losses.unfold(0, window, 1).mean(1)
    steps = torch.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color=COLOURS["cake"], alpha=0.25, linewidth=0.8)
    axes.plot(
        steps[window - 1 :],
        smooth,
        color=COLOURS["cake"],
        linewidth=1.8,
        label=f"training, mean of {window} steps",
    )
    axes.plot(
        *zip(*run.held_out.items(), strict=True),
        "o-",
        color="#212529",
        markersize=4,
        linewidth=1,
        label="held out",
    )
    axes.axhline(math.log(256), color="#868e96", linestyle=":", linewidth=1)
    axes.annotate(
        "every byte alike: 8 bits", (len(losses), math.log(256)), (0, -4), textcoords="offset points",
        ha="right", va="top", color="#868e96", fontsize=9,
    )  # fmt: skip
    axes.set(title="Loss (cake)", xlabel="step", ylabel="nats per byte", ylim=(0, None))
    bits = axes.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    )
    bits.set_ylabel("bits per byte")
    axes.legend(loc="upper center")


def _draw_difference(run: Run, axes: Any) -> None:
    steps = compared_steps(run)
    for arm in run.arms[1:]:
        gaps = (torch.tensor(arm.losses[:steps]) - torch.tensor(run.cake.losses[:steps])).abs()
        gaps = gaps.to(torch.float64)
        apart = (
            gaps > 0
        )  # a logarithmic axis has no zero, so equal losses are counted in the legend
        axes.plot(
            torch.arange(1, steps + 1)[apart], gaps[apart], ".-", color=COLOURS[arm.name], linewidth=1, markersize=4,
            label=f"{arm.name} (equal bits in {steps - int(apart.sum())} of {steps} steps)",
        )  # fmt: skip
    axes.set(
        title="Difference of the training loss to cake's", xlabel="step", ylabel="nats per byte"
    )
    axes.set_yscale("log")
    axes.legend(loc="best", fontsize=9)


def _draw_load(run: Run, figure: Any) -> None:
    """One heat map a block: the rows of each expert over time, 1 where the load is even."""
    load = torch.stack([step.load for step in run.cake.steps]).double().cpu()  # [steps, layers, E]
    steps, layers, experts = load.shape
    width = math.ceil(steps / LOAD_COLUMNS)
    share = torch.stack([part.mean(0) for part in load.split(width)])
    share = share / share.mean(-1, keepdim=True)
    top = max(2.0, float(share.max()))
    all_axes = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(all_axes):
        image = axes.imshow(
            share[:, layer].T, aspect="auto", origin="lower", cmap="magma", vmin=0, vmax=top, interpolation="nearest",
            extent=(0, len(share) * width, -0.5, experts - 0.5),
        )  # fmt: skip
        axes.set(title=f"Expert load, block {layer + 1}", ylabel="expert", xlim=(0, steps))
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.grid(False)
    all_axes[-1].set_xlabel("step")
    figure.colorbar(
        image, ax=list(all_axes), label="rows, in multiples of an even share", aspect=40, pad=0.02
    )
