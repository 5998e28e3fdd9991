"""Where the host time of an eager call goes: each part of a call timed by itself, in loops.

The parts are the recognition of a call by :mod:`cake_ops._eager` and those of the launch of
:mod:`cake_ops.cuda.launch`. What no part explains is given as the rest: it holds the packing of arguments, the
look-ups of device and stream, and the parts' own calls. Shares are differences, so all parts must be of one host speed:
undisturbed times are, while medians on a host that is slow half of the time fall on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

import cake_ops
from cake_ops._library import OPS, PLAIN

__all__ = ["breakdown", "recorded_launches", "timed_parts", "undisturbed"]

Part = tuple[Callable[..., object], tuple[Any, ...]]


@contextmanager
def recorded_launches() -> Iterator[list[tuple[Any, ...]]]:
    """Yields a list of the driver's launch arguments; only plans made inside the context are recorded."""
    from cake_ops.cuda import launch

    launches: list[tuple[Any, ...]] = []
    module = launch.driver()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

        def cuLaunchKernelEx(self, *args: Any) -> Any:
            launches.append(args)
            return module.cuLaunchKernelEx(*args)

    cake_ops.clear_caches()
    try:
        with mock.patch.object(launch, "driver", Recorder):
            yield launches
    finally:
        cake_ops.clear_caches()


def timed_parts(op: str, tensors: tuple[Tensor, ...]) -> tuple[dict[str, Part], object]:
    """What to time, by name, and an object to hold until that is done.

    Args:
        op: grouped_mm or router_mm.
        tensors: its arguments, on a GPU that has kernels.
    """
    from cake_ops.cuda.driver import driver
    from cake_ops.cuda.launch import empty_strided

    with recorded_launches() as launches:
        recorded = cake_ops.prepare(op, *tensors)
        recorded.launch()
    call, out = getattr(cake_ops, op), recorded.out
    call(*tensors)  # it is planned, and remembered
    direct = OPS[op].direct[PLAIN["CUDA"]](*tensors)
    find_a, find_b = ({t.data_ptr(): True}.get for t in tensors[:2])

    def two_maps(a: Tensor, b: Tensor) -> None:
        find_a(a.data_ptr())
        find_b(b.data_ptr())

    parts: dict[str, Part] = {
        "call": (call, tensors),
        "launch": (direct.launch, tensors),
        "allocation": (empty_strided, (tuple(out.shape), out.stride(), out.dtype)),
        "tensor maps": (two_maps, tensors[:2]),
        "driver": (driver().cuLaunchKernelEx, launches[0]),
        "nothing": (lambda *call: None, tensors),
    }
    return parts, recorded


def undisturbed(us: Sequence[float]) -> float:
    """The time that a tenth of the rounds undercut. A minimum would be an arm's luckiest round."""
    return sorted(us)[len(us) // 10]


def breakdown(us: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The parts' undisturbed shares of a call, in microseconds, less the cost of calling a part at all."""
    nothing = undisturbed(us["nothing"])
    part = {name: undisturbed(times) - nothing for name, times in us.items()}
    inside = ("allocation", "tensor maps", "driver")
    return {
        "whole call": part["call"],
        "recognition": part["call"] - part["launch"],
        "allocation": part["allocation"],
        "tensor maps": part["tensor maps"],
        "driver's launch": part["driver"],
        "rest": part["launch"] - sum(part[name] for name in inside),
    }
