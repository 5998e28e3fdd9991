"""What a benchmark run found: statistics, the JSON file and merging.

The file is {"meta": {...}, "rows": [...], "details": [...]}. A row holds its medians, errors and
ratios; the detail at the same index holds what they come from: the interval of every group, the
kernel census, the host time, the SM clock (idle, under load), more of the accuracy, the arms left out and
why. Behind its fixed keys, meta holds tables of the run as a whole. A ratio is
an arm's time over cake's inside one group, given as [median, min, max] over the groups, so a ratio
above 1 says that cake is faster.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BASE", "META_KEYS", "Results", "best_library", "geomean", "ratio", "row_record"]

BASE = "cake"
SAME_KEYS = ("gpu", "driver", "cuda", "torch", "cake_ops")  # what one table may not mix
META_KEYS = (*SAME_KEYS, "date", "command")
LIBRARIES = ("torch", "cublas", "cublaslt")  # the arms whose fastest one is the bar


def geomean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def ratio(us: Sequence[float], base_us: Sequence[float]) -> list[float]:
    """[median, min, max] of the ratios formed inside each group."""
    ratios = [a / b for a, b in zip(us, base_us, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def row_record(
    shape: str,
    op: str,
    mode: str,
    us: Mapping[str, Sequence[float]],
    errors: Mapping[str, float],
) -> dict[str, Any]:
    """One row in the file's format, from each arm's intervals and its relative error."""
    return {
        "shape": shape,
        "op": op,
        "mode": mode,
        "arms": {
            arm: {
                "median_us": statistics.median(times),
                "min_us": min(times),
                "max_us": max(times),
                "rel_error": errors[arm],
            }
            for arm, times in us.items()
        },
        "ratios": {arm: ratio(times, us[BASE]) for arm, times in us.items() if arm != BASE},
    }


def best_library(row: Mapping[str, Any]) -> float | None:
    """The median ratio of the fastest library arm of a row: the figure to stay above 1."""
    found = [row["ratios"][arm][0] for arm in LIBRARIES if arm in row["ratios"]]
    return min(found, default=None)


def row_key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["shape"], row["op"], row["mode"]


class Results:
    """The rows of a run, written to a file after each one so that an interrupted run keeps them."""

    def __init__(self, meta: Mapping[str, Any], path: Path | None = None) -> None:
        self.meta = dict(meta)
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.details: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any], detail: dict[str, Any]) -> None:
        self.rows.append(_rounded(row))  # so that what is printed is what is stored
        self.details.append(_rounded(detail))
        self.save()

    def save(self) -> None:
        if self.path is None:
            return
        rows, details = _lines(self.rows), _lines(self.details)
        meta = json.dumps(self.meta, indent=1)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(f'{{"meta": {meta},\n"rows": [{rows}],\n"details": [{details}]}}\n')
        os.replace(partial, self.path)

    @classmethod
    def load(cls, path: Path) -> Results:
        document = json.loads(path.read_text())
        results = cls(document["meta"])
        results.rows = document["rows"]
        results.details = document.get("details", [{} for _ in results.rows])
        return results

    def update(self, other: Results) -> list[str]:
        """Take in the rows of another run; return the names of rows that both had.

        Arms never mix: such a row is replaced whole by the other's. RuntimeError when the other run
        is not of the same GPU and versions.
        """
        for key in SAME_KEYS:
            if other.meta.get(key) != self.meta.get(key):
                raise RuntimeError(
                    f"cannot join runs of different {key}: {self.meta.get(key)!r} and "
                    f"{other.meta.get(key)!r}"
                )
        replaced = []
        for key in ("date", "command"):
            seen = str(self.meta.get(key, "")).split(" ; ")
            if other.meta.get(key) not in seen:
                self.meta[key] = " ; ".join([*seen, str(other.meta.get(key))])
        self.meta = {**other.meta, **self.meta}
        position = {row_key(row): i for i, row in enumerate(self.rows)}
        for row, detail in zip(other.rows, other.details, strict=True):
            i = position.get(row_key(row))
            if i is None:
                self.rows.append(row)
                self.details.append(detail)
            else:
                replaced.append(", ".join(row_key(row)))
                self.rows[i], self.details[i] = row, detail
        return replaced


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    """One record a line, for grep and for a readable diff."""
    return "".join(
        f"\n{json.dumps(record)}{',' * (i < len(records))}" for i, record in enumerate(records, 1)
    )


def _rounded(value: Any) -> Any:
    """Floats to six digits: below any measurement's resolution, and a third of the file."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
