"""Turns one function into the launches of an operator in all its forms, plain, ``_out`` and ``_``.

:func:`serve` is for backends that compute through torch. The CUDA kernels have a plain launch of their own, which
checks a call only when its geometry is new; their writing forms are made by :func:`serve_into` too, which spares
a call like an earlier one all checks but that of overlapping memory.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import DEBUG
from typing import Any

from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView, _DisableAutocast

from ._checks import span
from ._eager import TensorGuards, recogniser
from ._explanation import Explanation
from ._library import OPS
from ._log import LOGGER, log_torch
from ._problem import PROBLEMS

Compute = Callable[..., None]
"""``(op, out, accumulate, *tensors)`` writes the result into ``out``, or adds it with ``accumulate``."""


def below_autograd(function: Callable[..., Any]) -> Callable[..., None]:
    """``function`` as a backend's own work. A result is new to autograd: its version stays 0. Autocast has had its
    say above: a writing form or a prepared launch may run inside it, and its own products must not be cast."""

    def run(*call) -> None:
        with _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
            function(*call)

    return run


def serve(device: str, name: str, function: Compute, how: str) -> None:
    """Registers ``function`` as the kernel of the operator ``name`` on ``device`` (CPU or CUDA).

    ``how`` says in a few words how it computes; :func:`cake_ops.explain` shows it.
    """
    problem = PROBLEMS[name]
    has_rows = tuple(argument in ("x", "g") for argument in problem.arguments)

    function = below_autograd(function)

    def compute(*call) -> None:
        if LOGGER.isEnabledFor(DEBUG):
            log_torch(how, has_rows, *call)
        function(*call)

    def launch(*tensors: Tensor, out_dtype=None, deterministic=True) -> Tensor:
        out = problem.allocate(*tensors, out_dtype=out_dtype)
        compute(name, out, False, *tensors)
        return out

    def explain(*tensors: Tensor, out_dtype=None, deterministic=True) -> Explanation:
        problem.result(*tensors, out_dtype=out_dtype)
        return Explanation("torch", how)

    def prepare(out: Tensor, *tensors: Tensor) -> tuple[Callable[[], None], Explanation]:
        return (lambda: compute(name, out, False, *tensors)), Explanation("torch", how)

    OPS[name].explain[device], OPS[name].prepare[device] = explain, prepare
    OPS[name].serve(device, launch)
    serve_into(device, name, compute, lambda *call: Explanation("torch", how))


def serve_into(device: str, name: str, write: Compute, explain: Callable[..., Explanation]) -> None:
    """Registers the forms of ``name`` that write or add into a tensor of the caller, which they check.

    ``explain`` takes the arguments of ``write``.
    """
    problem = PROBLEMS[name]
    batched = name.startswith("batched")  # its first size is tied to the weight's
    rows = (
        not name.endswith("_wgrad"),
        *(argument in ("x", "g") for argument in problem.arguments),
    )
    known = _CheckedCalls(tuple(has and not batched for has in rows))

    def forms(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def call_out(*tensors: Tensor, out: Tensor, deterministic=True) -> Any:
            return checked(f"{name}_out", out, False, tensors)

        def call_accumulate(out: Tensor, *tensors: Tensor, deterministic=True) -> Any:
            return checked(f"{name}_", out, True, tensors)

        def checked(op: str, out: Tensor, accumulate: bool, tensors: tuple[Tensor, ...]) -> Any:
            if not known.hold(out, *tensors):
                problem.check_out(op, out, *tensors)
                problem.check_no_overlap(op, out, *tensors)
                known.add(out, *tensors)
            return function(op, out, accumulate, *tensors)

        return call_out, call_accumulate

    for suffix, launch, explain_form in zip(
        ("_out", "_"), forms(write), forms(explain), strict=True
    ):
        if name + suffix in OPS:
            OPS[name + suffix].serve(device, launch)
            OPS[name + suffix].explain[device] = explain_form


class _CheckedCalls:
    """The calls of the writing forms that passed their checks, ``(out, *tensors)``, by their geometry.

    Args:
        has_rows: of each tensor, whether its first size is the number of rows, which may differ from call to call.
    """

    MAX = 32

    def __init__(self, has_rows: tuple[bool, ...]) -> None:
        self._has_rows = has_rows
        self._with_rows = [i for i, has in enumerate(has_rows) if has]
        self._known: tuple[tuple[Callable[..., bool], list[tuple[int, int]]], ...] = ()

    def hold(self, out: Tensor, *inputs: Tensor) -> bool:
        """Whether a call like this one passed the checks, and ``out`` shares no memory with an input."""
        tensors = out, *inputs
        for check, (own, *others) in self._known:
            if not check(*tensors):
                continue
            sizes = [tensors[i].shape[0] for i in self._with_rows] or [1]
            rows = sizes[0]
            if rows == 0 or any(size != rows for size in sizes):
                return False
            first = out.data_ptr()
            last = first + own[0] + rows * own[1]
            for t, (fixed, row) in zip(inputs, others, strict=True):
                begin = t.data_ptr()
                if begin < last and first < begin + fixed + rows * row:
                    return False
            return True
        return False

    def add(self, *tensors: Tensor) -> None:
        # The guards refuse a tensor that comes twice; empty ones have no extent.
        twice = len(set(map(id, tensors))) < len(tensors)
        if TensorGuards is None or twice or any(0 in t.shape for t in tensors):
            return
        spans = []  # in bytes: what all calls have, and what each row adds
        for t, has_rows in zip(tensors, self._has_rows, strict=True):
            row = t.stride(0) * t.element_size() if has_rows else 0
            spans.append((span(t) * t.element_size() - t.shape[0] * row, row))
        check = recogniser(tensors, self._has_rows)
        self._known = ((check, spans), *self._known[: self.MAX - 1])
