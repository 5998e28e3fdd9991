"""Turns one compute function into the CPU launches of an operator and of its ``_out`` and ``_`` forms."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._library import OPS
from .._problem import PROBLEMS

Compute = Callable[..., None]
"""``(op, out, accumulate, *tensors)`` writes the result into ``out``, or adds it with ``accumulate``."""


def serve(name: str, compute: Compute) -> None:
    """Registers ``compute`` as the CPU kernel of the operator ``name`` in all its forms."""
    problem = PROBLEMS[name]

    def launch(*tensors: Tensor, out_dtype=None, deterministic=True) -> Tensor:
        out = problem.allocate(*tensors, out_dtype=out_dtype)
        compute(name, out, False, *tensors)
        return out

    def launch_out(*tensors: Tensor, out: Tensor, deterministic=True) -> None:
        write(f"{name}_out", out, False, tensors)

    def launch_accumulate(out: Tensor, *tensors: Tensor, deterministic=True) -> None:
        write(f"{name}_", out, True, tensors)

    def write(op: str, out: Tensor, accumulate: bool, tensors: tuple[Tensor, ...]) -> None:
        problem.check_out(op, out, *tensors)
        problem.check_no_overlap(op, out, *tensors)
        compute(op, out, accumulate, *tensors)

    for suffix, form in (("", launch), ("_out", launch_out), ("_", launch_accumulate)):
        if name + suffix in OPS:
            OPS[name + suffix].serve("CPU", form)
