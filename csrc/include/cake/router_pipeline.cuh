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

  // One thread, which then synchronises with the others. One for each barrier was 0.6 us slower.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), Config::kMathWarps + Config::kConverterWarps);
    }
    for (int buffer = 0; buffer < Config::kPartsBuffers; ++buffer) {
      ptx::mbarrier_init(parts_full(buffer), Config::kConverterWarps);
      ptx::mbarrier_init(parts_empty(buffer), Config::kMathWarps);
    }
    ptx::fence_mbarrier_init_release_cluster();
  }
};
static_assert(8 * (2 * 12 + 2 * 4) <= kBarrierBytes, "room of the barriers");

__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  while (!ptx::mbarrier_try_wait_parity(bar, parity)) {
  }
}

// One thread: the loads of all k-blocks.
template <class Config>
__device__ __forceinline__ void produce(const TensorMap& map_a, const TensorMap& map_b,
                                        const RouterBarriers<Config>& barriers, u32 stages, int m,
                                        int n, int k, int k_blocks,
                                        StageState<Config::kStages>& state) {
  constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN;
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block, k += kTileK) {
    const u32 full = barriers.full(state.stage);
    const u32 a = stages + state.stage * Config::kStageBytes;
    const u32 b = a + Config::RawA::kBytes;
    wait(barriers.empty(state.stage), state.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, Config::kLoadBytes);
    if constexpr (Config::kMajorA == Major::K) {
      ptx::cp_async_bulk_tensor_2d(a, map_a, full, k, m);
    } else {
#pragma unroll
      for (int i = 0; i < kTileM; i += 32) {
        ptx::cp_async_bulk_tensor_2d(a + i * 128, map_a, full, m + i, k);
      }
    }
    if constexpr (Config::kMajorB == Major::K) {
      ptx::cp_async_bulk_tensor_2d(b, map_b, full, k, n);
    } else if constexpr (Config::kF32) {
      ptx::cp_async_bulk_tensor_2d(b, map_b, full, n, k);
    } else {
#pragma unroll
      for (int i = 0; i < kTileN; i += 64) {
        ptx::cp_async_bulk_tensor_2d(b + i * 64, map_b, full, n + i, k);
      }
    }
    state.advance();
  }
}

// A group of converter warps: the parts of every kConverterGroups-th k-block of B.
template <class Config>
__device__ __forceinline__ void convert(const RouterBarriers<Config>& barriers, u32 stages,
                                        u32 parts, int warp, int lane, int k_blocks) {
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
        stages + in.stage * Config::kStageBytes + Config::RawA::kBytes,
        parts + out.stage * Config::kPartsBytes, thread);
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
