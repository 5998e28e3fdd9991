"""Which kernel configuration serves the router GEMMs on CUDA: look, override, go back.

Each call is served by the first of these that fits it: an override set here, a measurement of the user's own
(``python -m cake_ops.bench router --tune``), one shipped with the package, else a cost model.
:func:`cake_ops.explain` says which. A change is used at the very next call; a launch made by
:func:`cake_ops.prepare` or captured in a CUDA graph keeps what it was made with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._library import operator_name
from .cuda.router_config import LAYOUTS
from .cuda.router_verdicts import TABLE, RouterRoute

__all__ = ["RouterRoute", "reset_router_routes", "router_routes", "set_router_route"]


def router_routes(op: str | Callable[..., Any] | None = None) -> list[RouterRoute]:
    """Returns the verdicts of ``op`` (by default of all three), in the order in which a call looks for its own.

    Overrides come first, the latest before the others, then the user's measurements, then the shipped ones.

    Raises:
        RuntimeError: ``op`` is no operator of the router.
    """
    name = None if op is None else _name(op)
    return [route for route in TABLE.routes() if name in (None, route.op)]


def set_router_route(
    op: str | Callable[..., Any],
    config: str,
    *,
    N: int | None = None,
    H: int | None = None,
    min_T: int = 1,
    max_T: int | None = None,
    gpu: str | None = None,
) -> RouterRoute:
    """Makes ``config`` serve calls of ``op`` in this process, before every other verdict.

    It serves calls whose operand has its dtype (see :class:`RouterRoute`) and which lie in its window; a
    window of T reaches to the ends of the buckets that its bounds lie in (three significant bits of T). A call
    that the configuration cannot compute goes on to the next verdict: of weight gradients those that do not
    split the tokens (``_k1``) take 2048 at most, since longer FP32 sums are less accurate.

    Args:
        op: ``"router_mm"``, ``"router_mm_dgrad"`` or ``"router_mm_wgrad"``, or the public function.
        config: name of a configuration, such as ``"nt_f32_64x24_k8"``.
        N, H: the experts and hidden size it is for; None: any.
        min_T, max_T: the numbers of tokens it is for, both ends included.
        gpu: the GPU it is for, as ``torch.cuda.get_device_name()`` gives it; None: any.

    Raises:
        RuntimeError: no such configuration, or a bad window.
    """
    route = RouterRoute(_name(op), config, N, H, min_T, max_T, gpu)
    TABLE.override(route)
    return route


def reset_router_routes() -> None:
    """Forgets all overrides of this process and reads the measurements anew from their files."""
    TABLE.reset()


def _name(op: str | Callable[..., Any]) -> str:
    name = operator_name(op)
    if name not in LAYOUTS:
        raise RuntimeError(f"cake_ops: op must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return name
