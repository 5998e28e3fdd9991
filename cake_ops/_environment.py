"""Switches in the environment, read when the package is imported."""

from __future__ import annotations

import os


def flag(name: str) -> bool:
    """Whether the variable ``name`` is 1. Empty, 0 or not set mean no; anything else raises, for it was meant."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise RuntimeError(f"cake_ops: {name} must be 1, 0 or not set, got {value!r}")
    return value == "1"
