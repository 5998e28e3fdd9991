"""Names for profilers: a range around each launch, off unless asked for.

``torch.profiler`` needs nothing from here. While it records, every call takes the dispatcher and is an event
``cake::grouped_mm`` of its own, with shapes under ``record_shapes=True``, and so are the products of a backward
pass; its host time is then that of ``torch.ops.cake``, some microseconds more than otherwise. (An
``ExecutionTraceObserver`` without a profiler sees first calls alone.) Kernels have
names such as ``sm90_grouped_gemm_nt_...``. :func:`ranges` adds what those leave out: the launch apart from
the dispatch and autograd before it, and NVTX ranges with shapes for Nsight Systems and Nsight Compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from ._environment import flag
from ._library import NAMESPACE
from ._log import describe
from .testing import _swapped

__all__ = ["ranges"]


@contextmanager
def ranges(*, nvtx: bool = False) -> Iterator[None]:
    """Puts a range around every launch in this process while the context is open.

    A range is named after the operator and its tensors, such as
    ``cake::grouped_mm(bfloat16[300, 64], bfloat16[2, 128, 64], int32[2])``. Launches of
    :func:`cake_ops.prepare` have none. Closed, it costs nothing: the launches themselves are exchanged.

    Args:
        nvtx: make NVTX ranges, for Nsight; by default they are those of ``torch.profiler.record_function``.
            ``CAKE_NVTX=1`` in the environment opens NVTX ranges for the whole process.

    Raises:
        RuntimeError: ``nvtx`` with a PyTorch that has no NVTX (a CPU build).
    """
    if nvtx:
        _require_nvtx()
    open_range = torch.cuda.nvtx.range if nvtx else torch.profiler.record_function

    def wrap(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(launch)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            with open_range(f"{NAMESPACE}::{name}({describe(*tensors)})"):
                return launch(*args, **kwargs)

        return ranged

    with _swapped(wrap):
        yield


def _require_nvtx() -> None:
    try:
        torch.cuda.nvtx.mark("cake_ops.profiling.ranges")
    except RuntimeError as error:
        raise RuntimeError(
            "cake_ops.profiling: NVTX ranges (nvtx=True, CAKE_NVTX=1) need a CUDA build of PyTorch"
        ) from error


_of_process = ExitStack()  # it keeps the ranges open: a context manager that is dropped closes
if flag("CAKE_NVTX"):
    _of_process.enter_context(ranges(nvtx=True))
