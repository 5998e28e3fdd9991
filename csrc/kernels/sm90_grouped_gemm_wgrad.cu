// Weight gradient of a grouped GEMM, ragged in its contraction: dW[e] = G[rows of e]^T X[rows of e]
// for every group e, bf16 operands, FP32 accumulation, stored as bf16 or FP32 or added to what is
// there. A group without rows gives exact zeros, or leaves the sum alone.
//
// A tile is kTileM rows (columns of G) by kTileN columns (columns of X) of one dW[e]. Both operands
// are MN-major: a stage holds 64 rows of each, in boxes of 64 columns, and wgmma transposes on the
// fly. A cluster of kClusterM CTAs makes kClusterM tiles below each other from the same columns of
// X, so each CTA loads a slice of X and multicasts it. Roles, ring and independent warpgroups are
// those of sm90_grouped_gemm.cu. One CTA makes a whole tile, over the rows in order: the bits
// depend on the group's rows alone.
//
// A group starts at any row and its last k-block must not read past its end: those rows belong to
// other groups or to nobody and may hold NaN, which times zero is NaN, so both operands need zeros
// there. The tensor maps do it without a descriptor per group (as Triton's and QuACK's "ragged
// TMA"): besides columns and rows (of size 2^30) they have two dimensions, whose strides are ld and
// (2^34 - ld) elements. At coordinates (column, 2^30 - length + k, end, 2^30) the address is that
// of row (end - length + k), because the large terms add up to 2^64 elements, and from k = length
// on the row is out of bounds and reads as zero.
//
// Shared memory: G[kStages][64 x kTileM], X[kStages][64 x kTileN], 8 slabs of 2 KB (bf16) or 2 x 16
// KB staging (FP32), barriers, group order.
//
// Launch: kThreads = 384 threads, grid = a multiple of kClusterM (cluster dimensions are compiled
// in), dynamic shared memory as `smem_bytes` in cake_ops/cuda/grouped_config.py. Parameters, in
// order:
//   map_g   bf16 4-D  dims (N, R, X, X)  strides (2 ldg, 2 ldg, 2 (2^34 - ldg)) box (64, 64, 1, 1)
//   map_x   bf16 4-D  dims (K, R, X, X)  strides (2 ldx, 2 ldx, 2 (2^34 - ldx)) box (64, 64, 1, 1)
//   map_out bf16 or f32, 3-D  dims (K, N, E)  strides (S ldo, S outer)  box (128 / S, 64, 1); bf16
//           results do not go through it
//   out     dW, the address in map_out          ldo, outer  int64, strides of dW in elements
//   offs    const int*  E ends                   M, N, K, E  int32, M <= 2^30
//
// where R = 2^30, X = 0x7fff0000 and S is the size of an element of dW. All maps: 128-byte swizzle,
// 256-byte L2 promotion, zero fill; strides in bytes, each a multiple of 16.
#include "cake/epilogue.cuh"
#include "cake/pipeline.cuh"
#include "cake/tile_scheduler.cuh"

namespace cake {

template <class Element_, bool kAccumulate_, int kTileM_, int kTileN_, int kStages_, int kClusterM_>
struct RaggedKConfig {
  using Element = Element_;
  static constexpr bool kAccumulate = kAccumulate_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = 64;
  static constexpr int kClusterM = kClusterM_;
  static constexpr int kStages = kStages_;
  static constexpr int kSuperRows = 2048 / (kTileM * kClusterM);

  static constexpr int kMathWarpgroups = kTileM / kAtomM;
  static constexpr int kAtomN = kTileN;
  static constexpr int kMathWarps = kMathWarpgroups * 4;
  static constexpr int kThreads = (kMathWarpgroups + 1) * kWarpgroup;
  static constexpr int kBytesA = kTileM * 128;
  static constexpr int kBytesB = kTileN * 128;
  static constexpr bool kDeferred = sizeof(Element) == 2;
  static constexpr int kStagingBytes = kDeferred ? 4 * kSlabBytes : 2 * kBoxBytes;  // a warpgroup's
  using Pipeline = Pipeline<kStages, kClusterM, kMathWarps>;
  static constexpr int kSmemBytes = kStages * (kBytesA + kBytesB) +
                                    kMathWarpgroups * kStagingBytes + Pipeline::kBytes +
                                    GroupOrder::kBytes;

  static_assert(Pipeline::kBytes % 16 == 0, "GroupOrder, behind it, is read 16 bytes at a time");
  static_assert(kTileM == 128, "two warpgroups of 64 rows: setmaxnreg 40 / 232 is made for them");
  static_assert(kAtomN == 64 || kAtomN == 128 || kAtomN == 256, "wgmma.cuh has these atoms");
  static_assert(kClusterM == 1 || kClusterM == 2,
                "66 clusters of 2 fill an H200, larger ones do not");
  static_assert(kTileN / kClusterM % 64 == 0, "a CTA's slice of X is whole 64-wide boxes");
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory is all a Hopper CTA can have");
};

// The named policies. Host side: cake_ops/cuda/grouped_config.py.
namespace config {
using bf16_store_128x256_c2 = RaggedKConfig<bf16, false, 128, 256, 4, 2>;
using bf16_add_128x256_c2 = RaggedKConfig<bf16, true, 128, 256, 4, 2>;
using f32_store_128x256_c2 = RaggedKConfig<float, false, 128, 256, 4, 2>;
using f32_add_128x256_c2 = RaggedKConfig<float, true, 128, 256, 4, 2>;
using bf16_store_128x128_c1 = RaggedKConfig<bf16, false, 128, 128, 6, 1>;
using bf16_add_128x128_c1 = RaggedKConfig<bf16, true, 128, 128, 6, 1>;
using f32_store_128x128_c1 = RaggedKConfig<float, false, 128, 128, 6, 1>;
using f32_add_128x128_c1 = RaggedKConfig<float, true, 128, 128, 6, 1>;
}  // namespace config

template <class Config>
struct RaggedKTile {
  int group;
  int length;  // rows of the group: the contraction
  int end;     // the row after its last one
  int row;     // first row of dW[group] of this CTA
  int rows;    // how many of its kTileM rows exist, possibly none
  int column;
  int k_blocks;

  using Scheduler = RaggedKScheduler<Config::kSuperRows>;

  __device__ __forceinline__ bool find(Scheduler& scheduler, int tile, int cta_rank, int N) {
    int begin;
    Block block;
    if (!scheduler.find(tile, group, begin, end, block)) return false;
    length = end - begin;
    k_blocks = ceil_div(length, Config::kTileK);
    row = (block.m * Config::kClusterM + cta_rank) * Config::kTileM;
    rows = min(N - row, Config::kTileM);
    column = block.n * Config::kTileN;
    return true;
  }
};

// The producer warp: all loads of one tile.
template <class Config>
__device__ __forceinline__ void load_tile(const RaggedKTile<Config>& tile, const TensorMap& map_g,
                                          const TensorMap& map_x,
                                          const typename Config::Pipeline& pipeline,
                                          typename Config::Pipeline::State& state, u32 smem_g,
                                          u32 smem_x, int cta_rank) {
  constexpr int kSliceN = Config::kTileN / Config::kClusterM;
  constexpr u16 kAllCtas = (1 << Config::kClusterM) - 1;
  constexpr int kRaggedRows = 1 << 30;
  const int row = uniform(tile.row), rows = uniform(tile.rows);
  const int column = uniform(tile.column) + cta_rank * kSliceN;
  const int first_k = kRaggedRows - uniform(tile.length), end = uniform(tile.end);
  const u32 bytes = ceil_div(max(rows, 0), kAtomM) * kBoxBytes + Config::kBytesB;
  smem_x += cta_rank * kSliceN * 128;
  produce_k_blocks(
      pipeline, state, uniform(tile.k_blocks), bytes, [&](int k_block, int stage, u32 full) {
        const int k = first_k + k_block * Config::kTileK;
        const u32 stage_g = smem_g + stage * Config::kBytesA;
        const u32 stage_x = smem_x + stage * Config::kBytesB;
#pragma unroll
        for (int n = 0; n < kSliceN; n += 64) {
          if constexpr (Config::kClusterM == 1) {
            ptx::cp_async_bulk_tensor_4d(stage_x + n * 128, map_x, full, column + n, k, end,
                                         kRaggedRows);
          } else {
            ptx::cp_async_bulk_tensor_4d_multicast(stage_x + n * 128, map_x, full, kAllCtas,
                                                   column + n, k, end, kRaggedRows);
          }
        }
#pragma unroll
        for (int m = 0; m < Config::kTileM; m += kAtomM) {
          if (m < rows) {
            ptx::cp_async_bulk_tensor_4d(stage_g + m * 128, map_g, full, row + m, k, end,
                                         kRaggedRows);
          }
        }
      });
}

template <class Config>
__device__ __forceinline__ void ragged_k_gemm(const TensorMap& map_g, const TensorMap& map_x,
                                              const TensorMap& map_out,
                                              typename Config::Element* out, i64 ldo, i64 outer,
                                              const int* offs, int M, int N, int K, int E) {
  using Element = typename Config::Element;
  extern __shared__ __align__(1024) char smem[];
  constexpr int kStagingOffset = Config::kStages * (Config::kBytesA + Config::kBytesB);
  constexpr int kBarrierOffset = kStagingOffset + Config::kMathWarpgroups * Config::kStagingBytes;
  const u32 smem_g = ptx::shared_address(smem);
  const u32 smem_x = smem_g + Config::kStages * Config::kBytesA;
  const typename Config::Pipeline pipeline{smem_g + kBarrierOffset};
  GroupOrder& order =
      *reinterpret_cast<GroupOrder*>(smem + kBarrierOffset + Config::Pipeline::kBytes);
  typename Config::Pipeline::State state;

  const int warp = uniform(threadIdx.x / 32);
  const int cta_rank = Config::kClusterM == 1 ? 0 : ptx::cluster_ctarank();
  const int cluster = blockIdx.x / Config::kClusterM;
  const int num_clusters = gridDim.x / Config::kClusterM;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(map_g);
    ptx::prefetch_tensormap(map_x);
    ptx::prefetch_tensormap(map_out);
    pipeline.init();
    ptx::fence_mbarrier_init_release_cluster();
  }
  cluster_arrive<Config::kClusterM>();
  ptx::griddepcontrol_wait();
  order.build(offs, E, M, Config::kTileK);
  cluster_wait<Config::kClusterM>();

  typename RaggedKTile<Config>::Scheduler scheduler(order, offs, E, M,
                                                    ceil_div(N, Config::kTileM * Config::kClusterM),
                                                    ceil_div(K, Config::kTileN));
  RaggedKTile<Config> tile;
  const auto next_tile = [&](int round) {
    return tile.find(scheduler, scheduler.tile_of_round(round, cluster, num_clusters), cta_rank, N);
  };
  if (warp >= Config::kMathWarps) {
    ptx::setmaxnreg_dec<40>();
    if (warp == Config::kMathWarps) {
      for (int round = 0; next_tile(round); ++round) {
        load_tile<Config>(tile, map_g, map_x, pipeline, state, smem_g, smem_x, cta_rank);
      }
      ptx::griddepcontrol_launch_dependents();
      pipeline.producer_drain(state);
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    const int warpgroup = warp / 4;
    const int thread = threadIdx.x % kWarpgroup;
    const u32 staging = smem_g + kStagingOffset + warpgroup * Config::kStagingBytes;
    DeferredTile<Config::kAtomN> deferred(staging, thread);
    int round = 0;
    bool more = next_tile(round);
    while (more) {
      const int row = tile.row + warpgroup * kAtomM;
      const int rows = tile.rows - warpgroup * kAtomM;
      const int group = tile.group, first_column = tile.column, k_blocks = tile.k_blocks;
      if (rows <= 0 || (Config::kAccumulate && k_blocks == 0)) {
        skip_products(pipeline, state, k_blocks, lane_id());
        more = next_tile(++round);
        continue;
      }
      float acc[Config::kAtomN / 2];
      const int last =
          start_products<Major::MN, Major::MN, Config::kBytesA, Config::kBytesB, Config::kAtomN>(
              acc, pipeline, state, smem_g + warpgroup * kBoxBytes, smem_x, k_blocks, lane_id(),
              [&](int k_block) { deferred.store(k_block); });
      more = next_tile(++round);  // while the last products run
      finish_products(pipeline, last, lane_id());
      if constexpr (Config::kDeferred) {
        Element* first = out + group * outer + row * ldo + first_column;
        deferred.store_from(k_blocks);
        if constexpr (Config::kAccumulate) {
          add_bf16<Config::kAtomN>(acc, first, ldo, rows, K - first_column, thread);
        }
        deferred.pack(acc, first, ldo, rows, K - first_column);
      } else {
        store_slices<Config::kAtomN>(
            acc, staging, 1 + warpgroup, thread, [&](int offset, u32 buffer) {
              const int column = first_column + offset;
              if (column >= K) return;
              if constexpr (Config::kAccumulate) {
                ptx::cp_reduce_async_bulk_tensor_3d_add(map_out, buffer, column, row, group);
              } else {
                ptx::cp_async_bulk_tensor_3d_store(map_out, buffer, column, row, group);
              }
            });
      }
    }
    deferred.store_from(0);
    // Staged slices stay until the copy engine has read them; its writes complete with the grid.
    if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
  }
}

}  // namespace cake

using Config = cake::config::CAKE_CONFIG;

extern "C" __global__ void __cluster_dims__(Config::kClusterM, 1, 1)
    __launch_bounds__(Config::kThreads, 1)
        CAKE_CONCATENATE(sm90_grouped_gemm_wgrad_,
                         CAKE_CONFIG)(const __grid_constant__ cake::TensorMap map_g,
                                      const __grid_constant__ cake::TensorMap map_x,
                                      const __grid_constant__ cake::TensorMap map_out,
                                      Config::Element* out, cake::i64 ldo, cake::i64 outer,
                                      const int* offs, int M, int N, int K, int E) {
  cake::ragged_k_gemm<Config>(map_g, map_x, map_out, out, ldo, outer, offs, M, N, K, E);
}
