"""Planning of the grouped GEMM launches and packing of their arguments, without a GPU.

A test called after a case (h24, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulator import assert_encodable, with_rows

from cake_ops.bench.shapes import large_cases, small_cases
from cake_ops.cuda import launch, tensor_map
from cake_ops.cuda.driver import manifest
from cake_ops.cuda.geometry import MAX_SIZE, ROWS, SMEM_LIMIT, TensorMapGeometry, rows_bucket
from cake_ops.cuda.grouped_config import (
    THREADS,
    GroupedConfig,
    estimated_cycles,
    grid,
    is_valid,
    max_tiles,
    output_map,
    policies,
    ragged_map,
    rows_map,
    select_config,
    weight_map,
)
from cake_ops.cuda.launch import I32, I64, MAX_STREAMS, POINTER, Plan, Result
from cake_ops.cuda.tensor_map import MAX_ADDRESSES, MapTable

OUTPUTS = ("bf16_store", "bf16_add", "f32_store", "f32_add")
CONFIGS = [
    *policies("nt"),
    *policies("nn"),
    *(config for output in OUTPUTS for config in policies("tn", output)),
]
SMS = 132
BASE = 1 << 20  # an address that every tensor map can have

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.symbol)


# Configurations


@each_config
def test_every_policy_is_valid_and_fits(config: GroupedConfig) -> None:
    assert config.smem_bytes <= SMEM_LIMIT
    for M, N, K, E in ((1, 8, 8, 1), (0, 8, 8, 1), (4099, 72, 1000, 3000), (MAX_SIZE, 8, 8, 64)):
        assert is_valid(config, M, N, K, E)


@each_config
def test_what_no_kernel_computes_is_invalid(config: GroupedConfig) -> None:
    for M, N, K, E in (
        (64, 7, 64, 4),
        (64, 64, 100, 4),
        (64, 0, 64, 4),
        (64, 64, 0, 4),
        (64, 64, 64, 0),
        (MAX_SIZE + 1, 64, 64, 4),
        (64, 1 << 31, 64, 4),
        (64, 64, 1 << 31, 4),
        (64, 64, 64, 1 << 31),
        (MAX_SIZE, 1 << 20, 1 << 20, 1 << 20),
    ):
        assert not is_valid(config, M, N, K, E)
        with pytest.raises(RuntimeError, match=f"M = {M}, N = {N}, K = {K}, E = {E} "):
            select_config(config.layout, M, N, K, E, SMS, config.output)


def tiles(config: GroupedConfig, sizes: list[int], tail: int, N: int, K: int) -> int:
    """Cluster tiles of a problem, counted."""
    rows = config.tile_m * config.cluster_m
    if config.layout == "tn":
        return len(sizes) * -(-N // rows) * -(-K // config.tile_n)
    return sum(-(-size // rows) for size in (*sizes, tail)) * -(-N // config.tile_n)


@each_config
def test_no_offsets_give_more_tiles_than_the_bound(config: GroupedConfig) -> None:
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.choice((0, 1, rng.randrange(600))) for _ in range(rng.randrange(1, 40))]
        tail, N, K = rng.choice((0, 1, 300)), 8 * rng.randrange(1, 99), 8 * rng.randrange(1, 99)
        M, E = sum(sizes) + tail, len(sizes)
        if M:
            bound = max_tiles(config, M, N, K, E)
            assert tiles(config, sizes, tail, N, K) <= bound
            ctas = grid(config, M, N, K, E, SMS)
            assert ctas % config.cluster_m == 0 and 0 < ctas <= SMS
            assert ctas // config.cluster_m <= max(bound, 1)


def test_grid_fills_the_gpu_and_no_more() -> None:
    for config in CONFIGS:
        assert grid(config, 131072, 4096, 6144, 8, SMS) == SMS
        assert grid(config, 131072, 4096, 6144, 8, 1) == config.cluster_m
    assert grid(policies("tn")[0], 4096, 256, 256, 3, SMS) == 6


@pytest.mark.parametrize("case", large_cases(), ids=lambda case: case.name)
def test_training_shapes_take_the_largest_tile(case: Any) -> None:
    for layout, N, K in (("nt", case.n, case.k), ("nn", case.k, case.n), ("tn", case.n, case.k)):
        config = select_config(layout, case.m, N, K, case.experts, SMS)
        assert (config.tile_m, config.tile_n, config.cluster_m) == (128, 256, 2)


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_small_shapes_take_the_least_estimate(case: Any) -> None:
    rows = case.m // case.experts
    for layout, N, K in (("nt", case.n, case.k), ("nn", case.k, case.n), ("tn", case.n, case.k)):
        problem = (case.m, N, K, case.experts)
        config = select_config(layout, *problem, SMS)
        assert is_valid(config, *problem)
        estimates = [estimated_cycles(c, *problem, SMS) for c in policies(layout)]
        assert estimated_cycles(config, *problem, SMS) == min(estimates)
        if layout != "tn" and rows <= 64:
            assert config.tile_m == 64


def test_h24_sizes_beyond_32_bits() -> None:
    """A problem of more than 2^31 elements in every operand and in the result."""
    M, N, K, E = 524288 + 256, 8192, 65536, 16
    for config in CONFIGS:
        assert is_valid(config, M, N, K, E)
        assert 0 < grid(config, M, N, K, E, SMS) <= SMS
    assert rows_map(K, K).strides == (2 * K,)
    nt, tn = policies("nt")[0], policies("tn", "f32_store")[0]
    assert weight_map(nt, N, K, E, K, N * K).strides == (2 * K, 2 * N * K)
    assert output_map(tn, N, K, E, K, N * K).strides == (4 * K, 4 * N * K)
    assert 2 * N * K == 1 << 30
    huge = policies("nt")[-1]
    assert not is_valid(huge, MAX_SIZE, 1 << 16, 64, 1), "2^33 tiles do not fit into 32 bits"


# Tensor maps


@each_config
@pytest.mark.parametrize(
    "M, N, K, E", [(1, 8, 8, 1), (300, 72, 1000, 5), (524544, 4096, 4096, 64), (MAX_SIZE, 8, 8, 1)]
)
@pytest.mark.parametrize("padding", [0, 8, 64])
def test_tensor_maps_keep_the_rules_of_the_driver(
    config: GroupedConfig, M: int, N: int, K: int, E: int, padding: int
) -> None:
    ldn, ldk = N + padding, K + padding
    if config.layout == "tn":
        maps = [ragged_map(N, ldn), ragged_map(K, ldk), output_map(config, N, K, E, ldk, N * ldk)]
    else:
        ld, outer = (ldk, N * ldk) if config.layout == "nt" else (ldn, K * ldn)
        maps = [rows_map(K, ldk), weight_map(config, N, K, E, ld, outer)]
    for geometry in maps:
        assert_encodable(with_rows(geometry, M), BASE)
        assert geometry.swizzle == "128B"


def test_geometry_of_the_maps() -> None:
    nt, nn, tn = policies("nt")[0], policies("nn")[0], policies("tn", "f32_add")[0]
    assert rows_map(72, 80) == TensorMapGeometry("bf16", (72, ROWS), (160,), (64, 64))
    assert weight_map(nt, 136, 72, 5, 80, 11000) == TensorMapGeometry(
        "bf16", (72, 136, 5), (160, 22000), (64, nt.tile_n // nt.cluster_m, 1)
    )
    assert weight_map(nn, 136, 72, 5, 144, 11008) == TensorMapGeometry(
        "bf16", (136, 72, 5), (288, 22016), (64, 64, 1)
    )
    assert output_map(tn, 136, 72, 5, 80, 11000) == TensorMapGeometry(
        "f32", (72, 136, 5), (320, 44000), (32, 64, 1)
    )
    # One expert: the stride is never used and may be anything.
    assert weight_map(nt, 136, 72, 1, 80, 0).strides == (160, 136 * 160)


@pytest.mark.parametrize("columns, ld", [(72, 72), (1000, 4096), (8, 8), (4096, 1 << 20)])
def test_ragged_map_finds_the_rows_of_a_group_and_no_others(columns: int, ld: int) -> None:
    geometry = ragged_map(columns, ld)
    for length, end in ((1, 1), (700, 1001), (0, 5), (64, 524544), (MAX_SIZE, MAX_SIZE)):
        for k in {0, 1, 63, length - 1, length, length + 62} - {-1}:
            at = (columns - 1, (1 << 30) - length + k, end, 1 << 30)
            assert all(0 <= c < 2**31 for c in at)
            inside = all(c < n for c, n in zip(at, geometry.dims, strict=True))
            assert inside == (k < length)
            address = 2 * at[0] + sum(
                c * stride for c, stride in zip(at[1:], geometry.strides, strict=True)
            )
            assert address % 2**64 == 2 * ((end - length + k) * ld + columns - 1)


# Launching, with a driver that only looks


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


def test_buckets_hold_every_number_of_rows_and_are_few() -> None:
    assert [rows_bucket(m) for m in (0, 1, 7, 8, 9, 33, 100, 1 << 17, MAX_SIZE)] == [
        0, 1, 7, 8, 10, 40, 112, 1 << 17, MAX_SIZE,
    ]  # fmt: skip
    for m in range(1, 5000):
        assert m <= rows_bucket(m) <= 1.25 * m and rows_bucket(rows_bucket(m)) == rows_bucket(m)
    assert len({rows_bucket(m) for m in range(30_000, 34_000)}) <= 3


def test_the_policies_are_the_kernels_that_are_built() -> None:
    built = {symbol for symbol in manifest() if symbol.startswith("sm90_grouped_gemm")}
    assert {config.symbol for config in CONFIGS} == built
