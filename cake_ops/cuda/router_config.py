"""Plans a launch of the router GEMM: which kernel, which tensor maps, how many CTAs. Pure functions.

Nothing here imports torch or CUDA, so all of it is tested on the CPU. The kernel is
``csrc/kernels/sm90_router_gemm.cu``, whose header states the same geometry from the device's side. It
multiplies ``A[M, K]`` by ``B[K, N]`` in FP32 quality: A is split into two TF32 parts in registers, B in
shared memory. M, N and K are the kernel's own here; T tokens, N experts and hidden size H the operator's:

======  ===============  ==========================  ====================  =======================
layout  operator         A                           B                     result
======  ===============  ==========================  ====================  =======================
nt      router_mm        ``w[N, H]``, M = N, K = H   ``x[T, H]``, N = T    ``out[T, N]``
nn      router_mm_dgrad  ``g[T, N]``, M = T, K = N   ``w[N, H]``, N = H    ``out[T, H]``
tn      router_mm_wgrad  ``g[T, N]``, M = N, K = T   ``x[T, H]``, N = H    ``out[N, H]``
======  ===============  ==========================  ====================  =======================

A is FP32; B is FP32 or, where a kernel is built for it, BF16, which needs two products instead of three. A CTA
without a cluster makes one tile after another. The CTAs of a cluster share the contraction of one tile, and their
partial tiles are added in the order of their ranks. That order decides the bits of a sum, so every forward shares
the same way (:data:`FORWARD_CLUSTER_K`) and a token's logits have the same bits in a batch of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from .geometry import MAX_SIZE, SMEM_LIMIT, Layout, TensorMapGeometry, ceil_div

Dtype = Literal["f32", "bf16"]

LAYOUTS: dict[str, Layout] = {"router_mm": "nt", "router_mm_dgrad": "nn", "router_mm_wgrad": "tn"}

TILE_K = 32  # contraction steps of a stage
BYTES = {"f32": 4, "bf16": 2}
OUT_BF16, OUT_ADD = 1, 2  # bits of the kernel's parameter ``output``
MAX_CLUSTER_K = 8  # CTAs of a portable cluster
MAX_GRID = 1 << 30
FORWARD_CLUSTER_K = 8
"""CTAs that share the contraction of a forward, of any T: else a token's logits would depend on its batch."""
MAX_CHAIN = 2048
"""Tokens that a CTA of a weight gradient sums where a cluster can share them: FP32 sums lose with the root of
their number (relative Frobenius error on an H200: 1.7e-7 at 1024 tokens, 2.4e-7 at 4096, 4.3e-7 at 16384)."""


@dataclass(frozen=True)
class RouterConfig:
    """A kernel instance: layout, type of B and policy.

    A CTA makes tiles of ``tile_m`` x ``tile_n``, from a ring of k-blocks of 32. The ``cluster_k`` CTAs
    of a cluster make the same tile, each from its part of the contraction.
    """

    layout: Layout
    b_dtype: Dtype
    tile_m: int
    tile_n: int
    cluster_k: int

    @property
    def name(self) -> str:
        return f"{self.layout}_{self.b_dtype}_{self.tile_m}x{self.tile_n}_k{self.cluster_k}"

    @property
    def symbol(self) -> str:
        """The kernel's symbol and the stem of its cubin."""
        return f"sm90_router_gemm_{self.name}"

    @property
    def threads(self) -> int:
        """A math warpgroup for each 64 rows, a warp that loads and seven that may convert."""
        return 2 * self.tile_m + 256

    @property
    def _stage_bytes(self) -> int:
        whole = self.layout != "nt" and self.b_dtype == "bf16"  # boxes of 64 columns
        columns = _round_up(self.tile_n, 64) if whole else self.tile_n
        return _round_up(TILE_K * (4 * self.tile_m + BYTES[self.b_dtype] * columns), 1024)

    @property
    def _parts_bytes(self) -> int:
        """The TF32 parts of B, two or one: a buffer for each group of converter warps, and as many as are in use."""
        share = 2 if self.layout == "nt" else _threads_of_column(self.tile_n)
        groups = min(7 // min(ceil_div(share * self.tile_n, 32), 7), 4)
        buffers = max(groups, 3 if self.tile_n <= 64 else 2)
        return buffers * (2 if self.b_dtype == "f32" else 1) * self.tile_n * TILE_K * 4

    @property
    def _slabs_bytes(self) -> int:
        """Without a cluster: what each math warp stores 16 padded rows of 32 columns by way of."""
        return self.tile_m // 16 * 16 * (32 + 8) * 4 if self.cluster_k == 1 else 0

    @property
    def num_stages(self) -> int:
        """As many as fit beside the parts and slabs."""
        beside = self._parts_bytes + self._slabs_bytes
        return min(12, (224 * 1024 - beside) // self._stage_bytes)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA. A cluster's finished tile, with padded rows, reuses the stages."""
        if self.cluster_k == 1:
            tile = 0
        elif self.layout == "nt":
            tile = self.tile_n * (self.tile_m + 4) * 4
        else:
            tile = self.tile_m * (_round_up(self.tile_n, 32) + 8) * 4
        loop = self.num_stages * self._stage_bytes + self._parts_bytes + self._slabs_bytes
        return max(loop, tile) + 256  # barriers


def _threads_of_column(columns: int) -> int:
    """Returns how many converter threads share a column in an MN-major layout, 1, 2 or 4: the count that keeps
    most of the 224 busy, in groups that split a k-block in one round; on a tie the larger."""

    def busy(threads: int) -> int:
        return columns * threads * min(7 // ceil_div(columns * threads, 32), 4)

    return max((1, 2, 4), key=lambda threads: (busy(threads), threads))


# (tile_m, tile_n, cluster_k), the policies that csrc/instances.cmake builds.
_POLICIES: dict[tuple[Layout, Dtype], tuple[tuple[int, int, int], ...]] = {
    ("nt", "f32"): (
        (64, 8, 8),
        (64, 16, 8),
        (64, 24, 8),
        (128, 40, 8),
        (128, 80, 8),
        (128, 152, 8),
    ),
    ("nt", "bf16"): ((64, 24, 8), (128, 40, 8), (128, 152, 8)),
    ("nn", "f32"): (
        (64, 32, 1),
        (64, 48, 1),
        (128, 32, 1),
        (128, 64, 1),
        (128, 80, 1),
        (128, 96, 1),
        (128, 112, 1),
        (128, 128, 1),
    ),
    ("tn", "f32"): (
        (64, 32, 1),
        (128, 32, 1),
        (128, 64, 1),
        (128, 80, 1),
        (128, 96, 1),
        (128, 128, 1),
        (128, 96, 8),
    ),
    ("tn", "bf16"): ((128, 64, 1), (128, 80, 1), (128, 96, 1), (128, 80, 8)),
}


@cache
def policies(layout: Layout, b_dtype: Dtype) -> tuple[RouterConfig, ...]:
    """Returns every built configuration; none where B is converted to FP32 first."""
    table = _POLICIES.get((layout, b_dtype), ())
    return tuple(RouterConfig(layout, b_dtype, *policy) for policy in table)


def all_configs() -> tuple[RouterConfig, ...]:
    return tuple(config for kind in _POLICIES for config in policies(*kind))


def kernel_sizes(layout: Layout, T: int, N: int, H: int) -> tuple[int, int, int]:
    """Returns the kernel's M, N, K for ``T`` tokens, which may be ``ROWS``."""
    return {"nt": (N, T, H), "nn": (T, H, N), "tn": (N, H, T)}[layout]


def is_valid(config: RouterConfig, T: int, N: int, H: int) -> bool:
    """Whether ``config`` may compute the problem: the one statement of the kernel's limits."""
    nt = config.layout == "nt"
    tile_rows = config.tile_n if nt else config.tile_m  # of the result; each rank stores as many
    return (
        config.tile_m in (64, 128)
        and 0 < config.tile_n <= 256
        and config.tile_n % (8 if nt else 16) == 0
        and config.cluster_k in range(1, MAX_CLUSTER_K + 1)
        and tile_rows % config.cluster_k == 0
        and (config.layout != "nn" or config.b_dtype == "f32")
        and config.num_stages >= 2
        and config.smem_bytes <= SMEM_LIMIT
        and (not nt or config.cluster_k == FORWARD_CLUSTER_K)
        and (
            config.layout != "tn"
            or T <= MAX_CHAIN * config.cluster_k
            or config.cluster_k == MAX_CLUSTER_K
        )
        and 0 < min(T, N, H)
        and max(T, N, H) <= MAX_SIZE
        and _all_ctas(config, T, N, H) <= MAX_GRID
    )


def ctas_per_row_tile(config: RouterConfig, N: int, H: int) -> int:
    """Returns the CTAs of the tiles of each :func:`row_tile` tokens, or of all if tiles sum over all tokens."""
    if config.layout == "nt":
        tiles = ceil_div(N, config.tile_m)
    elif config.layout == "nn":
        tiles = ceil_div(H, config.tile_n)
    else:
        tiles = ceil_div(N, config.tile_m) * ceil_div(H, config.tile_n)
    return tiles * config.cluster_k


def row_tile(config: RouterConfig) -> int | None:
    """Returns the tokens of a tile; None if every tile sums over all tokens."""
    return {"nt": config.tile_n, "nn": config.tile_m, "tn": None}[config.layout]


def _all_ctas(config: RouterConfig, T: int, N: int, H: int) -> int:
    """Returns the CTAs of one tile each."""
    return ceil_div(T, row_tile(config) or T) * ctas_per_row_tile(config, N, H)


def max_ctas(config: RouterConfig, num_sms: int) -> int:
    """Returns the most CTAs of a launch: without a cluster as many as run at a time, each for several tiles."""
    return num_sms if config.cluster_k == 1 else MAX_GRID


def grid(config: RouterConfig, T: int, N: int, H: int, num_sms: int) -> int:
    """Returns the CTAs to launch, in one dimension."""
    return min(_all_ctas(config, T, N, H), max_ctas(config, num_sms))


def candidates(
    op: str, T: int, N: int, H: int, b_dtype: Dtype, num_sms: int
) -> tuple[RouterConfig, ...]:
    """Returns every valid configuration for a call, least estimated time first."""
    valid = [c for c in policies(LAYOUTS[op], b_dtype) if is_valid(c, T, N, H)]
    return tuple(sorted(valid, key=lambda c: estimated_cycles(c, T, N, H, num_sms)))


def select_config(op: str, T: int, N: int, H: int, b_dtype: Dtype, num_sms: int) -> RouterConfig:
    """Returns the configuration with the least estimated time.

    Raises:
        RuntimeError: no configuration computes the problem.
    """
    best = candidates(op, T, N, H, b_dtype, num_sms)
    if not best:
        raise RuntimeError(
            f"cake::{op}: the CUDA kernels take T, N, H and the number of CTAs up to 2^30 each, got"
            f" T = {T}, N = {N}, H = {H}; split the call"
        )
    return best[0]


def estimated_cycles(config: RouterConfig, T: int, N: int, H: int, num_sms: int) -> float:
    """Returns a model of the time, in SM clocks: rounds of tiles, times the cost of a tile.

    Fitted to an H200, whose 132 SMs hold one CTA each and 15 clusters of 8 at a time, since a cluster stays in
    one GPC; 7 % off on average. A k-block costs the products (1024 TF32 multiply-adds a clock) and what a warp
    does around them; a tile its first load, its stores and, in a cluster, the reduction; a launch its start and end.
    """
    M, N, K = kernel_sizes(config.layout, T, N, H)
    tiles = ceil_div(M, config.tile_m) * ceil_div(N, config.tile_n)
    clustered = config.cluster_k > 1
    at_a_time = max(num_sms // config.cluster_k - 1, 1) if clustered else num_sms
    k_blocks = ceil_div(ceil_div(K, TILE_K), config.cluster_k)
    area = config.tile_m * config.tile_n
    products = (3 if config.b_dtype == "f32" else 2) * area * TILE_K / 1024
    tile = k_blocks * (400 + 1.1 * products) + area / 4 + (3000 if clustered else 1000)
    return ceil_div(tiles, at_a_time) * tile + 5000


# ---- tensor maps ----


def a_map(config: RouterConfig, T: int, N: int, H: int, ld: int) -> TensorMapGeometry:
    """Map of A, FP32 with row stride ``ld`` elements: ``[M, K]`` (nt, nn) or ``[K, M]`` (tn)."""
    M, _, K = kernel_sizes(config.layout, T, N, H)
    if config.layout == "tn":
        return TensorMapGeometry("f32", (M, K), (4 * ld,), (32, TILE_K))
    return TensorMapGeometry("f32", (K, M), (4 * ld,), (TILE_K, config.tile_m))


def b_map(config: RouterConfig, T: int, N: int, H: int, ld: int) -> TensorMapGeometry:
    """Map of B with row stride ``ld`` elements: ``[N, K]`` (nt) or ``[K, N]`` (nn, tn)."""
    _, N, K = kernel_sizes(config.layout, T, N, H)
    dtype, f32 = config.b_dtype, config.b_dtype == "f32"
    strides = (BYTES[dtype] * ld,)
    if config.layout == "nt":
        swizzle = "128B" if f32 else "64B"
        return TensorMapGeometry(dtype, (K, N), strides, (TILE_K, config.tile_n), swizzle)
    if f32:
        return TensorMapGeometry(dtype, (N, K), strides, (config.tile_n, TILE_K), "NONE")
    return TensorMapGeometry(dtype, (N, K), strides, (64, TILE_K), "128B")


def _round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b
