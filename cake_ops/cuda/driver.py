"""The driver: kernels from cubins, contexts, and errors.

``cuda.bindings`` is imported at the first CUDA call, never by ``import cake_ops``. A cubin is loaded once
through ``cuda.core``, independent of contexts; what is launched is the function that the primary context
of a device, torch's own, has of it.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from types import ModuleType
from typing import Any


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


@functools.cache
def _primary_context(device: int) -> Any:
    """The context of ``device`` that torch uses, retained for good."""
    return check(driver().cuDevicePrimaryCtxRetain(device))


def bind_context(device: int) -> None:
    """Makes the device's primary context current in a thread that has none, such as one of autograd's."""
    cu = driver()
    if not int(check(cu.cuCtxGetCurrent())):
        check(cu.cuCtxSetCurrent(_primary_context(device)))


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
    """The function of a kernel in the primary context of ``device``, whichever context is current. It may
    use ``smem_bytes`` of dynamic shared memory.

    The driver launches a kernel without a context too, but that takes 3.8 to 5.6 us instead of 3.4 to 5.3
    (H200). Loading is not part of a graph, so a capture that is under way must not refuse it.
    """
    cu = driver()
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(cu.cuCtxPushCurrent(_primary_context(device)))
    mode = check(cu.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        loaded = cu.CUkernel(int(_load(name).handle))
        check(cu.cuKernelSetAttribute(attribute, smem_bytes, loaded, device))
        return check(cu.cuKernelGetFunction(loaded))
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(mode))
        check(cu.cuCtxPopCurrent())
