"""Routes: how a call is served, decided once for each geometry and kept in bounded caches.

A route is found by the call's own tensors (shapes, strides, dtypes, devices, alignment), never by their
identity, and holds none of them. A call with other tensors of the same geometry runs the same route with
its own addresses. The number of rows M enters as a bucket alone: in training it changes at every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from .._eager import forget_calls
from .._explanation import Explanation
from .._library import Direct
from .._log import forget, log_route
from .._serve import below_autograd
from .geometry import bucket_range, rows_bucket

MAX_ROUTES = 1024

AFTER_COPY = "after the copy: "
"""Begins the name of a cache whose routes serve the copies that another route made."""

CACHES: dict[str, RouteCache] = {}
"""The caches by name."""


@dataclass(frozen=True)
class Route:
    """How one geometry of a call is served.

    Attributes:
        run: ``(out, *tensors)`` serves the call; that of a kernel returns ``out``, which may be None.
        explanation: what :func:`cake_ops.explain` says of it.
    """

    run: Callable[..., Any]
    explanation: Explanation


class RouteCache:
    """The routes of one operator, bounded: the oldest half goes when it is full. A new one is logged.

    Args:
        make: ``(*call)`` makes the route of a call.
        name: the operator, as the log names it.
        writes: the call begins with the tensor that is written.
    """

    __slots__ = ("_lock", "_make", "_name", "_routes", "_writes", "get")

    def __init__(self, make: Callable[..., Route], name: str, writes: bool = False) -> None:
        self._routes: dict[Any, Route] = {}
        self._make, self._name, self._writes = make, name, writes
        self._lock = threading.RLock()  # what the garbage collector runs may come back here
        self.get = self._routes.get
        CACHES[name] = self

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, key: Any, *call: Any) -> Route:
        route = self._make(*call)
        with self._lock:
            if key not in self._routes:  # another thread may have come first
                out, operands = (call[0], call[1:]) if self._writes else (None, call)
                log_route(self._name, out, operands, route.explanation)
            if len(self._routes) >= MAX_ROUTES:
                for old in list(self._routes)[: MAX_ROUTES // 2]:
                    del self._routes[old]
            self._routes[key] = route
        return route

    def clear(self) -> None:
        with self._lock:
            self._routes.clear()


def torch_route(run: Callable[..., Any], path: str, reason: str) -> Route:
    """A route that works through torch, alone or around a kernel: as a backend, below autograd and autocast."""
    return Route(below_autograd(run), Explanation(path, reason))


def allocating(route: Route, allocate: Callable[..., Tensor]) -> Route:
    """``route``, whose ``run`` also takes None for ``out``: it allocates the result and returns it."""
    if route.explanation.path == "kernel":  # a plan does so itself
        return route

    def run(out: None, *tensors: Tensor) -> Tensor:
        result = allocate(*tensors)
        route.run(result, *tensors)
        return result

    return Route(run, route.explanation)


def direct_launch(route: Route | None, rows: int) -> Direct | None:
    """What the eager fast path may know of a call that ``route``, made by a launch, serves."""
    return None if route is None else Direct(*bucket_range(rows), partial(route.run, None))


def call_key(a: Tensor, b: Tensor, offs: Tensor, b_has_rows: bool = False) -> tuple[Any, ...]:
    """The geometry of a call. The first operand has M rows, the second should have as many with
    ``b_has_rows``; M enters as a bucket. Strides tell how many dimensions a tensor has, and only a first
    operand that is a matrix comes so far that its route is kept."""
    b_shape = b.shape
    try:
        M, columns = a.shape
        rows = rows_bucket(M)
        if b_has_rows:
            b_rows, b_shape = b_shape
            # A call that does not fit has a key of its own: none of M = 0, which False would equal.
            rows = rows if M == b_rows else -1
    except ValueError:  # no matrix
        rows, columns = -1, -1
    return (
        rows,
        columns,
        b_shape,
        offs.shape,
        a.stride(),
        b.stride(),
        offs.stride(),
        a.dtype,
        b.dtype,
        offs.dtype,
        a.get_device(),
        b.get_device(),
        offs.get_device(),
        a.data_ptr() & 15,
        b.data_ptr() & 15,
    )


def out_key(out: Tensor) -> tuple[Any, ...]:
    """The geometry of a tensor that is written; its first size follows from the others of the call."""
    return out.shape[1:], out.stride(), out.dtype, out.get_device(), out.data_ptr() & 15


def row_stride(t: Tensor) -> int:
    """The row stride of a matrix, or of a stack's, that a tensor map can address, else 0: unit stride, rows and
    base of 16 bytes. That of a single row is never used."""
    rows, columns = t.shape[-2:]
    granule = 16 // t.element_size()
    ld = t.stride(-2) if rows > 1 else columns + -columns % granule
    unit = t.stride(-1) == 1 or columns == 1
    return ld if unit and ld >= columns and ld % granule == 0 and t.data_ptr() % 16 == 0 else 0


def clear_caches() -> None:
    """Forgets every route, prepared launch and tensor map. Calls after it plan anew."""
    for cache in CACHES.values():
        cache.clear()
    forget_calls()
    forget()
