"""Plans a grouped GEMM launch: which kernel, which tensor maps, how many CTAs. Pure functions.

Nothing here imports torch or CUDA, so all of it is tested on the CPU. The kernels are those of
``csrc/kernels/sm90_grouped_gemm.cu`` (layouts nt and nn) and ``sm90_grouped_gemm_wgrad.cu`` (tn),
whose headers state the same geometry from the device's side.

M, N, K and E are the kernel's own here: M ragged rows in all groups, and

======  ===============  =======================  ===============================================
layout  result           contraction              used for
======  ===============  =======================  ===============================================
nt      ``D[M, N]``      K, contiguous in B       fwd with ``w[E, N, K]``
nn      ``D[M, N]``      K, rows of B             dgrad (N, K swapped), fwd with w transposed
tn      ``dW[E, N, K]``  rows of each group       wgrad
======  ===============  =======================  ===============================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from .geometry import MAX_SIZE, ROWS, SMEM_LIMIT, Layout, TensorMapGeometry, ceil_div

Output = Literal["bf16_store", "bf16_add", "f32_store", "f32_add"]

THREADS = 384  # two math warpgroups and the producer's
TILE_K = 64  # contraction steps of a stage: one 128-byte swizzled row of bf16

RAGGED_ROWS = 1 << 30
RAGGED_EXTENT = 0x7FFF0000
RAGGED_ELEMENTS = 1 << 34

_SLABS_BYTES = 8 * 2048  # of the eight math warps, through which they store bf16 results
_STAGING_BYTES = 2 * 2 * 8192  # of the two math warpgroups, through which FP32 results go
_GROUP_ORDER_BYTES = 256 * (4 + 4 + 2)  # tn: keys, ends and order of up to 256 groups


@dataclass(frozen=True)
class GroupedConfig:
    """A kernel instance: its layout, its output (tn only) and its policy.

    A CTA makes tiles of ``tile_m`` x ``tile_n`` from a ring of ``num_stages`` k-blocks of 64. The
    ``cluster_m`` CTAs of a cluster make tiles one below the other and share the loads of B.
    """

    layout: Layout
    tile_m: int
    tile_n: int
    num_stages: int
    cluster_m: int
    output: Output = "bf16_store"

    @property
    def name(self) -> str:
        prefix = self.output if self.layout == "tn" else self.layout
        return f"{prefix}_{self.tile_m}x{self.tile_n}_c{self.cluster_m}"

    @property
    def symbol(self) -> str:
        """The kernel's symbol and the stem of its cubin."""
        kernel = "sm90_grouped_gemm_wgrad" if self.layout == "tn" else "sm90_grouped_gemm"
        return f"{kernel}_{self.name}"

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        stages = self.num_stages * (self.tile_m + self.tile_n) * 2 * TILE_K
        barriers = self.num_stages * 2 * 8
        order = _GROUP_ORDER_BYTES if self.layout == "tn" else 0
        staging = _STAGING_BYTES if self.output.startswith("f32") else _SLABS_BYTES
        return stages + staging + barriers + order


# (tile_m, tile_n, num_stages, cluster_m), the policies that csrc/instances.cmake builds.
_RAGGED_M_POLICIES = ((128, 256, 4, 2), (128, 128, 6, 1), (64, 128, 8, 1))
_RAGGED_K_POLICIES = ((128, 256, 4, 2), (128, 128, 6, 1))


@cache
def policies(layout: Layout, output: Output = "bf16_store") -> tuple[GroupedConfig, ...]:
    """Returns every built configuration of ``layout`` (and, for "tn", ``output``)."""
    table = _RAGGED_K_POLICIES if layout == "tn" else _RAGGED_M_POLICIES
    return tuple(GroupedConfig(layout, *policy, output) for policy in table)


def is_valid(config: GroupedConfig, M: int, N: int, K: int, E: int) -> bool:
    """Whether ``config`` computes the problem: the one statement of the kernels' limits.

    TMA needs rows of whole 16-byte units, so N and K are multiples of 8; the tensor maps of ragged
    groups hold 2^30 rows; sizes and the count of tiles are 32-bit numbers.
    """
    tn = config.layout == "tn"
    atom_n = config.tile_n if config.tile_m == 128 else config.tile_n // 2  # columns of a warpgroup
    return (
        config.tile_m in ((128,) if tn else (64, 128))
        and atom_n in (64, 128, 256)
        and config.cluster_m in (1, 2)
        and config.tile_n % (64 * config.cluster_m) == 0
        and config.tile_n // config.cluster_m <= 256
        and config.smem_bytes <= SMEM_LIMIT
        and (tn or config.output == "bf16_store")
        and 0 <= M <= MAX_SIZE
        and 0 < min(N, K, E)
        and max(N, K, E) <= MAX_SIZE
        and N % 8 == K % 8 == 0
        and max_tiles(config, M, N, K, E) <= 1 << 30
    )


def max_tiles(config: GroupedConfig, M: int, N: int, K: int, E: int) -> int:
    """Returns the most cluster tiles that any offsets can give."""
    rows = config.tile_m * config.cluster_m
    if config.layout == "tn":
        return E * ceil_div(N, rows) * ceil_div(K, config.tile_n)
    # Every non-empty group, and the rows past the last one, may end in a partial tile.
    return (M // rows + min(E + 1, M)) * ceil_div(N, config.tile_n)


def grid(config: GroupedConfig, M: int, N: int, K: int, E: int, num_sms: int) -> int:
    """Returns the CTAs to launch, in one dimension: one an SM, no cluster without a tile."""
    clusters = min(num_sms // config.cluster_m, max_tiles(config, M, N, K, E))
    return max(clusters, 1) * config.cluster_m


@lru_cache(maxsize=4096)
def select_config(
    layout: Layout,
    M: int,
    N: int,
    K: int,
    E: int,
    num_sms: int,
    output: Output = "bf16_store",
) -> GroupedConfig:
    """Returns the configuration with the least estimated time; ties go to the larger tile.

    The offsets are on the device, so the estimate takes the groups as equal.

    Raises:
        RuntimeError: no configuration computes the problem.
    """
    valid = [c for c in policies(layout, output) if is_valid(c, M, N, K, E)]
    if not valid:
        raise RuntimeError(
            f"cake_ops: the CUDA kernels take M, N, K, E and the number of tiles up to 2^30 each, got"
            f" M = {M}, N = {N}, K = {K}, E = {E} (layout {layout}); split the call"
        )
    return min(valid, key=lambda c: estimated_cycles(c, M, N, K, E, num_sms))


def estimated_cycles(config: GroupedConfig, M: int, N: int, K: int, E: int, num_sms: int) -> float:
    """Returns a model of the time, in SM clocks: rounds of tiles, times the cost of a tile.

    A k-block takes the longer of its products (2048 multiply-adds a clock and SM) and its loads
    from L2 (about 48 bytes a clock and SM). A tile adds an epilogue, a launch a constant. On 150
    problems of 16 to 512 rows a group, its choice is on average 0.4 % slower than the best policy on an
    H200, at most 8.6 %.
    """
    rows = config.tile_m * config.cluster_m
    if config.layout == "tn":
        k_blocks = ceil_div(ceil_div(M, E), TILE_K)
        tiles = max_tiles(config, M, N, K, E)
    else:
        groups = max(min(E, M), 1)
        k_blocks = ceil_div(K, TILE_K)
        full, rest = divmod(ceil_div(M, groups), rows)
        pairs = config.cluster_m == 2 and 0 < rest <= config.tile_m  # two columns at a time
        n_blocks = ceil_div(N, config.tile_n)
        tiles = full * n_blocks
        if rest:
            tiles += ceil_div(n_blocks, 2) if pairs else n_blocks
        tiles *= groups
    rounds = ceil_div(tiles, max(num_sms // config.cluster_m, 1))
    products = config.tile_m * config.tile_n * TILE_K / 2048
    loads = (config.tile_m + config.tile_n / config.cluster_m) * 2 * TILE_K / 48
    epilogue = config.tile_m * config.tile_n / 32
    return rounds * (k_blocks * max(products, loads) + epilogue) + 2000


# ---- tensor maps ----


def rows_map(columns: int, ld: int) -> TensorMapGeometry:
    """Map of A of nt and nn: bf16 ``[M, columns]``, row stride ``ld`` elements."""
    return TensorMapGeometry("bf16", (columns, ROWS), (2 * ld,), (64, 64))


def weight_map(
    config: GroupedConfig, N: int, K: int, E: int, ld: int, outer: int
) -> TensorMapGeometry:
    """Map of B: bf16 ``[E, N, K]`` (nt) or ``[E, K, N]`` (nn), strides in elements."""
    columns, rows = (K, N) if config.layout == "nt" else (N, K)
    box_rows = config.tile_n // config.cluster_m if config.layout == "nt" else 64
    ld = _stride(rows, ld, columns)
    strides = (2 * ld, 2 * _stride(E, outer, rows * ld))
    return TensorMapGeometry("bf16", (columns, rows, E), strides, (64, box_rows, 1))


def ragged_map(columns: int, ld: int) -> TensorMapGeometry:
    """Map of G or X of the layout tn: bf16 ``[M, columns]`` whose groups the hardware bounds.

    The device passes ``(column, 2^30 - length + k, end, 2^30)`` for row k of the group of
    ``length`` rows that ends before row ``end``. The strides make that the address of row
    ``end - length + k``, modulo 2^64 elements, and rows from ``length`` on lie outside the second
    dimension. M does not occur, so the map of an empty tensor is the same, at any valid address.
    """
    ld = max(ld, 8)
    return TensorMapGeometry(
        "bf16",
        (columns, RAGGED_ROWS, RAGGED_EXTENT, RAGGED_EXTENT),
        (2 * ld, 2 * ld, 2 * (RAGGED_ELEMENTS - ld)),
        (64, 64, 1, 1),
    )


def output_map(
    config: GroupedConfig, N: int, K: int, E: int, ld: int, outer: int
) -> TensorMapGeometry:
    """Map of the layout tn's result ``dW[E, N, K]``, strides ``outer`` and ``ld`` elements."""
    dtype, size = ("f32", 4) if config.output.startswith("f32") else ("bf16", 2)
    ld = _stride(N, ld, K)
    strides = (size * ld, size * _stride(E, outer, N * ld))
    return TensorMapGeometry(dtype, (K, N, E), strides, (128 // size, 64, 1))


def _stride(extent: int, stride: int, packed: int) -> int:
    """A dimension of one element may carry any stride; a tensor map wants a plausible one."""
    return stride if extent > 1 else packed
