// FP32 router GEMM: D = A B in FP32 quality on TF32 tensor cores, for the three passes of a gate.
//
//   nt  forward           D[N, T] = w[N, H] x[T, H]^T, stored transposed
//   nn  data gradient     D[T, H] = g[T, N] w[N, H]
//   tn  weight gradient   D[N, H] = g[T, N]^T x[T, H]
//
// A and B are f32; in nt and tn B (the tokens' x) may be bf16. M, N, K below are the kernel's own:
// rows of A, columns of B, contraction.
//
// A CTA makes one tile of kTileM x kTileN over its part of K, 32 steps ("a k-block") at a time. One
// warp loads raw k-blocks by TMA into a ring of stages; groups of converter warps split B's into
// two TF32 parts (tf32x3.cuh); one warpgroup for each 64 rows splits its rows of A in registers and
// multiplies. Within a k-block the small products come first and the large ones last, all in one
// accumulator, which is then added to the sum in FP32: tensor cores truncate when they accumulate
// (a bf16 GEMM on an H200 loses 3e-6 over K = 6144), and so lose next to nothing: 1.7e-7 in all.
//
// Three TF32 products take the tensor cores as long as six of bf16 parts (BF16x3), but the split is
// half of the work, and the issue slots, not the tensor cores, are what a router runs out of:
// BF16x3 was 7 to 15 % slower here, run against run.
//
// K is split over a cluster of kClusterK CTAs, each a run of k-blocks that depends on K alone.
// Their sums meet in distributed shared memory and are added in the order of the ranks. So results
// are repeatable, and a row of the result does not depend on how many others there are.
//
// Where a sum is not finite (a number was Inf, NaN, or rounds to Inf in TF32, or the sum
// overflows), the CTA loads its k-blocks again and makes those sums by FP32 multiply-adds. The
// others keep their bits.
//
// Launch: kThreads threads, grid = tiles of M (fastest) x tiles of N x kClusterK (cluster
// dimensions are compiled in), dynamic shared memory as `smem_bytes` in
// cake_ops/cuda/router_config.py. Parameters:
//   map_a  nt, nn  f32   dims (K, M)  box (32, kTileM)  128B swizzle
//          tn      f32   dims (M, K)  box (32, 32)      128B
//   map_b  nt      f32   dims (K, N)  box (32, kTileN)  128B
//          nt      bf16  dims (K, N)  box (32, kTileN)  64B
//          nn, tn  f32   dims (N, K)  box (kTileN, 32)  none
//          tn      bf16  dims (N, K)  box (64, 32)      128B
//   d, ldd     the result and its row stride in elements; nt stores it transposed
//   M, N, K    int32
//   output     bit 0: d is bf16; bit 1: add to d
#include "cake/router_epilogue.cuh"
#include "cake/router_pipeline.cuh"

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

  static constexpr int kMathWarpgroups = kTileM / kAtomM;
  static constexpr int kMathWarps = kMathWarpgroups * 4;
  static constexpr int kMathThreads = kMathWarpgroups * 128;
  static constexpr int kOtherWarps = 8;  // one loads, the others convert
  static constexpr int kThreads = kMathThreads + kOtherWarps * 32;
  // A group of converters is as wide as the tile where that is possible, and has a buffer of its
  // own.
  static constexpr int kConverterWarps = min_of(ceil_div(kTileN, 32), 4);
  static constexpr int kConverterGroups = min_of((kOtherWarps - 1) / kConverterWarps, 4);
  // Whether registers suffice for the fragments of two k-blocks.
  static constexpr bool kAhead = kTileN <= (kF32 ? 96 : 80);
  // Of a thread, where two math warpgroups need more than their share of 128.
  static constexpr bool kReallocate = kMathWarpgroups == 2;
  static constexpr int kMathRegisters = kTileN > 128 ? 216 : kTileN > (kF32 ? 80 : 96) ? 208 : 184;
  static constexpr int kOtherRegisters = 256 - kMathRegisters;

  using RawA = RawA<kMajorA, kTileM>;
  using RawB = RawB<kMajorB, kF32, kTileN>;
  static constexpr int kStageBytes = ceil_div(RawA::kBytes + RawB::kBytes, 1024) * 1024;
  static constexpr int kLoadBytes = RawA::kBytes + RawB::kBytes;
  static constexpr int kPartBytes = kTileN * 128;
  static constexpr int kPartsBytes = (kF32 ? 2 : 1) * kPartBytes;
  static constexpr int kPartsBuffers = max_of(kConverterGroups, 2);
  static constexpr int kBudget = 224 * 1024;
  static constexpr int kStages = min_of(12, (kBudget - kPartsBuffers * kPartsBytes) / kStageBytes);

  // The finished tile reuses the stages: rows are experts' or tokens', as in d, padded against bank
  // conflicts.
  static constexpr int kTileRows = kTransposed ? kTileN : kTileM;
  static constexpr int kTileColumns = kTransposed ? kTileM : kTileN;
  static constexpr int kTilePitch = kTransposed ? kTileM + 4 : ceil_div(kTileN, 32) * 32 + 8;

  static constexpr int kLoopBytes = kStages * kStageBytes + kPartsBuffers * kPartsBytes;
  static constexpr int kBarriers = max_of(kLoopBytes, kTileRows * kTilePitch * 4);
  static constexpr int kSmemBytes = kBarriers + kBarrierBytes;

  static_assert(kTileM == 64 || kTileM == 128, "a math warpgroup has 64 rows");
  static_assert(kF32 || kLayout != Layout::nn, "w is f32");
  static_assert(kSmemBytes <= 232448, "227 KB of shared memory at most");
  static_assert(kStages >= max_of(kConverterGroups, 2), "a group steps over the others' stages");
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

// acc = the k-block's products, the small ones first. B's parts are K-major with the 128-byte
// swizzle.
template <class Config>
__device__ __forceinline__ void multiply_k_block(float (&acc)[Config::kTileN / 2],
                                                 const Fragments& a, u32 parts) {
  constexpr u64 kLow = Config::kPartBytes >> 4, kStep = 32 >> 4;
  using Product = WgmmaRs<Config::kTileN>;
  const u64 b = make_descriptor(parts);
#pragma unroll
  for (int i = 0; i < Config::kTileN / 2; ++i) acc[i] = 0.0f;
  ptx::wgmma_fence();
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    Product::mma_async(acc, a.low[atom], b + atom * kStep);
    if (Config::kF32) Product::mma_async(acc, a.high[atom], b + kLow + atom * kStep);
  }
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    Product::mma_async(acc, a.high[atom], b + atom * kStep);
  }
  ptx::wgmma_commit_group();
}

// Two math warpgroups that multiply in turns: barrier 2 is the first one's turn, 3 the second's.
template <class Config>
__device__ __forceinline__ void await_turn(int warpgroup) {
  if (warpgroup == 0) {
    ptx::bar_sync(2, Config::kMathThreads);
  } else {
    ptx::bar_sync(3, Config::kMathThreads);
  }
}

template <class Config>
__device__ __forceinline__ void pass_turn(int warpgroup) {
  if (warpgroup == 0) {
    ptx::bar_arrive(3, Config::kMathThreads);
  } else {
    ptx::bar_arrive(2, Config::kMathThreads);
  }
}

// A math warpgroup: sum[64, kTileN] of all k-blocks. What is not multiplication overlaps with it: a
// k-block's fragments are made while the k-block before it multiplies, or, where registers do not
// suffice for both, the two warpgroups take turns to multiply.
template <class Config>
__device__ __forceinline__ void multiply(float (&sum)[Config::kTileN / 2],
                                         const RouterBarriers<Config>& barriers, u32 stages,
                                         u32 parts, int row, int lane, int k_blocks,
                                         StageState<Config::kStages>& state) {
  constexpr bool kTurns = !Config::kAhead && Config::kMathWarpgroups == 2;
  const int warpgroup = row / kAtomM;
  const typename Config::RawA raw(row, lane % 4);
#pragma unroll
  for (int i = 0; i < Config::kTileN / 2; ++i) sum[i] = 0.0f;
  StageState<Config::kPartsBuffers> in;
  Fragments fragments[2];
  auto multiplied = state;
  const auto load = [&](Fragments& a) {
    wait(barriers.full(state.stage), state.phase);
    raw.load(a, stages + state.stage * Config::kStageBytes);
    state.advance();
  };
  const auto step = [&](Fragments& a, Fragments& next, int k_block) {
    if (!Config::kAhead) load(a);
    float acc[Config::kTileN / 2];
    wait(barriers.parts_full(in.stage), in.phase);
    if (kTurns) await_turn<Config>(warpgroup);
    multiply_k_block<Config>(acc, a, parts + in.stage * Config::kPartsBytes);
    // Only now is the raw k-block free: products are issued when their registers have been loaded,
    // but an arrival behind the loads would overtake them (seen as one wrong result in a thousand).
    if (lane == 0) ptx::mbarrier_arrive(barriers.empty(multiplied.stage));
    multiplied.advance();
    if (kTurns && (warpgroup == 0 || k_block + 1 < k_blocks)) pass_turn<Config>(warpgroup);
    if (Config::kAhead && k_block + 1 < k_blocks) load(next);
    ptx::wgmma_wait_group<0>();
    if (lane == 0) ptx::mbarrier_arrive(barriers.parts_empty(in.stage));
#pragma unroll
    for (int i = 0; i < Config::kTileN / 2; ++i) sum[i] += acc[i];
    in.advance();
  };
  if (kTurns && warpgroup == 1 && k_blocks > 0) pass_turn<Config>(warpgroup);
  if (Config::kAhead && k_blocks > 0) load(fragments[0]);
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; k_block += 2) {
    step(fragments[0], fragments[1], k_block);
    if (k_block + 1 < k_blocks) step(fragments[1], fragments[0], k_block + 1);
  }
}

// The same sums by FP32 multiply-adds over the raw k-blocks, for those that are not finite. They
// turn through exact[0..3], so that the code is short: what is fetched and never run costs time,
// too.
template <class Config>
__device__ __forceinline__ void multiply_add(float (&sum)[Config::kTileN / 2],
                                             const RouterBarriers<Config>& barriers, u32 stages,
                                             int row, int lane, int k_blocks,
                                             StageState<Config::kStages>& state) {
  constexpr int kCount = Config::kTileN / 2;
  float exact[kCount] = {};
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const u32 raw_a = stages + state.stage * Config::kStageBytes;
    const u32 raw_b = raw_a + Config::RawA::kBytes;
    const u32 empty = barriers.empty(state.stage);
    wait(barriers.full(state.stage), state.phase);
#pragma unroll 1
    for (int column = lane % 4 * 2; column < Config::kTileN; column += 8) {
      float turn[4] = {exact[0], exact[1], exact[2], exact[3]};
#pragma unroll 1
      for (int k = 0; k < kTileK; ++k) {
        const float a[2] = {ptx::ld_shared_f32(raw_a + Config::RawA::address(row, k)),
                            ptx::ld_shared_f32(raw_a + Config::RawA::address(row + 8, k))};
        const float b[2] = {Config::RawB::value(raw_b, column, k),
                            Config::RawB::value(raw_b, column + 1, k)};
#pragma unroll
        for (int i = 0; i < 4; ++i) turn[i] = fmaf(a[i / 2], b[i % 2], turn[i]);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        exact[i] = i < kCount - 4 ? exact[i + 4] : turn[i - kCount + 4];
    }
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(empty);
      if (row == 0) {  // for the converters, who have no part in this
        for (int i = 0; i < Config::kConverterWarps; ++i) ptx::mbarrier_arrive(empty);
      }
    }
    state.advance();
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = is_finite(sum[i]) ? sum[i] : exact[i];
}

template <class Config>
__device__ __forceinline__ void router_gemm(const TensorMap& map_a, const TensorMap& map_b, void* d,
                                            i64 ldd, int M, int N, int K, int output) {
  extern __shared__ __align__(1024) char smem[];
  const u32 stages = ptx::shared_address(smem);
  const u32 parts = stages + Config::kStages * Config::kStageBytes;
  const RouterBarriers<Config> barriers{stages + Config::kBarriers};

  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // uniform, and the compiler knows
  const int lane = lane_id();
  const int rank = Config::kClusterK == 1 ? 0 : ptx::cluster_ctarank();
  const int tile = blockIdx.x / Config::kClusterK;
  const int m = tile % ceil_div(M, Config::kTileM) * Config::kTileM;
  const int n = tile / ceil_div(M, Config::kTileM) * Config::kTileN;
  const int all_k_blocks = ceil_div(K, kTileK);
  const int rank_k_blocks = ceil_div(all_k_blocks, Config::kClusterK);
  const int first_k_block = min(rank * rank_k_blocks, all_k_blocks);
  const int k_blocks = min(rank_k_blocks, all_k_blocks - first_k_block);
  StageState<Config::kStages> state;  // the loading thread's, and each math thread's

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(map_a);
    ptx::prefetch_tensormap(map_b);
    barriers.init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();

  if (warp < Config::kMathWarps) {
    if constexpr (Config::kReallocate) ptx::setmaxnreg_inc<Config::kMathRegisters>();
    const int row = warp * 16 + fragment_row<Config::kMajorA>(lane / 4);
    float sum[Config::kTileN / 2];
    multiply<Config>(sum, barriers, stages, parts, row, lane, k_blocks, state);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < Config::kTileN / 2; ++i) finite &= is_finite(sum[i]);
    if (ptx::bar_red_or(0, !finite)) {
      multiply_add<Config>(sum, barriers, stages, row, lane, k_blocks, state);
      ptx::bar_sync(1, Config::kMathThreads);  // the stages have been read
    }
    write_tile<Config>(sum, stages, row, lane % 4);
    cluster_sync<Config::kClusterK>();
    const int first_row = Config::kTransposed ? n : m;
    const int first_column = Config::kTransposed ? m : n;
    const i64 at = first_row * ldd + first_column;
    char* to = static_cast<char*>(d) + at * (output & 1 ? 2 : 4);
    store_tile<Config>(stages, to, ldd, (Config::kTransposed ? N : M) - first_row,
                       (Config::kTransposed ? M : N) - first_column, rank, output, threadIdx.x);
  } else {
    if constexpr (Config::kReallocate) ptx::setmaxnreg_dec<Config::kOtherRegisters>();
    const int k = first_k_block * kTileK, converter = warp - Config::kMathWarps - 1;
    if (converter >= 0) {
      if (converter < Config::kConverterGroups * Config::kConverterWarps) {
        convert<Config>(barriers, stages, parts, converter, lane, k_blocks);
      }
    } else {
      if (lane == 0) produce(map_a, map_b, barriers, stages, m, n, k, k_blocks, state);
      __syncwarp();
      ptx::griddepcontrol_launch_dependents();
    }
    if (ptx::bar_red_or(0, false)) {
      if (warp == Config::kMathWarps && lane == 0) {
        produce(map_a, map_b, barriers, stages, m, n, k, k_blocks, state);
      }
      __syncwarp();
    }
    cluster_sync<Config::kClusterK>();
  }
  if constexpr (Config::kClusterK > 1) {  // a tile must outlive the peers' reads
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace cake

using Config = cake::config::CAKE_CONFIG;

extern "C" __global__ void __cluster_dims__(Config::kClusterK, 1, 1)
    __launch_bounds__(Config::kThreads, 1)
        CAKE_CONCATENATE(sm90_router_gemm_,
                         CAKE_CONFIG)(const __grid_constant__ cake::TensorMap map_a,
                                      const __grid_constant__ cake::TensorMap map_b, void* d,
                                      cake::i64 ldd, int M, int N, int K, int output) {
  cake::router_gemm<Config>(map_a, map_b, d, ldd, M, N, K, output);
}
