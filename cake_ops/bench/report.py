"""Tables for the terminal and a picture, both made from `Results` alone.

One table per operation and mode: cake's median time and rate, then each arm's time over cake's as
median [min, max] over the groups. Under it the geometric mean of every column with its lowest and
highest row, the count of rows below 1, the kernels that one call launches, and what is not the same.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .records import BASE, LIBRARIES, META_KEYS, Results, best_library, geomean

__all__ = ["census_difference", "plot", "render"]

BEST = "best of"
LEGEND = (
    "Ratios are an arm's time over cake's, median [min, max] over paired groups; above 1 cake is "
    "faster. control is cake again: its spread is the noise."
)

Found = tuple[dict[str, Any], dict[str, Any]]  # a row and its detail


def sections(results: Results) -> dict[tuple[str, str], list[Found]]:
    """Rows with their details by (operation, mode), in the order met.

    The small problems are an operation of their own here: their ratios say something else.
    """
    by_kind: dict[tuple[str, str], list[Found]] = {}
    for row, detail in zip(results.rows, results.details, strict=True):
        op = f"{row['op']}, small" if row["shape"].startswith("small ") else row["op"]
        by_kind.setdefault((op, row["mode"]), []).append((row, detail))
    return by_kind


def arms_of(found: Sequence[Found]) -> list[str]:
    """The arms that any row has, in the order met, without cake."""
    return list(dict.fromkeys(arm for row, _ in found for arm in row["ratios"]))


def columns(found: Sequence[Found]) -> dict[str, list[tuple[float, str]]]:
    """Per column of ratios, the median ratio and the shape of every row that has it."""
    result = {
        arm: [(row["ratios"][arm][0], row["shape"]) for row, _ in found if arm in row["ratios"]]
        for arm in arms_of(found)
    }
    best = [(best_library(row), row["shape"]) for row, _ in found]
    libraries = [arm for arm in LIBRARIES if arm in result]
    if libraries:
        result[f"{BEST} {', '.join(libraries)}"] = [
            (value, shape) for value, shape in best if value is not None
        ]
    return result


def render(results: Results) -> str:
    parts = [", ".join(f"{key} {results.meta.get(key)}" for key in META_KEYS[:-1]), LEGEND]
    by_kind = sections(results)
    parts += [_section(op, mode, found) for (op, mode), found in by_kind.items()]
    parts += _overall(by_kind) + _early_stop(by_kind)
    parts += [_table(title, v) for title, v in results.meta.items() if title not in META_KEYS]
    return "\n\n".join(parts)


def _section(op: str, mode: str, found: Sequence[Found]) -> str:
    arms = arms_of(found)
    width = max(len(row["shape"]) for row, _ in found)
    lines = [
        f"{op}, {mode}",
        f"{'':{width}}  {'cake us':>9} {'TFLOP/s':>8}" + "".join(f"  {arm:>20}" for arm in arms),
    ]
    for row, detail in found:
        us = row["arms"][BASE]["median_us"]
        rate = f"{detail['flops'] / us / 1e6:8.1f}" if "flops" in detail else f"{'':8}"
        cells = (_ratio_cell(row["ratios"].get(arm)) for arm in arms)
        lines.append(f"{row['shape']:{width}}  {us:9.1f} {rate}" + "".join(cells))
    return "\n".join([*lines, *_summary(columns(found)), *_footnotes(found)])


def _summary(summary: Mapping[str, Sequence[tuple[float, str]]]) -> list[str]:
    """The geometric mean of every column, and its extreme rows."""
    width = max((len(name) for name in summary), default=0)
    lines = []
    for name, values in summary.items():
        (low, low_row), (high, high_row) = min(values), max(values)
        below = sum(value < 1 for value, _ in values)
        lines.append(
            f"  {name:{width}}  geomean {geomean(value for value, _ in values):.3f}, "
            f"below 1 in {below} of {len(values)}, lowest {low:.3f} ({low_row}), "
            f"highest {high:.3f} ({high_row})"
        )
    return lines


def _overall(by_kind: Mapping[tuple[str, str], Sequence[Found]]) -> list[str]:
    """For each mode, cake against the fastest library over the rows of all operations."""
    parts = []
    for mode in dict.fromkeys(mode for _, mode in by_kind):
        by_op = {op: columns(found) for (op, m), found in by_kind.items() if m == mode}
        best: dict[str, list[tuple[float, str]]] = {}
        for op, summary in by_op.items():
            for name, values in summary.items():
                if name.startswith(BEST):
                    best.setdefault(name, []).extend((v, f"{op}, {row}") for v, row in values)
        if best and len(by_op) > 1:
            parts.append("\n".join([f"all operations, {mode}", *_summary(best)]))
    return parts


def _ratio_cell(values: Sequence[float] | None) -> str:
    if values is None:
        return f"  {'-':>20}"
    median, low, high = values
    return f"  {median:5.3f} [{low:5.3f}, {high:5.3f}]"


def _footnotes(found: Sequence[Found]) -> list[str]:
    """Errors, host times, clocks, kernels, remarks and omissions of a section."""
    names = [BASE, *arms_of(found)]
    errors = {
        arm: max(row["arms"][arm]["rel_error"] for row, _ in found if arm in row["arms"])
        for arm in names
    }
    lines = ["  largest relative error: " + ", ".join(f"{a} {e:.1e}" for a, e in errors.items())]
    lines += _accuracy(found)
    hosts = [detail["host_us"] for _, detail in found if detail.get("host_us")]
    if hosts:
        medians = {arm: statistics.median(host[arm] for host in hosts) for arm in hosts[0]}
        text = ", ".join(f"{arm} {us:.1f}" for arm, us in medians.items())
        lines.append(f"  host us a call, median of {len(hosts)} rows under 2 ms: {text}")
    clocks = [detail["clock_mhz"][-1] for _, detail in found if detail.get("clock_mhz")]
    clocks = [clock for clock in clocks if clock is not None]
    if clocks:
        lines.append(f"  SM clock under load: {min(clocks)} to {max(clocks)} MHz")
    for arm in names:
        censuses = [d["census"][arm] for _, d in found if arm in d.get("census", {})]
        if censuses:
            kinds = len({tuple(sorted(census.items())) for census in censuses})
            more = f" (first row; {kinds} kinds in all)" if kinds > 1 else ""
            lines.append(f"  {arm} launches {_census_text(censuses[0])}{more}")
    remarks = [text for _, detail in found for text in detail.get("remarks", ())]
    lines += [f"  note on {text}" for text in dict.fromkeys(remarks)]
    reasons = [f"{arm}: {why}" for _, d in found for arm, why in d.get("skipped", {}).items()]
    lines += [f"  left out in {n} rows: {text}" for text, n in Counter(reasons).items()]
    return lines


def _accuracy(found: Sequence[Found]) -> list[str]:
    """The worst figure of each arm, for the figures of accuracy that the rows have."""
    lines = []
    for key, text, worst in (
        ("max_error", "largest error of one element, over the largest element", max),
        ("top8", "smallest share of tokens with the experts of FP64", min),
    ):
        by_arm: dict[str, list[float]] = {}
        for _, detail in found:
            for arm, figures in detail.get("accuracy", {}).items():
                if key in figures:
                    by_arm.setdefault(arm, []).append(figures[key])
        if by_arm:
            figures = (f"{arm} {worst(values):.4g}" for arm, values in by_arm.items())
            lines.append(f"  {text}: {', '.join(figures)}")
    return lines


def _table(title: str, rows: Mapping[str, Any]) -> str:
    """A table of the run as a whole: a line for each name, with a text or with figures."""
    lines = [title]
    for name, value in rows.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {figure:g}" for key, figure in value.items())
        lines.append(f"  {name}: {value}")
    return "\n".join(lines)


def _census_text(census: Mapping[str, int]) -> str:
    if not census:
        return "nothing"
    return ", ".join(f"{count} x {_short(name)}" for name, count in census.items())


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."


def census_difference(more: Mapping[str, int], fewer: Mapping[str, int]) -> dict[str, int]:
    """Launches of one call beyond those of another, by kernel; negative where it has fewer."""
    difference = {name: more.get(name, 0) - fewer.get(name, 0) for name in {**more, **fewer}}
    return {name: count for name, count in difference.items() if count}


def _early_stop(by_kind: Mapping[tuple[str, str], Sequence[Found]]) -> list[str]:
    """For each checkpointed operation, the launches that early stop spares each arm."""
    parts = []
    for (op, mode), found in by_kind.items():
        stopped = {
            row["shape"]: d.get("census", {}) for row, d in by_kind.get((f"{op} ES", mode), ())
        }
        lines: Counter[str] = Counter()
        for row, detail in found:
            for arm, census in detail.get("census", {}).items():
                if arm in stopped.get(row["shape"], {}):
                    spared = census_difference(census, stopped[row["shape"]][arm])
                    lines[f"  {arm}: {_census_text(spared)}"] += 1
        if lines:
            text = (f"{line} ({count} rows)" for line, count in lines.items())
            parts.append("\n".join([f"early stop spares in {op}, {mode}", *text]))
    return parts


def plot(results: Results, path: Path) -> None:
    """A picture of all ratios: a panel per operation and mode, in it a line of dots per arm.

    A dot is a row's median ratio, the upright bar and the figure are their geometric mean.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_kind = sections(results)
    ops = list(dict.fromkeys(op for op, _ in by_kind))
    modes = list(dict.fromkeys(mode for _, mode in by_kind))
    arms = {op: arms_of([f for mode in modes for f in by_kind.get((op, mode), ())]) for op in ops}
    colors = {
        arm: f"C{i}" for i, arm in enumerate(dict.fromkeys(a for op in ops for a in arms[op]))
    }
    figure, axes = pyplot.subplots(
        len(ops),
        len(modes),
        figsize=(1 + 5.5 * len(modes), 1.2 + sum(0.6 + 0.3 * len(arms[op]) for op in ops)),
        height_ratios=[2 + len(arms[op]) for op in ops],
        sharex="row",
        layout="constrained",
        squeeze=False,
    )
    for axis, (op, mode) in zip(axes.flat, ((o, m) for o in ops for m in modes), strict=True):
        by_arm = columns(by_kind.get((op, mode), ()))
        for y, arm in enumerate(arms[op]):
            ratios = [value for value, _ in by_arm.get(arm, ())]
            if not ratios:
                continue
            mean = geomean(ratios)
            dots = {"markersize": 5, "alpha": 0.4, "markeredgewidth": 0, "color": colors[arm]}
            axis.plot(ratios, [y] * len(ratios), "o", **dots)
            axis.plot([mean], [y], "|k", markersize=13)
            axis.annotate(f"{mean:.3f}", (1.01, y), xycoords=("axes fraction", "data"), va="center")
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(arms[op])), arms[op])
        axis.set_ylim(len(arms[op]) - 0.5, -0.5)
        axis.set_title(f"{op}, {mode}", fontsize=10, loc="left")
        axis.grid(axis="x", alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("time over cake's (right of the line: cake is faster)")
    figure.suptitle(f"cake_ops {results.meta.get('cake_ops')} on {results.meta.get('gpu')}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
