"""Looking at and preparing launches: which kernel serves a call, launches without planning, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._checks import check_out_dtype
from ._explanation import Explanation
from ._library import OPS, operator_name
from ._problem import PROBLEMS

__all__ = ["Explanation", "Prepared", "clear_caches", "explain", "prepare", "warmup"]


def _problem_name(op: str | Callable[..., Any]) -> str:
    name = operator_name(op)
    if name not in PROBLEMS:
        raise RuntimeError(f"cake_ops: op must be one of {', '.join(PROBLEMS)}, got {name!r}")
    return name


def _device_key(tensors: tuple[Tensor, ...]) -> str:
    devices = {str(t.device) for t in tensors}
    key = tensors[0].device.type.upper() if tensors else "none"
    if key not in ("CPU", "CUDA"):
        raise RuntimeError(
            "cake_ops: the operator's tensors (positional) must be on a CPU or CUDA device, got"
            f" {', '.join(sorted(devices)) or 'no tensors'}"
        )
    return key


def explain(op: str | Callable[..., Any], *tensors: Tensor, **options: Any) -> Explanation:
    """Says how a call would be served, without running it.

    Args:
        op: an operator's name or public function, such as ``cake_ops.grouped_mm``. The forms that write
            or add into ``out`` are served as the operator itself.
        tensors: its arguments; only their geometry is looked at.
        options: its keyword arguments, such as ``out_dtype``.

    Returns:
        An :class:`Explanation`; ``print`` shows it in a line. Arguments that the operator refuses raise
        the operator's error.
    """
    return OPS[_problem_name(op)].explain[_device_key(tensors)](*tensors, **options)


class Prepared:
    """A launch with its arguments, made by :func:`prepare`; it keeps them alive.

    Attributes:
        out: the tensor each launch writes.
        explanation: what is launched.
    """

    __slots__ = ("_held", "_launch", "explanation", "out")

    def __init__(
        self, launch: Callable[[], None], explanation: Explanation, held: tuple[Tensor, ...]
    ) -> None:
        self._launch, self._held = launch, held
        self.explanation, self.out = explanation, held[0]

    def launch(self) -> Tensor:
        """Computes ``out`` from the present values of the tensors, on the current stream.

        On CUDA it neither allocates nor waits, and can be captured in a CUDA graph.
        """
        self._launch()
        return self.out


def prepare(
    op: str | Callable[..., Any],
    *tensors: Tensor,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    out: Tensor | None = None,
) -> Prepared:
    """Checks and plans a call once, to be launched many times on the same tensors with new values.

    Args:
        op: an operator's name or public function.
        tensors: its arguments. Their storage must stay where it is.
        out_dtype, deterministic: the operator's options.
        out: where results go; by default a new tensor.

    Raises:
        RuntimeError: the operator refuses the arguments, or no kernel can run on them as they lie on
            CUDA (the message says why; make them contiguous).
    """
    name, device = _problem_name(op), _device_key(tensors)
    problem = PROBLEMS[name]
    for t in (*tensors, *((out,) if out is not None else ())):
        if type(t) not in (Tensor, torch.nn.Parameter) or t.is_neg():
            raise RuntimeError(
                f"cake::{name}: a launch is prepared on the memory of plain tensors, got a"
                f" {type(t).__name__} with is_neg() {t.is_neg()}; use to_local() or resolve_neg()"
            )
    if out is None:
        out = problem.allocate(*tensors, out_dtype=out_dtype)
    else:
        check_out_dtype(f"{name}_out", out, out_dtype)
        problem.check_out(f"{name}_out", out, *tensors)
        problem.check_no_overlap(f"{name}_out", out, *tensors)
    held = tuple(t.detach() for t in (out, *tensors))
    return Prepared(*OPS[name].prepare[device](*held), held)


def warmup(device: torch.device | int | None = None) -> None:
    """Loads every kernel on a CUDA device (by default the current one).

    Call it before capturing a CUDA graph whose first call of an operator lies inside the capture. It
    does nothing where there is no CUDA device or no kernel for it.
    """
    if torch.cuda.is_available():
        from .cuda import grouped_mm, router_mm

        index = torch.cuda.current_device() if device is None else torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        grouped_mm.load_kernels(index)
        router_mm.load_kernels(index)


def clear_caches() -> None:
    """Forgets every planned launch and tensor map. Results do not change; the next calls plan anew."""
    from .cuda.routes import clear_caches

    clear_caches()
