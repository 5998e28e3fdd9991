"""Planning of the router GEMM launches, without a GPU.

A test called after a case (h31, ..) is a defect that users of another package met once.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from emulator import assert_encodable, with_rows
from router_emulator import boxes

from cake_ops.cuda import router_config
from cake_ops.cuda.driver import manifest
from cake_ops.cuda.geometry import MAX_SIZE, ROWS, SMEM_LIMIT, TensorMapGeometry, rows_bucket
from cake_ops.cuda.router_config import (
    FORWARD_CLUSTER_K,
    LAYOUTS,
    MAX_CHAIN,
    MAX_CLUSTER_K,
    Dtype,
    RouterConfig,
    a_map,
    all_configs,
    b_map,
    candidates,
    ctas_per_row_tile,
    estimated_cycles,
    grid,
    is_valid,
    kernel_sizes,
    policies,
    row_tile,
    select_config,
)

SMS = 132
BASE = 1 << 20  # an address that every tensor map can have
OPS = {layout: op for op, layout in LAYOUTS.items()}
KINDS = [
    (op, b_dtype)
    for op, layout in LAYOUTS.items()
    for b_dtype in ("f32", "bf16")
    if policies(layout, b_dtype)
]
SIZES = [(1, 1, 1), (7, 63, 100), (64, 256, 4096), (1000, 8, 5120), (16384, 512, 6144)]  # T, N, H

each_config = pytest.mark.parametrize("config", all_configs(), ids=lambda config: config.symbol)


# Configurations


@each_config
def test_every_policy_is_valid_and_fits(config: RouterConfig) -> None:
    assert config.num_stages >= 2 and config.smem_bytes <= SMEM_LIMIT
    assert config.threads == {64: 384, 128: 512}[config.tile_m]
    for T, N, H in (*SIZES, (MAX_SIZE, 8, 8), (1, 8, MAX_SIZE), (8, MAX_SIZE, 1)):
        long = config.layout == "tn" and T > MAX_CHAIN * config.cluster_k
        assert is_valid(config, T, N, H) == (not long or config.cluster_k == MAX_CLUSTER_K)


@pytest.mark.parametrize("b_dtype", ["f32", "bf16"])
def test_a_cluster_shares_the_sums_of_many_tokens(b_dtype: Dtype) -> None:
    """FP32 sums lose with the root of their number, so no CTA makes a long one alone."""
    for T in (1, 64, 2048, 2049, 8192, 16384, 1 << 20):
        chosen = select_config("router_mm_wgrad", T, 256, 4096, b_dtype, 132)
        assert T <= MAX_CHAIN * chosen.cluster_k or chosen.cluster_k == MAX_CLUSTER_K
        assert T > MAX_CHAIN or chosen.cluster_k == 1


def test_names_are_unique_and_complete() -> None:
    names = [config.name for config in all_configs()]
    assert len(set(names)) == len(names)
    config = RouterConfig("nt", "f32", 128, 40, 8)
    assert config.symbol == "sm90_router_gemm_nt_f32_128x40_k8"
    assert not policies("nn", "bf16"), "w is FP32 in the data gradient"


def test_shared_memory_of_a_policy() -> None:
    """By hand: stages of A and B, buffers of the parts of a k-block of B, without a cluster a slab for each
    math warp, barriers."""
    config = RouterConfig(
        "nt", "f32", 128, 40, 8
    )  # 80 halves of columns: 3 warps a group, 2 groups
    stage, parts = (128 + 40) * 128, 3 * 2 * 40 * 128  # three are in use
    assert config.num_stages == (224 * 1024 - parts) // stage == 9
    assert config.smem_bytes == 9 * stage + parts + 256
    config = RouterConfig("tn", "bf16", 128, 96, 1)  # 6 warps, 1 group; boxes of 64 columns: 128
    stage, parts, slabs = 128 * 128 + 2 * 64 * 64, 2 * 96 * 128, 8 * 16 * 40 * 4
    assert config.num_stages == (224 * 1024 - parts - slabs) // stage == 7
    assert config.smem_bytes == 7 * stage + parts + slabs + 256
    config = RouterConfig("nt", "f32", 64, 8, 8)  # 1 warp, 4 groups; 12 stages at most
    assert config.num_stages == 12
    assert config.smem_bytes == 12 * (64 + 8) * 128 + 4 * 2 * 8 * 128 + 256


def test_launches_have_what_the_kernels_are_compiled_for(tmp_path: Path) -> None:
    """The kernel's own constants, which ``router_config.cpp`` prints."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    names, program = tmp_path / "names.h", tmp_path / "router_config"
    names.write_text("\n".join(f"CAKE_BUILT({config.name})" for config in all_configs()))
    source = Path(__file__).with_name("router_config.cpp")
    include = source.parents[1] / "csrc" / "include"
    # -fpermissive: a member may have the name of the template that it is, as nvcc has it.
    options = ["-std=c++17", "-w", "-fpermissive", f"-I{include}", f'-DCAKE_NAMES="{names}"']
    subprocess.run([compiler, *options, "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [
        f"{config.name} {config.threads} {config.cluster_k} {config.num_stages} {config.smem_bytes}"
        for config in all_configs()
    ]


@each_config
def test_what_no_kernel_computes_is_invalid(config: RouterConfig) -> None:
    op = OPS[config.layout]
    for T, N, H in (
        (0, 8, 8),
        (8, 0, 8),
        (8, 8, 0),
        (MAX_SIZE + 1, 8, 8),
        (8, MAX_SIZE + 1, 8),
        (8, 8, MAX_SIZE + 1),
    ):
        assert not is_valid(config, T, N, H)
        with pytest.raises(RuntimeError, match=f"cake::{op}: .* T = {T}, N = {N}, H = {H};"):
            select_config(op, T, N, H, config.b_dtype, SMS)


def test_too_many_tiles_are_invalid() -> None:
    assert not is_valid(policies("nt", "f32")[0], MAX_SIZE, 1 << 20, 8)
    assert not is_valid(policies("nn", "f32")[0], MAX_SIZE, 8, 1 << 20)
    assert not is_valid(policies("tn", "f32")[0], 8, MAX_SIZE, 1 << 20)


@pytest.mark.parametrize(
    "config",
    [
        RouterConfig("nt", "f32", 96, 40, 8),
        RouterConfig("nt", "f32", 128, 42, 8),
        RouterConfig("nt", "f32", 128, 0, 8),
        RouterConfig("nt", "f32", 128, 40, 16),
        RouterConfig("nt", "f32", 128, 40, 3),
        RouterConfig("nt", "f32", 128, 40, 0),
        RouterConfig("nn", "bf16", 128, 64, 1),
        RouterConfig("nn", "f32", 128, 40, 1),
        RouterConfig("tn", "f32", 128, 272, 1),
    ],
    ids=lambda config: config.name,
)
def test_policies_that_cannot_be_built_are_invalid(config: RouterConfig) -> None:
    assert not is_valid(config, 64, 256, 4096)


@each_config
@pytest.mark.parametrize("T, N, H", SIZES)
def test_every_tile_has_a_cluster(config: RouterConfig, T: int, N: int, H: int) -> None:
    M, columns, _ = kernel_sizes(config.layout, T, N, H)
    tiles = len(range(0, M, config.tile_m)) * len(range(0, columns, config.tile_n))
    ctas = tiles * config.cluster_k
    most = SMS if config.cluster_k == 1 else ctas  # a CTA without a cluster makes several tiles
    assert grid(config, T, N, H, SMS) == min(ctas, most)
    rows = row_tile(config)
    assert (rows is None) == (config.layout == "tn")
    if rows:
        assert ctas == len(range(0, T, rows)) * ctas_per_row_tile(config, N, H)


@pytest.mark.parametrize("op, b_dtype", KINDS)
@pytest.mark.parametrize("T, N, H", SIZES)
def test_candidates_are_in_the_order_of_their_estimates(
    op: str, b_dtype: Any, T: int, N: int, H: int
) -> None:
    found = candidates(op, T, N, H, b_dtype, SMS)
    every = policies(LAYOUTS[op], b_dtype)
    assert set(found) == {config for config in every if is_valid(config, T, N, H)}
    estimates = [estimated_cycles(config, T, N, H, SMS) for config in found]
    assert estimates == sorted(estimates) and min(estimates) > 0
    assert select_config(op, T, N, H, b_dtype, SMS) == found[0]


@pytest.mark.parametrize("b_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("N, H", [(8, 64), (256, 4096), (100, 257), (512, 6144)])
def test_h31_a_forward_splits_its_contraction_alike_at_every_t(
    b_dtype: Any, N: int, H: int
) -> None:
    chosen = {
        select_config("router_mm", T, N, H, b_dtype, SMS)
        for T in sorted({rows_bucket(T) for T in range(1, 16385)})
    }
    assert {config.cluster_k for config in chosen} == {FORWARD_CLUSTER_K}
    assert len(chosen) > 1, "several configurations were meant to be compared"
    other = RouterConfig("nt", b_dtype, 128, 40, 4)
    assert not is_valid(other, 64, N, H)


@pytest.mark.parametrize("op, b_dtype", KINDS)
def test_choices_fill_the_gpu_where_they_can(op: str, b_dtype: Any) -> None:
    for H in (4096, 5120, 6144):
        for T in (64, 256, 1024):
            config = select_config(op, T, 256, H, b_dtype, SMS)
            assert grid(config, T, 256, H, SMS) >= SMS // 3


# Tensor maps


@each_config
@pytest.mark.parametrize("T, N, H", [*SIZES, (MAX_SIZE, MAX_SIZE, MAX_SIZE)])
@pytest.mark.parametrize("padding", [0, 8])
def test_tensor_maps_keep_the_rules_of_the_driver(
    config: RouterConfig, T: int, N: int, H: int, padding: int
) -> None:
    ld_n, ld_h = (n + -n % 8 + padding for n in (N, H))
    ld_a = ld_h if config.layout == "nt" else ld_n
    maps = (a_map(config, ROWS, N, H, ld_a), b_map(config, ROWS, N, H, ld_h))
    expected = boxes(config.layout, config.b_dtype, config.tile_m, config.tile_n)
    for geometry, box in zip(maps, expected, strict=True):
        assert_encodable(with_rows(geometry, T), BASE)
        assert geometry.rank == 2
        assert (geometry.dtype, geometry.box, geometry.swizzle) == box


def test_geometry_of_the_maps() -> None:
    """T tokens, 63 experts, hidden size 100; strides in bytes."""
    nt, nn = RouterConfig("nt", "f32", 128, 40, 8), RouterConfig("nn", "f32", 128, 80, 1)
    assert a_map(nt, ROWS, 63, 100, 104) == TensorMapGeometry(
        "f32", (100, 63), (416,), (32, 128), "128B"
    )
    assert b_map(nt, ROWS, 63, 100, 100) == TensorMapGeometry(
        "f32", (100, ROWS), (400,), (32, 40), "128B"
    )
    assert b_map(RouterConfig("nt", "bf16", 64, 16, 8), ROWS, 63, 100, 104) == TensorMapGeometry(
        "bf16", (100, ROWS), (208,), (32, 16), "64B"
    )
    assert a_map(nn, ROWS, 63, 100, 64) == TensorMapGeometry(
        "f32", (63, ROWS), (256,), (32, 128), "128B"
    )
    assert b_map(nn, ROWS, 63, 100, 100) == TensorMapGeometry(
        "f32", (100, 63), (400,), (80, 32), "NONE"
    )
    tn = RouterConfig("tn", "bf16", 128, 96, 1)
    assert a_map(tn, ROWS, 63, 100, 64) == TensorMapGeometry(
        "f32", (63, ROWS), (256,), (32, 32), "128B"
    )
    assert b_map(tn, ROWS, 63, 100, 104) == TensorMapGeometry(
        "bf16", (100, ROWS), (208,), (64, 32), "128B"
    )


def test_the_policies_are_the_kernels_that_are_built() -> None:
    built = {name for name in manifest() if name.startswith("sm90_router_gemm")}
    assert {config.symbol for config in router_config.all_configs()} == built
