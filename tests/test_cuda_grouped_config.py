"""Planning of the grouped GEMM launches, without a GPU.

A test called after a case (h24, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from emulator import assert_encodable, with_rows

from cake_ops.bench.shapes import large_cases, small_cases
from cake_ops.cuda.driver import manifest
from cake_ops.cuda.geometry import (
    MAX_SIZE,
    ROWS,
    SMEM_LIMIT,
    TensorMapGeometry,
    bucket_range,
    rows_bucket,
)
from cake_ops.cuda.grouped_config import (
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


def test_buckets_hold_every_number_of_rows_and_are_few() -> None:
    assert [rows_bucket(m) for m in (0, 1, 7, 8, 9, 33, 100, 1 << 17, MAX_SIZE)] == [
        0, 1, 7, 8, 10, 40, 112, 1 << 17, MAX_SIZE,
    ]  # fmt: skip
    for m in range(1, 5000):
        assert m <= rows_bucket(m) <= 1.25 * m and rows_bucket(rows_bucket(m)) == rows_bucket(m)
    assert len({rows_bucket(m) for m in range(30_000, 34_000)}) <= 3


def test_a_bucket_is_a_range():
    for m in range(3000):
        first, last = bucket_range(m)
        assert first <= m <= last and {rows_bucket(i) for i in range(max(first, 0), last + 1)} == {
            rows_bucket(m)
        }
        assert m == 0 or rows_bucket(first - 1) != rows_bucket(m) != rows_bucket(last + 1)


def test_the_policies_are_the_kernels_that_are_built() -> None:
    built = {symbol for symbol in manifest() if symbol.startswith("sm90_grouped_gemm")}
    assert {config.symbol for config in CONFIGS} == built
