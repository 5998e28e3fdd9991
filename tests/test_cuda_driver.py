"""Loading a kernel, on a fake driver: in which context, in which capture mode, and what is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cake_ops.cuda import driver


class Fake:
    """A driver of two devices. Device 1 is current in this thread, which captures in the global mode."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared memory"
    )
    CUkernel = staticmethod(lambda handle: ("kernel", handle))

    def __init__(self) -> None:
        self.contexts = ["primary 1"]
        self.mode = "global"
        self.retained: list[int] = []
        self.attributes: list[tuple[Any, ...]] = []
        self.status: Any = 0

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.retained.append(device)
        return 0, f"primary {device}"

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return 0, self.contexts.pop()

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Any, ...]:
        before, self.mode = self.mode, mode
        return 0, before

    def cuKernelSetAttribute(self, *call: Any) -> tuple[Any, ...]:
        self.attributes.append(call)
        return (0,)

    def cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:
        assert self.mode == "relaxed"
        return self.status, ("function", kernel, self.contexts[-1])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake = Fake()
    monkeypatch.setattr(driver, "driver", lambda: fake)
    monkeypatch.setattr(driver, "_load", {"one": SimpleNamespace(handle=7)}.__getitem__)
    for cached in (driver.kernel, driver._primary_context):
        cached.cache_clear()
    yield fake
    for cached in (driver.kernel, driver._primary_context):
        cached.cache_clear()


def left_behind(fake: Fake) -> tuple[list[str], str]:
    return fake.contexts, fake.mode


def test_each_device_has_the_function_of_its_own_primary_context(fake: Fake) -> None:
    for device in (0, 1, 0):
        function = driver.kernel("one", device, 1000)
        assert function == ("function", ("kernel", 7), f"primary {device}")
        assert left_behind(fake) == (["primary 1"], "global")
    assert fake.retained == [0, 1]
    assert fake.attributes == [("shared memory", 1000, ("kernel", 7), d) for d in (0, 1)]


def test_a_failure_leaves_context_and_capture_mode_as_they_were(fake: Fake) -> None:
    fake.status = SimpleNamespace(name="CUDA_ERROR_NOT_FOUND")
    with pytest.raises(RuntimeError, match="the CUDA driver reports CUDA_ERROR_NOT_FOUND"):
        driver.kernel("one", 0, 1000)
    with pytest.raises(KeyError):
        driver.kernel("another", 0, 1000)
    assert left_behind(fake) == (["primary 1"], "global")
    fake.status = 0
    assert driver.kernel("one", 0, 1000)[0] == "function"


def test_a_thread_without_a_context_gets_the_one_of_the_device(fake: Fake) -> None:
    current = [0]
    fake.cuCtxGetCurrent = lambda: (0, current[0])
    fake.cuCtxSetCurrent = lambda context: (0, current.append(context))
    driver.bind_context(1)
    current[0] = 5
    driver.bind_context(0)
    assert current == [5, "primary 1"] and fake.retained == [1]
