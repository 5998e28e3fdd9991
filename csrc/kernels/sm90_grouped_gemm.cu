// Grouped GEMM with ragged M: for every group e of rows, D[rows of e] = A[rows of e] op(B[e]), bf16
// in and out, FP32 accumulation, one rounding. Forward (A = x, B = w) and data gradient (A = g, B =
// w) are the same kernel; they differ in whether B's contraction axis is contiguous ("nt", w[E, N,
// K] in the forward) or its output axis is ("nn", the same w read in place by the data gradient).
// Rows past the last group are written as zeros.
//
// A cluster of kClusterM CTAs makes kClusterM * kTileM rows of one group times kTileN columns. Its
// CTAs need the same tile of B, so each loads a slice of it and multicasts the slice to the others.
// Where a group has kTileM rows or less to go, one of two CTAs would have none; there the two make
// tiles of the same rows side by side, each with its own tile of B (E = 32, 300 rows each, N =
// 2048, K = 1536 on an H200: 116 us, not 144). In a CTA, one warp is the producer: it issues the
// TMA loads of A (own rows) and B (own slice) into a ring of kStages stages of 64 contraction
// steps. Two math warpgroups consume the ring, either 64 rows each (kTileM = 128) or half the
// columns each (kTileM = 64). They never wait for each other: each releases stages by itself, and
// stores a tile while it multiplies the next one. A warpgroup whose rows all lie past the group's
// end skips its products.
//
// Loads need no masks: rows past the group's end are other rows of A (or zeros past M) and only
// reach rows of D that are not stored; contraction steps past K are zeros in both operands (TMA
// bounds).
//
// Shared memory: A[kStages][kTileM x 64], B[kStages][kTileN x 64], a slab for each math warp,
// barriers. Three stages instead of four are 1 % slower (E = 8, 16,384 rows each, N = 4096, K =
// 6144, forward and data gradient, H200).
//
// Launch: kThreads = 384 threads, grid = a multiple of kClusterM (cluster dimensions are compiled
// in), dynamic shared memory as `smem_bytes` in cake_ops/cuda/grouped_config.py. Parameters, in
// order:
//   map_a    bf16 2-D  dims (K, M)     strides (2 lda)            box (64, 64)
//   map_b nt bf16 3-D  dims (K, N, E)  strides (2 ldb, 2 outer)   box (64, kTileN / kClusterM, 1)
//   map_b nn bf16 3-D  dims (N, K, E)  strides (2 ldb, 2 outer)   box (64, 64, 1)
//   d        bf16*, 16-byte aligned              ldd         int64, row stride, a multiple of 8
//   offs     const int*  E ends                  M, N, K, E  int32, M <= 2^30
//
// where K is the contraction and N the columns of D, whatever w's own axes are called. All maps:
// 128-byte swizzle, 256-byte L2 promotion, zero fill; strides in bytes, each a multiple of 16.
#include "cake/epilogue.cuh"
#include "cake/pipeline.cuh"
#include "cake/tile_scheduler.cuh"

namespace cake {

template <Major kMajorB_, int kTileM_, int kTileN_, int kStages_, int kClusterM_>
struct RaggedMConfig {
  static constexpr Major kMajorB = kMajorB_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kSwizzleElements;
  static constexpr int kClusterM = kClusterM_;
  static constexpr int kStages = kStages_;
  // 1024, 4096 and 8192 rows read 0.5, 0.9 and 4.2 GB more from DRAM at 65536 x 4096 x 6144 on an
  // H200.
  static constexpr int kSuperRows = 2048 / (kTileM * kClusterM);

  static constexpr int kMathWarpgroups = 2;
  static constexpr int kWarpgroupsM = kTileM / kAtomM;
  static constexpr int kAtomN = kTileN * kWarpgroupsM / kMathWarpgroups;
  static constexpr int kMathWarps = kMathWarpgroups * 4;
  static constexpr int kThreads = (kMathWarpgroups + 1) * kWarpgroup;
  static constexpr int kBytesA = kTileM * 128;
  static constexpr int kBytesB = kTileN * 128;
  using Pipeline = Pipeline<kStages, kClusterM, kMathWarps>;
  static constexpr int kSmemBytes =
      kStages * (kBytesA + kBytesB) + kMathWarps * kSlabBytes + Pipeline::kBytes;

  static_assert(kTileM == 64 || kTileM == 128,
                "two warpgroups split 128 rows, or 64 rows' columns");
  static_assert(kAtomN == 64 || kAtomN == 128 || kAtomN == 256, "wgmma.cuh has these atoms");
  static_assert(kClusterM == 1 || kClusterM == 2,
                "66 clusters of 2 fill an H200, larger ones do not");
  static_assert(kTileN / kClusterM % 64 == 0, "a CTA's slice of B is whole 64-wide boxes");
  static_assert(kTileN / kClusterM <= 256, "a TMA box has at most 256 rows");
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory is all a Hopper CTA can have");
};

// The named policies. Host side: cake_ops/cuda/grouped_config.py.
namespace config {
using nt_128x256_c2 = RaggedMConfig<Major::K, 128, 256, 4, 2>;
using nn_128x256_c2 = RaggedMConfig<Major::MN, 128, 256, 4, 2>;
using nt_128x128_c1 = RaggedMConfig<Major::K, 128, 128, 6, 1>;
using nn_128x128_c1 = RaggedMConfig<Major::MN, 128, 128, 6, 1>;
using nt_64x128_c1 = RaggedMConfig<Major::K, 64, 128, 8, 1>;
using nn_64x128_c1 = RaggedMConfig<Major::MN, 64, 128, 8, 1>;
}  // namespace config

template <class Config>
struct RaggedMTile {
  int group;
  int row;   // first row of this CTA
  int rows;  // how many of its kTileM rows are the group's, possibly none
  int column;
  int k_blocks;       // 0 for rows that belong to no group: their result is zero
  bool side_by_side;  // the cluster's CTAs share rows, not the tile of B

  using Scheduler = RaggedMScheduler<Config::kTileM, Config::kClusterM, Config::kSuperRows>;

  __device__ __forceinline__ bool find(Scheduler& scheduler, int tile, int cta_rank,
                                       int k_blocks_all) {
    int row_end, n_block, n_block_2;
    if (!scheduler.find(tile, group, row, row_end, n_block, n_block_2, side_by_side)) return false;
    if (!side_by_side) {
      row += cta_rank * Config::kTileM;
    } else if (cta_rank == 1) {
      n_block = n_block_2;
    }
    const bool exists = n_block >= 0 && n_block < scheduler.n_blocks;
    rows = exists ? min(row_end - row, Config::kTileM) : 0;
    column = n_block * Config::kTileN;
    k_blocks = group < scheduler.window.num_groups ? k_blocks_all : 0;
    return true;
  }
};

// The producer warp: all loads of one tile.
template <class Config, bool kMulticast>
__device__ __forceinline__ void load_k_blocks(const RaggedMTile<Config>& tile,
                                              const TensorMap& map_a, const TensorMap& map_b,
                                              const typename Config::Pipeline& pipeline,
                                              typename Config::Pipeline::State& state, u32 smem_a,
                                              u32 smem_b, int cta_rank) {
  constexpr int kSliceN = kMulticast ? Config::kTileN / Config::kClusterM : Config::kTileN;
  constexpr int kBoxN =
      Config::kMajorB == Major::K ? Config::kTileN / Config::kClusterM : kSwizzleElements;
  constexpr u16 kAllCtas = (1 << Config::kClusterM) - 1;
  const int group = uniform(tile.group), row = uniform(tile.row), rows = uniform(tile.rows);
  const int first_n = kMulticast ? cta_rank * kSliceN : 0;
  const int column = uniform(tile.column) + first_n;
  const bool loads_b = kMulticast || rows > 0;
  const u32 bytes =
      ceil_div(max(rows, 0), kAtomM) * kBoxBytes + (loads_b ? Config::kTileN * 128 : 0);
  smem_b += first_n * 128;
  produce_k_blocks(
      pipeline, state, uniform(tile.k_blocks), bytes, [&](int k_block, int stage, u32 full) {
        const int k = k_block * Config::kTileK;
        const u32 stage_a = smem_a + stage * Config::kBytesA;
        const u32 stage_b = smem_b + stage * Config::kBytesB;
        if (loads_b) {
#pragma unroll
          for (int n = 0; n < kSliceN; n += kBoxN) {
            const bool k_major = Config::kMajorB == Major::K;
            const int x = k_major ? k : column + n, y = k_major ? column + n : k;
            if constexpr (kMulticast) {
              ptx::cp_async_bulk_tensor_3d_multicast(stage_b + n * 128, map_b, full, kAllCtas, x, y,
                                                     group);
            } else {
              ptx::cp_async_bulk_tensor_3d(stage_b + n * 128, map_b, full, x, y, group);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < Config::kTileM; m += kAtomM) {
          if (m < rows) ptx::cp_async_bulk_tensor_2d(stage_a + m * 128, map_a, full, k, row + m);
        }
      });
}

template <class Config>
__device__ __forceinline__ void load_tile(const RaggedMTile<Config>& tile, const TensorMap& map_a,
                                          const TensorMap& map_b,
                                          const typename Config::Pipeline& pipeline,
                                          typename Config::Pipeline::State& state, u32 smem_a,
                                          u32 smem_b, int cta_rank) {
  if (Config::kClusterM > 1 && !uniform(tile.side_by_side)) {
    load_k_blocks<Config, true>(tile, map_a, map_b, pipeline, state, smem_a, smem_b, cta_rank);
  } else {
    load_k_blocks<Config, false>(tile, map_a, map_b, pipeline, state, smem_a, smem_b, cta_rank);
  }
}

template <class Config>
__device__ __forceinline__ void ragged_m_gemm(const TensorMap& map_a, const TensorMap& map_b,
                                              bf16* d, i64 ldd, const int* offs, int M, int N,
                                              int K, int E) {
  extern __shared__ __align__(1024) char smem[];
  const u32 smem_a = ptx::shared_address(smem);
  const u32 smem_b = smem_a + Config::kStages * Config::kBytesA;
  const u32 slabs = smem_b + Config::kStages * Config::kBytesB;
  const typename Config::Pipeline pipeline{slabs + Config::kMathWarps * kSlabBytes};
  typename Config::Pipeline::State state;

  const int warp = uniform(threadIdx.x / 32);
  const int cta_rank = Config::kClusterM == 1 ? 0 : ptx::cluster_ctarank();
  const int first_tile = blockIdx.x / Config::kClusterM;
  const int num_clusters = gridDim.x / Config::kClusterM;
  const int k_blocks_all = ceil_div(K, Config::kTileK);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(map_a);
    ptx::prefetch_tensormap(map_b);
    pipeline.init();
    ptx::fence_mbarrier_init_release_cluster();
  }
  cluster_arrive<Config::kClusterM>();
  ptx::griddepcontrol_wait();
  typename RaggedMTile<Config>::Scheduler scheduler(offs, E, M, ceil_div(N, Config::kTileN));
  cluster_wait<Config::kClusterM>();  // the first offsets are under way

  RaggedMTile<Config> tile;
  const auto next_tile = [&](int t) {  // some 300 instructions
    return tile.find(scheduler, t, cta_rank, k_blocks_all);
  };
  if (warp >= Config::kMathWarps) {
    ptx::setmaxnreg_dec<40>();
    if (warp == Config::kMathWarps) {
      for (int t = first_tile; next_tile(t); t += num_clusters) {
        load_tile<Config>(tile, map_a, map_b, pipeline, state, smem_a, smem_b, cta_rank);
      }
      ptx::griddepcontrol_launch_dependents();
      pipeline.producer_drain(state);
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    const int warpgroup = warp / 4;
    const int thread = threadIdx.x % kWarpgroup;
    const int row = warpgroup % Config::kWarpgroupsM * kAtomM;
    const int column = warpgroup / Config::kWarpgroupsM * Config::kAtomN;
    DeferredTile<Config::kAtomN> deferred(slabs + warpgroup * 4 * kSlabBytes, thread);
    int t = first_tile;
    bool more = next_tile(t);
    while (more) {
      const int rows = min(tile.rows - row, kAtomM), k_blocks = tile.k_blocks;
      if (rows <= 0) {
        skip_products(pipeline, state, k_blocks, lane_id());
        more = next_tile(t += num_clusters);
        continue;
      }
      const int first_column = tile.column + column;
      bf16* first = d + (tile.row + row) * ldd + first_column;
      float acc[Config::kAtomN / 2];
      const int last = start_products<Major::K, Config::kMajorB, Config::kBytesA, Config::kBytesB,
                                      Config::kAtomN>(
          acc, pipeline, state, smem_a + row * 128, smem_b + column * 128, k_blocks, lane_id(),
          [&](int k_block) { deferred.store(k_block); });
      more = next_tile(t += num_clusters);  // while the last products run
      finish_products(pipeline, last, lane_id());
      deferred.store_from(k_blocks);
      deferred.pack(acc, first, ldd, rows, N - first_column);
    }
    deferred.store_from(0);
  }
}

}  // namespace cake

using Config = cake::config::CAKE_CONFIG;

extern "C" __global__ void __cluster_dims__(Config::kClusterM, 1, 1)
    __launch_bounds__(Config::kThreads, 1)
        CAKE_CONCATENATE(sm90_grouped_gemm_,
                         CAKE_CONFIG)(const __grid_constant__ cake::TensorMap map_a,
                                      const __grid_constant__ cake::TensorMap map_b, cake::bf16* d,
                                      cake::i64 ldd, const int* offs, int M, int N, int K, int E) {
  cake::ragged_m_gemm<Config>(map_a, map_b, d, ldd, offs, M, N, K, E);
}
