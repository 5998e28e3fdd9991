"""Looking at and preparing launches: which kernel serves a call, launches without planning, caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._checks import check_out_dtype
from ._explanation import Explanation
from ._library import OPS, operator_name
from ._problem import PROBLEMS

__all__ = ["Explanation", "Prepared", "clear_caches", "explain", "prepare", "warmup"]


def _name_among(names: Iterable[str], op: str | Callable[..., Any]) -> str:
    name = operator_name(op)
    if name not in names:
        raise RuntimeError(f"cake_ops: op must be one of {', '.join(names)}, got {name!r}")
    return name


def _device_key(tensors: tuple[Tensor, ...]) -> str:
    are_tensors = all(isinstance(t, Tensor) for t in tensors)
    key = tensors[0].device.type.upper() if tensors and are_tensors else "none"
    if key not in ("CPU", "CUDA"):
        got = {str(t.device) if isinstance(t, Tensor) else type(t).__name__ for t in tensors}
        raise RuntimeError(
            "cake_ops: the operator's tensors (positional) must be on a CPU or CUDA device, got"
            f" {', '.join(sorted(got)) or 'no tensors'}"
        )
    return key


def _check_arguments(name: str, tensors: tuple[Tensor, ...], options: Iterable[str]) -> None:
    """The operator takes as many tensors, has these options, and needs no other."""
    schema, given = OPS[name].overload._schema, set(options)
    named = [argument for argument in schema.arguments if argument.kwarg_only]
    known = {argument.name for argument in named}
    needed = {argument.name for argument in named if not argument.has_default_value()}
    count = len(schema.arguments) - len(named)
    if len(tensors) != count or not needed <= given <= known:
        raise RuntimeError(
            f"cake_ops: {schema} cannot be called with {len(tensors)} positional tensors and"
            f" {'options ' + ', '.join(sorted(given)) if given else 'no options'}"
        )


def explain(op: str | Callable[..., Any], *tensors: Tensor, **options: Any) -> Explanation:
    """Says how a call would be served, without running it.

    Args:
        op: an operator's name, its public function, such as ``cake_ops.grouped_mm``, or
            ``torch.ops.cake.<name>``. Another function of the same name is refused.
        tensors: the call's tensors, in order; only their geometry is looked at. Those of a function that
            adds, such as :func:`cake_ops.grouped_mm_wgrad_`, begin with ``out``.
        options: the call's keyword arguments, such as ``out_dtype`` and ``out``.

    Returns:
        An :class:`Explanation`; ``print`` shows it in a line.

    Raises:
        RuntimeError: the operator refuses the call, with the operator's message.
    """
    name, device = _name_among(OPS, op), _device_key(tensors)
    has_out = name in PROBLEMS and f"{name}_out" in OPS
    out = options.pop("out", None) if has_out else None
    _check_arguments(name, tensors, options)
    if out is not None:
        check_out_dtype(f"{name}_out", out, options.get("out_dtype"))
        name, options = f"{name}_out", {"out": out}
    return OPS[name].explain[device](*tensors, **options)


class Prepared:
    """A launch with its arguments, made by :func:`prepare`; it keeps them alive.

    Nothing stands between it and the backend: :func:`cake_ops.testing.count_launches` does not count it,
    :func:`cake_ops.testing.null_kernels` does not replace it, :func:`cake_ops.profiling.ranges` and
    ``CAKE_NVTX`` put no range around it, ``CAKE_CHECK_OFFS`` does not check its ``offs``, and autograd is
    not told that ``out`` was written.

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

        Where ``explanation.path`` is ``"kernel"`` or ``"no kernel"`` it neither allocates nor waits, and can be
        captured in a CUDA graph. Where it is ``"torch"``, it does what torch does.
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
        op: an operator as for :func:`explain`, in the form that allocates its result.
        tensors: its arguments. Their storage must stay where it is.
        out_dtype, deterministic: the operator's options.
        out: where results go; by default a new tensor.

    Returns:
        A :class:`Prepared`, which says what its launches do and what they leave out.

    Raises:
        RuntimeError: the operator refuses the arguments, or no kernel can run on them as they lie on
            CUDA (the message says why; make them contiguous).
    """
    name, device = _name_among(PROBLEMS, op), _device_key(tensors)
    problem = PROBLEMS[name]
    options = {"out_dtype": out_dtype is not None, "deterministic": not deterministic}
    _check_arguments(name, tensors, [option for option, is_set in options.items() if is_set])
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
