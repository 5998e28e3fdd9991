// How operands reach the math warpgroups of a router tile: raw k-blocks by TMA, B's parts by
// converters.
//
// A stage holds a raw k-block of A and of B. `full` completes when its bytes have landed; `empty`
// when the math warps have A's numbers in registers and the converters have B's parts written. The
// parts have a ring of buffers of their own: `parts_full` completes when all warps of a group have
// written theirs, `parts_empty` when all math warps' products of them are done. Config is that of
// sm90_router_gemm.cu.
#pragma once

#include "cake/pipeline.cuh"
#include "cake/tf32x3.cuh"

namespace cake {

constexpr int kBarrierBytes = 256;

// The barriers of a CTA, by shared address, and the ring positions that each role carries.
template <class Config>
struct RouterBarriers {
  u32 base;

  __device__ __forceinline__ u32 full(int stage) const { return base + 8 * stage; }
  __device__ __forceinline__ u32 empty(int stage) const {
    return base + 8 * (Config::kStages + stage);
  }
  __device__ __forceinline__ u32 parts_full(int buffer) const {
    return base + 8 * (2 * Config::kStages + buffer);
  }
  __device__ __forceinline__ u32 parts_empty(int buffer) const {
    return base + 8 * (2 * Config::kStages + Config::kPartsBuffers + buffer);
  }

  // The thread that loads. One of each barrier's own was 0.6 us slower.
  __device__ __forceinline__ void init_full() const {
    for (int stage = 0; stage < Config::kStages; ++stage) ptx::mbarrier_init(full(stage), 1);
    ptx::fence_mbarrier_init_release_cluster();
    ptx::fence_proxy_async_shared_cta();  // copies are issued at once
  }
  // The same thread, which then synchronises with the others.
  __device__ __forceinline__ void init_others() const {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(empty(stage), Config::kMathWarps + Config::kConverterWarps);
    }
    for (int buffer = 0; buffer < Config::kPartsBuffers; ++buffer) {
      ptx::mbarrier_init(parts_full(buffer), Config::kConverterWarps);
      ptx::mbarrier_init(parts_empty(buffer), Config::kMathWarps);
    }
    ptx::fence_mbarrier_init_release_cluster();
  }
};

// The part of K that a CTA sums: a run of k-blocks for each rank of its cluster.
template <class Config>
struct KRange {
  int rank, first, k_blocks;

  __device__ __forceinline__ explicit KRange(int K) {
    rank = Config::kClusterK == 1 ? 0 : ptx::cluster_ctarank();
    const int all = ceil_div(K, kTileK), share = ceil_div(all, Config::kClusterK);
    k_blocks = max(min(share, all - rank * share), 0);
    first = min(rank * share, all) * kTileK;
  }
};

// The tiles of a CTA: those of its cluster's index, and gridDim.x further each.
template <class Config>
class TileRange {
 public:
  __device__ __forceinline__ TileRange(int M, int N)
      : rows_(ceil_div(M, Config::kTileM)),
        tiles_(rows_ * ceil_div(N, Config::kTileN)),
        tile_(blockIdx.x / Config::kClusterK) {}

  __device__ __forceinline__ int m() const { return tile_ % rows_ * Config::kTileM; }
  __device__ __forceinline__ int n() const { return tile_ / rows_ * Config::kTileN; }
  __device__ __forceinline__ int count() const {
    return Config::kClusterK > 1 ? 1 : ceil_div(tiles_ - tile_, static_cast<int>(gridDim.x));
  }
  __device__ __forceinline__ bool last() const { return count() <= 1; }
  __device__ __forceinline__ bool advance() {
    tile_ += gridDim.x;
    return Config::kClusterK == 1 && tile_ < tiles_;
  }

 private:
  int rows_, tiles_, tile_;
};

// One thread: a raw k-block into a stage, from row m, column n and step k.
template <class Config>
__device__ __forceinline__ void load_k_block(const TensorMap& map_a, const TensorMap& map_b,
                                             const RouterBarriers<Config>& barriers, u32 smem,
                                             int m, int n, int k, int stage) {
  const u32 full = barriers.full(stage);
  const u32 a = smem + stage * Config::kStageBytes;
  const u32 b = a + Config::RawA::kBytes;
  ptx::mbarrier_arrive_expect_tx(full, Config::kLoadBytes);
  if constexpr (Config::kMajorA == Major::K) {
    ptx::cp_async_bulk_tensor_2d(a, map_a, full, k, m);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kTileM; i += 32) {
      ptx::cp_async_bulk_tensor_2d(a + i * 128, map_a, full, m + i, k);
    }
  }
  if constexpr (Config::kMajorB == Major::K) {
    ptx::cp_async_bulk_tensor_2d(b, map_b, full, k, n);
  } else if constexpr (Config::kF32) {
    ptx::cp_async_bulk_tensor_2d(b, map_b, full, n, k);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kTileN; i += 64) {
      ptx::cp_async_bulk_tensor_2d(b + i * 64, map_b, full, n + i, k);
    }
  }
}

// The thread that loads: all k-blocks of all tiles but the first ones, which fill the stages.
template <class Config>
__device__ __forceinline__ void produce(const TensorMap& map_a, const TensorMap& map_b,
                                        const RouterBarriers<Config>& barriers, u32 smem,
                                        TileRange<Config> tiles, const KRange<Config>& range) {
  int k_block = min(range.k_blocks, Config::kStages);
  auto state = StageState<Config::kStages>::at(k_block);
  do {
#pragma unroll 1
    for (; k_block < range.k_blocks; ++k_block) {
      wait(barriers.empty(state.stage), state.phase ^ 1);
      load_k_block(map_a, map_b, barriers, smem, tiles.m(), tiles.n(),
                   range.first + k_block * kTileK, state.stage);
      state.advance();
    }
    k_block = 0;
  } while (tiles.advance());
}

// A group of converter warps: the parts of every kConverterGroups-th of all the CTA's k-blocks of
// B.
template <class Config>
__device__ __forceinline__ void convert(const RouterBarriers<Config>& barriers, u32 smem, int warp,
                                        int lane, int k_blocks) {
  constexpr int kThreads = Config::kConverterWarps * 32;
  const int thread = warp % Config::kConverterWarps * 32 + lane;
  const int group = warp / Config::kConverterWarps;
  StageState<Config::kStages> in;
  StageState<Config::kPartsBuffers> out;
  in.advance(group);
  out.advance(group);
#pragma unroll 1
  for (int k_block = group; k_block < k_blocks; k_block += Config::kConverterGroups) {
    wait(barriers.full(in.stage), in.phase);
    wait(barriers.parts_empty(out.stage), out.phase ^ 1);
    Config::RawB::template split<Config::kMajorA, kThreads>(
        smem + in.stage * Config::kStageBytes + Config::RawA::kBytes,
        smem + Config::kParts + out.stage * Config::kPartsBytes, thread);
    ptx::fence_proxy_async_shared_cta();  // wgmma reads what was written here
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(barriers.parts_full(out.stage));
      ptx::mbarrier_arrive(barriers.empty(in.stage));
    }
    in.advance(Config::kConverterGroups);
    out.advance(Config::kConverterGroups);
  }
}

}  // namespace cake
