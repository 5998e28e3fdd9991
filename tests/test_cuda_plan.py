"""Launching without a GPU, on a driver that only looks: argument blocks, grids, streams, tensor maps.

The plans are like those of the grouped GEMMs, which take offsets, and like those of the router, which do not. A
test called after a case (h54, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cake_ops.cuda import launch, tensor_map
from cake_ops.cuda.geometry import ROWS, TensorMapGeometry
from cake_ops.cuda.grouped_config import THREADS, rows_map
from cake_ops.cuda.launch import I32, I64, MAX_STREAMS, POINTER, Plan, Result
from cake_ops.cuda.tensor_map import MAX_ADDRESSES, MapTable


class Driver:
    """Stands in for ``cuda.bindings.driver``: decodes what would be launched."""

    def __init__(self) -> None:
        bindings = pytest.importorskip("cuda.bindings.driver")
        for name in ("CUlaunchConfig", "CUstream", "CUlaunchAttribute", "CUlaunchAttributeID"):
            setattr(self, name, getattr(bindings, name))
        self.launches: list[SimpleNamespace] = []
        self.widths: list[type[ctypes._SimpleCData]] = []
        self.statuses: list[SimpleNamespace] = []
        self.during: Callable[[], None] = lambda: None
        self.device, self.stream = 0, 0
        self.bound: list[int] = []
        self.allocated: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, config: Any, kernel: Any, table: int, extra: int) -> tuple[Any]:
        values = self.values(table)
        self.during()
        assert self.values(table) == values, "another launch wrote into the argument block"
        self.launches.append(
            SimpleNamespace(kernel=kernel, config=config, values=values, device=self.device)
        )
        return (self.statuses.pop(0) if self.statuses else 0,)

    def values(self, table: int) -> list[int]:
        """The parameters behind the argument table, read with the widths of the kernel's own."""
        pointers = (ctypes.c_uint64 * len(self.widths)).from_address(table)
        return [
            width.from_address(pointer).value
            for width, pointer in zip(self.widths, pointers, strict=True)
        ]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()

    def exchange_device(index: int) -> int:
        before, fake.device = fake.device, index
        return before

    def empty_strided(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
        assert type(sizes) is type(strides) is tuple  # not a torch.Size
        fake.allocated.append((fake.device, sizes, strides, dtype))
        (out,) = at(0x1000)
        return out

    def encode(address: int, rows: int, geometry: TensorMapGeometry) -> tuple[int, Any]:
        assert (rows > 0) == (ROWS in geometry.dims)
        owner = ctypes.c_uint64(
            address + (rows << 48)
        )  # in the place of a map, its address and rows
        return ctypes.addressof(owner), owner

    monkeypatch.setattr(launch, "driver", lambda: fake)
    monkeypatch.setattr(launch, "kernel", lambda *call: call)
    monkeypatch.setattr(launch, "bind_context", fake.bound.append)
    monkeypatch.setattr(tensor_map, "bind_context", lambda device: None)
    monkeypatch.setattr(tensor_map, "_encode", encode)
    monkeypatch.setattr(launch, "empty_strided", empty_strided)
    monkeypatch.setattr(torch._C, "_cuda_exchangeDevice", exchange_device, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: fake.stream, raising=False
    )
    yield fake


OTHER_MAPS = [TensorMapGeometry("bf16", (n, 128), (2 * n,), (64, 64)) for n in (64, 72)]
MAPS = (rows_map(64, 64), *OTHER_MAPS)
PARAMETERS = (POINTER, (I64, 1 << 40), POINTER, (I32, ROWS), (I32, -3))


RESULT = ((ROWS, 72), (72, 1), torch.bfloat16)


def plan(driver: Driver, result: Result = RESULT, maps: int = 3) -> Plan:
    pointers = [ctypes.c_uint64] * maps
    driver.widths = [*pointers, ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint64]
    driver.widths += [ctypes.c_int32] * 2
    return Plan("name", 0, 12, THREADS, 1000, MAPS[:maps], PARAMETERS, result)


def at(*addresses: int, rows: int = 7) -> list[Any]:
    """In the place of tensors: a launch asks nothing else of them."""
    return [
        SimpleNamespace(data_ptr=lambda address=address: address, shape=(rows,))
        for address in addresses
    ]


def map_a(address: int, rows: int = 7) -> int:
    """What stands in for the map of the first operand."""
    return address + (rows << 48)


OPERANDS = at(0x10, 0x20, 0x30, 0x40)  # out, a, b, offs


def test_arguments_lie_in_the_order_and_width_of_the_kernel(driver: Driver) -> None:
    launched = plan(driver)
    launched.run(*at(0x7FFF_FFFF_FFF0, 0x20, 0x30, 0x40))
    launched.run(*at(0x20, 0x10, 0x40, 0x54, rows=1 << 30))
    first, second = (call.values for call in driver.launches)
    to = 0x7FFF_FFFF_FFF0
    assert first == [map_a(0x20), 0x30, to, to, 1 << 40, 0x40, 7, -3]
    m = 1 << 30
    assert second == [map_a(0x10, m) % 2**64, 0x40, 0x20, 0x20, 1 << 40, 0x54, m, -3]
    config = driver.launches[0].config
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (12, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (THREADS, 1, 1)
    assert config.sharedMemBytes == 1000 and config.numAttrs == 1
    (attribute,) = config.attrs
    assert attribute.id.name.endswith("PROGRAMMATIC_STREAM_SERIALIZATION")
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert driver.launches[0].kernel == ("name", 0, 1000)


def test_arguments_without_a_map_of_the_result(driver: Driver) -> None:
    plan(driver, maps=2).run(*OPERANDS)
    assert driver.launches[0].values == [map_a(0x20), 0x30, 0x10, 1 << 40, 0x40, 7, -3]


def test_every_stream_has_its_configuration_and_their_number_is_bounded(driver: Driver) -> None:
    launched = plan(driver)
    for stream in (0, 7, 0, *range(100, 100 + 2 * MAX_STREAMS), 0):
        driver.stream = stream
        launched.run(*OPERANDS)
        assert int(driver.launches[-1].config.hStream) == stream
    first, _, again, *_, last = (call.config for call in driver.launches)
    assert again is first and last is not first


def test_h58_launch_happens_on_the_device_of_the_plan(driver: Driver) -> None:
    launched = plan(driver)
    driver.device = 1
    assert launched.run(*OPERANDS) is OPERANDS[0] and not driver.allocated
    launched.run(None, *OPERANDS[1:])
    assert [call[0] for call in driver.allocated] == [0]
    assert [call.device for call in driver.launches] == [0, 0] and driver.device == 1
    driver.statuses = [SimpleNamespace(name="CUDA_ERROR_LAUNCH_FAILED")] * 2
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        launched.run(*OPERANDS)
    assert driver.device == 1


@pytest.mark.parametrize(
    ("result", "sizes"),
    [(RESULT, (7, 72)), (((2, 72, 64), (4608, 64, 1), torch.float32), (2, 72, 64))],
    ids=["rows", "fixed"],
)
def test_a_launch_without_a_result_allocates_it(
    driver: Driver, result: Result, sizes: tuple[int, ...]
) -> None:
    out = plan(driver, result).run(None, *OPERANDS[1:])
    assert driver.allocated == [(0, sizes, *result[1:])]
    assert out.data_ptr() == 0x1000 and driver.launches[0].values[2:4] == [0x1000, 0x1000]


def test_h59_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    launched = plan(driver)
    invalid = SimpleNamespace(name="CUDA_ERROR_INVALID_CONTEXT")
    driver.statuses = [invalid]
    launched.run(*OPERANDS)
    assert driver.bound == [0] and len(driver.launches) == 2
    driver.statuses = [invalid, invalid]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CONTEXT"):
        launched.run(*OPERANDS)


def test_h57_a_refusal_inside_a_capture_names_the_warmup(driver: Driver) -> None:
    refusal = SimpleNamespace(name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    driver.statuses = [refusal, refusal]
    with pytest.raises(RuntimeError, match=r"CAPTURE_UNSUPPORTED; call cake_ops.warmup\(\)"):
        plan(driver).run(*OPERANDS)


def test_launches_at_one_time_have_blocks_of_their_own(driver: Driver) -> None:
    launched = plan(driver)

    def other_thread() -> None:
        driver.during = lambda: None
        with ThreadPoolExecutor(1) as pool:
            pool.submit(launched.run, *at(0x50, 0x60, 0x70, 0x80)).result()

    driver.during = other_thread
    launched.run(*OPERANDS)
    inner, outer = (call.values for call in driver.launches)
    assert inner[:4] == [map_a(0x60), 0x70, 0x50, 0x50]
    assert outer[:4] == [map_a(0x20), 0x30, 0x10, 0x10]


def test_h54_an_evicted_plan_is_freed_without_the_garbage_collector(driver: Driver) -> None:
    """Training loops switch the collector off, and each new number of rows makes a plan."""
    gc.disable()
    try:
        launched = plan(driver)
        launched.run(*OPERANDS)
        run = weakref.ref(launched.run)
        del launched
        assert run() is None
    finally:
        gc.enable()


def test_tensor_maps_are_kept_by_address_and_bounded(driver: Driver) -> None:
    table = MapTable(MAPS[0], 0)
    assert table.get((16, 7)) is None
    kept = table.add((16, 7))
    assert table.get((16, 7)) is kept and table.get((16, 8)) is None
    for address in range(32, 16 * (2 * MAX_ADDRESSES), 16):
        entry = table.add((address, 7))
        assert ctypes.c_uint64.from_address(entry[0]).value == map_a(address)
        assert len(table._entries) <= MAX_ADDRESSES
    assert table.get((16, 7)) is None
    launched = plan(driver)
    for address in range(16, 16 * (3 * MAX_ADDRESSES), 16):
        launched.run(*at(address, 2 * address, 3 * address, 0x40))
        assert driver.launches[-1].values[:3] == [map_a(2 * address), 3 * address, address]


@pytest.mark.parametrize("swizzle", ["NONE", "64B", "128B"])
def test_a_map_is_encoded_as_its_geometry_says(
    monkeypatch: pytest.MonkeyPatch, swizzle: str
) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    calls: list[tuple[Any, ...]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

        def cuTensorMapEncodeTiled(self, *call: Any) -> tuple[Any, ...]:
            calls.append(call)
            return 0, SimpleNamespace(getPtr=lambda: 0x1230)

    monkeypatch.setattr(tensor_map, "driver", Recorder)
    geometry = TensorMapGeometry("f32", (100, ROWS), (400,), (16, 64), swizzle)
    assert tensor_map._encode(0x40, 9, geometry)[0] == 0x1230
    dtype, rank, address, *sizes, _, swizzled, promotion, fill = calls[0]
    assert dtype.name.endswith("FLOAT32") and (rank, address) == (2, 0x40)
    assert [[int(n) for n in values] for values in sizes] == [[100, 9], [400], [16, 64], [1, 1]]
    assert swizzled.name == f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"
    assert promotion.name.endswith("L2_256B") and fill.name.endswith("NONE")


# Without offsets: the router's

ROUTER = (POINTER, POINTER, POINTER, (I64, 1 << 40), (I32, 63), (I32, ROWS), (I32, -3), (I32, 2))
ROUTER_WIDTHS = [ctypes.c_uint64] * 5 + [ctypes.c_int64] + [ctypes.c_int32] * 4


def router_plan(
    driver: Driver,
    swapped: bool = False,
    tile_rows: int | None = 40,
    max_ctas: int | None = None,
) -> Plan:
    driver.widths = ROUTER_WIDTHS
    fixed = TensorMapGeometry("f32", (100, 63), (400,), (32, 128))
    ragged = TensorMapGeometry("f32", (100, ROWS), (400,), (32, 40))
    maps = (fixed, ragged) if swapped else (ragged, fixed)
    return Plan("name", 0, 6, 384, 1000, maps, ROUTER, RESULT, tile_rows, max_ctas, swapped)


def test_arguments_without_offsets_and_map_of_the_result(driver: Driver) -> None:
    router_plan(driver).run(*OPERANDS[:3])
    mapped = 0x20 + (7 << 48)  # the stand-in of the map of operand a with 7 rows
    assert driver.launches[0].values == [mapped, 0x30, 0x10, 0x20, 0x30, 1 << 40, 63, 7, -3, 2]
    assert driver.launches[0].config.gridDimX == 6


def test_swapped_operands_keep_the_rows_of_the_first(driver: Driver) -> None:
    router_plan(driver, swapped=True).run(*OPERANDS[:3])
    mapped = 0x20 + (7 << 48)
    assert driver.launches[0].values == [0x30, mapped, 0x10, 0x30, 0x20, 1 << 40, 63, 7, -3, 2]


def test_both_maps_may_have_rows(driver: Driver) -> None:
    driver.widths = ROUTER_WIDTHS
    ragged = TensorMapGeometry("f32", (100, ROWS), (400,), (32, 32))
    both = Plan("name", 0, 6, 384, 1000, (ragged, ragged), ROUTER, RESULT)
    for rows in (7, 9, 7):
        both.run(*at(0x10, 0x20, 0x30, rows=rows))
        shift = rows << 48
        assert driver.launches[-1].values[:2] == [0x20 + shift, 0x30 + shift]
        assert driver.launches[-1].config.gridDimX == 6


def test_the_grid_follows_the_rows_on_every_stream(driver: Driver) -> None:
    launched = router_plan(driver)
    for stream in (0, 7, *range(100, 100 + 2 * MAX_STREAMS), 7):
        driver.stream = stream
        for rows in (40, 41, 1, 4000, 40):
            launched.run(*at(0x10, 0x20, 0x30, rows=rows))
            config = driver.launches[-1].config
            assert int(config.hStream) == stream and config.gridDimX == 6 * -(-rows // 40)


@pytest.mark.parametrize("tile_rows", [40, None])
def test_the_grid_has_no_more_than_the_most(driver: Driver, tile_rows: int | None) -> None:
    launched = router_plan(driver, tile_rows=tile_rows, max_ctas=13)
    for rows, ctas in ((40, 6), (41, 12), (80, 12), (81, 13), (4000, 13), (1, 6)):
        launched.run(*at(0x10, 0x20, 0x30, rows=rows))
        assert driver.launches[-1].config.gridDimX == (ctas if tile_rows else 6)
    one = router_plan(driver, tile_rows=tile_rows, max_ctas=5)
    one.run(*at(0x10, 0x20, 0x30, rows=1))
    assert driver.launches[-1].config.gridDimX == 5
