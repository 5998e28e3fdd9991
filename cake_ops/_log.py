"""The logger ``cake_ops``: at level DEBUG it has one line for each new geometry of a call, saying what serves it.

A line is written where a way is chosen and not where it is taken, so a repeated call writes nothing. Where a
kernel runs on copies, a second line, "after the copy: ..", tells which one, if it is new for the copies. The
backends that compute through torch choose nothing; they ask the logger at each call instead, 30 ns while
it is off. ``CAKE_LOG=debug`` in the environment sets the level and prints the lines on stderr; a program
that has its own handlers does ``logging.getLogger("cake_ops").setLevel(logging.DEBUG)``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import Tensor

from ._explanation import Explanation

LOGGER = logging.getLogger("cake_ops")
MAX_KNOWN = 4096

_known: set[Any] = set()


def describe(*call: Any) -> str:
    """Arguments in a line: a tensor by dtype, shape, strides if it is not contiguous, and a GPU by name."""
    return ", ".join(_describe(value) for value in call if value is not None)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    device = f" {value.device}" if value.is_cuda else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}{device}"


def log_route(
    name: str, out: Tensor | None, call: tuple[Any, ...], explanation: Explanation
) -> None:
    """Writes the line of a route that was just made; ``out`` is the tensor of the caller that it writes."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        result = "" if out is None else f" -> {describe(out)}"
        LOGGER.debug("%s(%s)%s: %s", name, describe(*call), result, explanation)


def log_torch(
    how: str, has_rows: tuple[bool, ...], op: str, out: Tensor, accumulate: bool, *tensors: Tensor
) -> None:
    """Writes the line of a call that goes through torch, if its geometry is new.

    ``has_rows`` says of each tensor whether its leading dimensions are rows. As in the routes, their exact
    number is not part of the geometry, since in training it changes at every step.
    """
    key = op, out.dtype, *map(_geometry, tensors, has_rows)
    if key in _known:
        return
    if len(_known) >= MAX_KNOWN:
        _known.clear()
    _known.add(key)
    LOGGER.debug("%s(%s) -> %s: torch: %s", op, describe(*tensors), describe(out), how)


def _geometry(t: Tensor, has_rows: bool) -> tuple[Any, ...]:
    outer = t.shape[:-1]
    rows = outer.numel().bit_length() if has_rows else outer
    return rows, t.shape[-1:], t.is_contiguous(), t.dtype, t.device


def forget() -> None:
    """Makes every geometry new again."""
    _known.clear()


def _configure(level: str | None) -> None:
    if not level:
        return
    if level.lower() != "debug":
        raise RuntimeError(f"cake_ops: CAKE_LOG must be debug, or not set, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False  # a root logger that prints too would print each line again


_configure(os.environ.get("CAKE_LOG"))
