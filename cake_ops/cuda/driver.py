"""The driver: kernels from cubins, contexts, and errors.

``cuda.bindings`` is imported at the first CUDA call, never by ``import cake_ops``. Kernels are loaded
through ``cuda.core`` as context-independent handles, so one handle serves every device and every thread.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from types import ModuleType
from typing import Any

_contexts: dict[int, Any] = {}  # device index -> retained primary context


@functools.cache
def driver() -> ModuleType:
    """``cuda.bindings.driver``, initialised."""
    from cuda.bindings import driver as module

    check(module.cuInit(0))
    return module


def check(result: tuple) -> Any:
    """Returns what a driver call gave besides its status, or raises ``RuntimeError`` naming the error."""
    status, *values = result
    if status:
        advice = "; call cake_ops.warmup() before the capture" if "CAPTURE" in status.name else ""
        raise RuntimeError(f"cake_ops: the CUDA driver reports {status.name}{advice}")
    return values[0] if len(values) == 1 else tuple(values)


def bind_context(device: int) -> None:
    """Makes the device's primary context current in a thread that has none, such as one of autograd's."""
    cu = driver()
    if int(check(cu.cuCtxGetCurrent())):
        return
    context = _contexts.get(device)
    if context is None:
        context = _contexts.setdefault(device, check(cu.cuDevicePrimaryCtxRetain(device)))
    check(cu.cuCtxSetCurrent(context))


@functools.cache
def manifest() -> dict[str, dict[str, Any]]:
    """What the build says of each kernel: file, symbol, arch, registers, spills."""
    return json.loads((files("cake_ops") / "kernels" / "manifest.json").read_text())["kernels"]


@functools.cache
def _load(name: str) -> Any:
    from cuda.core import ObjectCode

    entry = manifest()[name]
    cubin = (files("cake_ops") / "kernels" / entry["file"]).read_bytes()
    return ObjectCode.from_cubin(cubin, name=name).get_kernel(entry["symbol"])


@functools.cache
def kernel(name: str, device: int, smem_bytes: int) -> Any:
    """The handle of a kernel that may use ``smem_bytes`` of dynamic shared memory on ``device``.

    Loading is not part of a graph, so a capture that is under way must not refuse it.
    """
    cu = driver()
    bind_context(device)
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = check(cu.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        handle = cu.CUkernel(int(_load(name).handle))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuKernelSetAttribute(attribute, smem_bytes, handle, device))
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(mode))
    return handle
