"""Progress of a long run on standard error: which row, how many are left, how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

__all__ = ["Progress", "minutes"]


def minutes(seconds: float) -> str:
    """A duration to read: "40 s", "3 min 05 s"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02} s"


class Progress:
    """Announces each step; the time left is the estimate scaled by how the finished steps went."""

    def __init__(self, steps: Sequence[tuple[str, float]], stream: TextIO | None = None) -> None:
        self._steps = steps
        self._stream = stream or sys.stderr
        self._start = time.monotonic()

    def begin(self, i: int) -> None:
        name, _ = self._steps[i]
        done = sum(seconds for _, seconds in self._steps[:i])
        left = sum(seconds for _, seconds in self._steps[i:])
        if i:
            left *= (time.monotonic() - self._start) / done
        self._write(f"[{i + 1}/{len(self._steps)}] {name}: about {minutes(left)} left")

    def end(self) -> None:
        spent = minutes(time.monotonic() - self._start)
        self._write(f"[{len(self._steps)}/{len(self._steps)}] done in {spent}")
        if self._stream.isatty():
            self._stream.write("\n")

    def _write(self, text: str) -> None:
        tty = self._stream.isatty()
        self._stream.write(f"\r\x1b[K{text}" if tty else f"{text}\n")
        self._stream.flush()
