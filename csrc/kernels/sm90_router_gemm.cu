// FP32 router GEMM: D = A B in FP32 quality on TF32 tensor cores, for the three passes of a gate.
//
//   nt  forward           D[N, T] = w[N, H] x[T, H]^T, stored transposed
//   nn  data gradient     D[T, H] = g[T, N] w[N, H]
//   tn  weight gradient   D[N, H] = g[T, N]^T x[T, H]
//
// A and B are f32; in nt and tn B (the tokens' x) may be bf16. M, N, K below are the kernel's own:
// rows of A, columns of B, contraction.
//
// A CTA makes a tile of kTileM x kTileN over its part of K, 32 steps ("a k-block") at a time. One
// warp loads raw k-blocks by TMA into a ring of stages; groups of converter warps split B's into
// two TF32 parts (tf32x3.cuh); one warpgroup for each 64 rows splits its rows of A in registers and
// multiplies. Within a k-block the small products come first and the large ones last, all in one
// accumulator, which is then added to the sum in FP32: tensor cores truncate when they accumulate
// (a bf16 GEMM on an H200 loses 3e-6 over K = 6144), and so lose next to nothing: 1.7e-7 in all.
//
// Three TF32 products take the tensor cores as long as six of bf16 parts (BF16x3), but the split is
// half of the work, and the issue slots, not the tensor cores, are what a router runs out of:
// BF16x3 was 7 to 15 % slower here, run against run. Pairs of FP16 numbers, scaled for each row and
// k-block, would need half of the tensor time of TF32, but a large number that meets a zero (what a
// padded token holds) would take the bits of all others in its k-block.
//
// Without a cluster, a CTA goes on to the tile gridDim.x further: the next tile's k-blocks are
// loaded and split while this one's sums are stored.
//
// In a cluster of kClusterK CTAs each has a run of k-blocks of one tile that depends on K alone.
// Their sums meet in distributed shared memory and are added in the order of the ranks. So results
// are repeatable, and a row of the result does not depend on how many others there are.
//
// A sum that is not finite (a number was Inf, NaN, or rounds to Inf in TF32, or the sum overflows)
// is made again by FP32 multiply-adds from global memory. The others keep their bits.
//
// Launch: kThreads threads; grid = kClusterK (fastest, a cluster) x tiles of M x tiles of N, or
// without a cluster fewer CTAs, never more; dynamic shared memory as `smem_bytes` in
// cake_ops/cuda/router_config.py. Parameters:
//   map_a  nt, nn  f32   dims (K, M)  box (32, kTileM)  128B swizzle
//          tn      f32   dims (M, K)  box (32, 32)      128B
//   map_b  nt      f32   dims (K, N)  box (32, kTileN)  128B
//          nt      bf16  dims (K, N)  box (32, kTileN)  64B
//          nn, tn  f32   dims (N, K)  box (kTileN, 32)  none
//          tn      bf16  dims (N, K)  box (64, 32)      128B
//   d, a, b    the result and the operands
//   ldd, lda, ldb  their row strides in elements; nt stores the result transposed
//   M, N, K    int32
//   output     bit 0: d is bf16; bit 1: add to d
#include "cake/router_epilogue.cuh"
#include "cake/router_exact.cuh"
#include "cake/router_mainloop.cuh"

namespace cake {

enum class Layout { nt, nn, tn };

template <Layout kLayout_, bool kF32_, int kTileM_, int kTileN_, int kClusterK_>
struct RouterConfig {
  static constexpr Layout kLayout = kLayout_;
  static constexpr bool kF32 = kF32_;  // B is f32 and split, or bf16 and its own only part
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kClusterK = kClusterK_;
  static constexpr Major kMajorA = kLayout == Layout::tn ? Major::MN : Major::K;
  static constexpr Major kMajorB = kLayout == Layout::nt ? Major::K : Major::MN;
  static constexpr bool kTransposed = kLayout == Layout::nt;  // the result, as it is stored
  static_assert(kClusterK > 1 || !kTransposed, "forwards of every T add in one order");

  using RawA = RawA<kMajorA, kTileM>;
  using RawB = RawB<kMajorB, kF32, kTileN>;

  static constexpr int kMathThreads = kTileM / kAtomM * 128;
  static constexpr int kMathWarps = kMathThreads / 32;
  static constexpr int kOtherWarps = 8;  // one loads, the others convert
  static constexpr int kThreads = kMathThreads + kOtherWarps * 32;
  // Converters split a k-block in one round where they are enough, in as many groups as they make,
  // each with a buffer of its own.
  static constexpr int kConverterWarps = min_of(ceil_div(RawB::kItems, 32), kOtherWarps - 1);
  static constexpr int kConverterGroups = min_of((kOtherWarps - 1) / kConverterWarps, 4);
  // Whether registers suffice for the fragments and products of two k-blocks.
  static constexpr bool kAhead = kTileN <= 64;
  // Of a thread. A launch has 128 for each of 512, or 168 for each of 384.
  static constexpr int kMathRegisters = kTileM == 64                   ? 240
                                        : kTileN == 64 || kTileN > 128 ? 216
                                                                       : 208;
  static constexpr int kOtherRegisters = kTileM == 64 ? 128 : 256 - kMathRegisters;
  static_assert(kMathThreads * kMathRegisters + kOtherWarps * 32 * kOtherRegisters <=
                    65536 / kThreads / 8 * 8 * kThreads,
                "more registers than a launch has are waited for forever");

  static constexpr int kStageBytes = ceil_div(RawA::kBytes + RawB::kBytes, 1024) * 1024;
  static constexpr int kLoadBytes = RawA::kBytes + RawB::kBytes;
  static constexpr int kPartBytes = kTileN * 128;
  static constexpr int kPartsBytes = (kF32 ? 2 : 1) * kPartBytes;
  static constexpr int kPartsBuffers = max_of(kConverterGroups, kAhead ? 3 : 2);
  static constexpr int kSlabsBytes = kClusterK == 1 ? kMathWarps * kSlabBytes : 0;
  static constexpr int kBudget = 224 * 1024 - kSlabsBytes;
  static constexpr int kStages = min_of(12, (kBudget - kPartsBuffers * kPartsBytes) / kStageBytes);

  // A cluster's finished tile reuses the stages: rows are experts' or tokens', as in d, padded
  // against bank conflicts.
  static constexpr int kTileRows = kTransposed ? kTileN : kTileM;
  static constexpr int kTileColumns = kTransposed ? kTileM : kTileN;
  static constexpr int kTilePitch = kTransposed ? kTileM + 4 : ceil_div(kTileN, 32) * 32 + 8;
  static constexpr int kTileBytes = kClusterK == 1 ? 0 : kTileRows * kTilePitch * 4;

  static constexpr int kParts = kStages * kStageBytes;
  static constexpr int kSlabs = kParts + kPartsBuffers * kPartsBytes;
  static constexpr int kBarriers = max_of(kSlabs + kSlabsBytes, kTileBytes);
  static constexpr int kSmemBytes = kBarriers + kBarrierBytes;

  static_assert(kTileM == 128 || (kTileM == 64 && kAhead), "a math warpgroup has 64 rows");
  static_assert(kF32 || kLayout != Layout::nn, "w is f32");
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory at most");
  // A group waits for the stages of its own k-blocks alone: what it finds in one must not be older.
  static_assert(kStages % kConverterGroups == 0 || kStages >= kConverterGroups + kPartsBuffers,
                "the other groups' k-blocks that a stage held before have been split");
  static_assert(kStages >= 2 && 16 * (kStages + kPartsBuffers) <= kBarrierBytes,
                "two barriers each");
  static_assert(kTileRows % kClusterK == 0, "each rank of the cluster stores as many rows");
};

// The named policies: layout, type of B, tile, cluster. Host side: cake_ops/cuda/router_config.py.
namespace config {
#define CAKE_POLICY(layout, b, f32, m, n, k) \
  using layout##_##b##_##m##x##n##_k##k = RouterConfig<Layout::layout, f32, m, n, k>
CAKE_POLICY(nt, f32, true, 64, 8, 8);
CAKE_POLICY(nt, f32, true, 64, 16, 8);
CAKE_POLICY(nt, f32, true, 64, 24, 8);
CAKE_POLICY(nt, f32, true, 128, 40, 8);
CAKE_POLICY(nt, f32, true, 128, 80, 8);
CAKE_POLICY(nt, f32, true, 128, 152, 8);
CAKE_POLICY(nt, bf16, false, 64, 24, 8);
CAKE_POLICY(nt, bf16, false, 128, 40, 8);
CAKE_POLICY(nt, bf16, false, 128, 152, 8);
CAKE_POLICY(nn, f32, true, 64, 32, 1);
CAKE_POLICY(nn, f32, true, 64, 48, 1);
CAKE_POLICY(nn, f32, true, 128, 32, 1);
CAKE_POLICY(nn, f32, true, 128, 64, 1);
CAKE_POLICY(nn, f32, true, 128, 80, 1);
CAKE_POLICY(nn, f32, true, 128, 96, 1);
CAKE_POLICY(nn, f32, true, 128, 112, 1);
CAKE_POLICY(nn, f32, true, 128, 128, 1);
CAKE_POLICY(tn, f32, true, 64, 32, 1);
CAKE_POLICY(tn, f32, true, 128, 32, 1);
CAKE_POLICY(tn, f32, true, 128, 64, 1);
CAKE_POLICY(tn, f32, true, 128, 80, 1);
CAKE_POLICY(tn, f32, true, 128, 96, 1);
CAKE_POLICY(tn, f32, true, 128, 128, 1);
CAKE_POLICY(tn, f32, true, 128, 96, 8);
CAKE_POLICY(tn, bf16, false, 128, 64, 1);
CAKE_POLICY(tn, bf16, false, 128, 80, 1);
CAKE_POLICY(tn, bf16, false, 128, 96, 1);
CAKE_POLICY(tn, bf16, false, 128, 80, 8);
#undef CAKE_POLICY
}  // namespace config

template <class Config>
__device__ __forceinline__ void router_gemm(const TensorMap& map_a, const TensorMap& map_b,
                                            const Operands<Config>& operands, void* d, i64 ldd,
                                            int M, int N, int K, int output) {
  extern __shared__ __align__(1024) char shared[];
  const u32 smem = ptx::shared_address(shared);
  const RouterBarriers<Config> barriers{smem + Config::kBarriers};

  const int warp = uniform(threadIdx.x / 32);
  const int lane = lane_id();

  // The first loads are under way before anything else is: 0.1 to 0.2 us less a launch (H200).
  if (threadIdx.x == Config::kMathThreads) {
    const TileRange<Config> tiles(M, N);
    const KRange<Config> range(K);
    ptx::prefetch_tensormap(map_a);
    ptx::prefetch_tensormap(map_b);
    barriers.init_full();
    ptx::griddepcontrol_wait();
    for (int stage = 0; stage < min(range.k_blocks, Config::kStages); ++stage) {
      load_k_block(map_a, map_b, barriers, smem, tiles.m(), tiles.n(), range.first + stage * kTileK,
                   stage);
    }
    barriers.init_others();
  }
  __syncthreads();

  if (warp < Config::kMathWarps) {
    ptx::setmaxnreg_inc<Config::kMathRegisters>();
    const int row = warp * 16 + fragment_row<Config::kMajorA>(lane / 4);
    const typename Config::RawA raw(row, lane % 4);
    const KRange<Config> range(K);
    TileRange<Config> tiles(M, N);
    MathState<Config> state;
    const MathSteps<Config> steps{barriers, raw, smem, lane, state};
    if (!Config::kAhead && warp >= 4 && range.k_blocks > 0) pass_turn(1);
#pragma unroll 1
    do {
      float sum[Config::kTileN / 2] = {};
      if constexpr (Config::kAhead) {
        multiply_ahead<Config>(sum, steps, range.k_blocks);
      } else {
        multiply_in_turns<Config>(sum, steps, range.k_blocks, warp / 4, tiles.last());
      }
      const Result result(d, ldd, output, Config::kTransposed ? N : M, Config::kTransposed ? M : N);
      bool finite = true;
#pragma unroll
      for (int i = 0; i < Config::kTileN / 2; ++i) finite &= is_finite(sum[i]);
      if (!finite) {
        multiply_add<Config>(sum, operands, tiles.m() + row, tiles.n() + lane % 4 * 2, range.first,
                             min(range.first + range.k_blocks * kTileK, K));
      }
      if constexpr (Config::kClusterK == 1) {
        store_sums<Config>(sum, smem + Config::kSlabs + warp * kSlabBytes,
                           result.tile(tiles.m() + warp * 16, tiles.n()), lane);
      } else {
        ptx::bar_sync(1, Config::kMathThreads);  // the tile reuses the stages: all have been read
        write_tile<Config>(sum, smem, row, lane % 4);
        cluster_sync_shared();
        store_tile<Config>(smem,
                           Config::kTransposed ? result.tile(tiles.n(), tiles.m())
                                               : result.tile(tiles.m(), tiles.n()),
                           range.rank, threadIdx.x);
      }
    } while (tiles.advance());
  } else {
    ptx::setmaxnreg_dec<Config::kOtherRegisters>();
    const int converter = warp - Config::kMathWarps - 1;
    TileRange<Config> tiles(M, N);
    const KRange<Config> range(K);
    if (converter >= 0) {
      if (converter < Config::kConverterGroups * Config::kConverterWarps) {
        convert<Config>(barriers, smem, converter, lane, range.k_blocks * tiles.count());
      }
    } else {
      if (lane == 0) {
        produce(map_a, map_b, barriers, smem, tiles, range);
      }
      __syncwarp();
      ptx::griddepcontrol_launch_dependents();
    }
    if constexpr (Config::kClusterK > 1) cluster_sync_shared();
  }
  if constexpr (Config::kClusterK > 1) {  // a tile must outlive the peers' reads
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace cake

using Config = cake::config::CAKE_CONFIG;

extern "C" __global__ void __cluster_dims__(Config::kClusterK, 1,
                                            1) __launch_bounds__(Config::kThreads, 1)
    CAKE_CONCATENATE(sm90_router_gemm_,
                     CAKE_CONFIG)(const __grid_constant__ cake::TensorMap map_a,
                                  const __grid_constant__ cake::TensorMap map_b, void* d,
                                  const float* a, const Config::RawB::Element* b, cake::i64 ldd,
                                  cake::i64 lda, cake::i64 ldb, int M, int N, int K, int output) {
  cake::router_gemm<Config>(map_a, map_b, {a, b, lda, ldb, M, N}, d, ldd, M, N, K, output);
}
