"""Tools for tests and benchmarks of programs that use the operators: count launches, or leave them out.

They swap the launch functions of all operators in this process while the context is open. A launch is a
real computation by a backend; a dispatcher event or a node of a trace is not one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ._eager import forget_calls
from ._library import OPS
from ._problem import PROBLEMS

__all__ = ["count_launches", "null_kernels"]

Launch = Callable[..., Any]


@contextmanager
def _swapped(wrap: Callable[[str, Launch], Launch]) -> Iterator[None]:
    before = {name: (dict(op.launch), dict(op.direct)) for name, op in OPS.items()}
    try:
        for name, op in OPS.items():
            op.direct.clear()  # the eager fast path takes the launches too
            for key, launch in before[name][0].items():
                op.launch[key] = wrap(name, launch)
        forget_calls()
        yield
    finally:
        for name, op in OPS.items():
            launches, direct = before[name]
            op.launch.update(launches)
            op.direct.update(direct)
        forget_calls()


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Yields a counter of operator name -> launches while the context is open.

    Example::

        with cake_ops.testing.count_launches() as launches:
            step()
        assert launches["grouped_mm"] == 2
    """
    launches: Counter[str] = Counter()
    lock = threading.Lock()  # a backward pass may launch from several threads

    def wrap(name: str, launch: Launch) -> Launch:
        @wraps(launch)
        def counting(*args, **kwargs):
            with lock:
                launches[name] += 1
            return launch(*args, **kwargs)

        return counting

    with _swapped(wrap):
        yield launches


@contextmanager
def null_kernels() -> Iterator[None]:
    """Replaces every launch by one that only allocates its (uninitialised) result.

    What is left of a call's time is the cost of getting to a launch: dispatch, autograd, allocation.
    """

    def wrap(name: str, launch: Launch) -> Launch:
        if OPS[name].mutates:
            return lambda *args, **kwargs: None
        if name == "grouped_mm":  # as its CUDA launch: a known geometry is not checked again
            return lambda x, w, offs, *, deterministic=True: x.new_empty(x.shape[0], w.shape[-2])
        problem = PROBLEMS[name]
        return lambda *args, out_dtype=None, deterministic=True: problem.allocate(
            *args, out_dtype=out_dtype
        )

    with _swapped(wrap):
        yield
