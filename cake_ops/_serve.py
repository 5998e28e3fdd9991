"""Turns one function into the launches of an operator in all its forms, plain, ``_out`` and ``_``.

:func:`serve` is for backends that compute through torch. The CUDA kernels have a plain launch of their own, which
checks a call only when its geometry is new; their writing forms are made by :func:`serve_into` too.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import DEBUG
from typing import Any

from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView, _DisableAutocast

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

    def forms(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def call_out(*tensors: Tensor, out: Tensor, deterministic=True) -> Any:
            return checked(f"{name}_out", out, False, tensors)

        def call_accumulate(out: Tensor, *tensors: Tensor, deterministic=True) -> Any:
            return checked(f"{name}_", out, True, tensors)

        def checked(op: str, out: Tensor, accumulate: bool, tensors: tuple[Tensor, ...]) -> Any:
            problem.check_out(op, out, *tensors)
            problem.check_no_overlap(op, out, *tensors)
            return function(op, out, accumulate, *tensors)

        return call_out, call_accumulate

    for suffix, launch, explain_form in zip(
        ("_out", "_"), forms(write), forms(explain), strict=True
    ):
        if name + suffix in OPS:
            OPS[name + suffix].serve(device, launch)
            OPS[name + suffix].explain[device] = explain_form
