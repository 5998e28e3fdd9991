// The ring of shared-memory stages between the TMA producer and the wgmma consumers of a cluster,
// and the loops of both over it.
//
// Each stage has a `full` and an `empty` mbarrier. `full` completes when the bytes that its CTA
// announced have landed, from whichever CTA of the cluster issued the copy. `empty` completes when
// every consumer warp of every CTA in the cluster has let go of the stage, because a multicast copy
// writes into all of them. Producer and consumers each carry a (stage, phase) of their own and meet
// only in the barriers, so the two warpgroups may drift apart by as many k-blocks as there are
// stages.
#pragma once

#include "cake/wgmma.cuh"

namespace cake {

// The two halves of a barrier of all threads of the cluster; with one CTA all of it is in the wait.
// The arrival is relaxed and orders only what a fence before it releases, here that the mbarriers
// exist. A releasing one is a MEMBAR.ALL.GPU in each warp.
template <int kClusterSize>
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kClusterSize > 1) ptx::barrier_cluster_arrive_relaxed();
}

template <int kClusterSize>
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kClusterSize > 1) {
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
}

// Until the phase of `parity` of a barrier has completed.
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  while (!ptx::mbarrier_try_wait_parity(bar, parity)) {
  }
}

template <int kStages>
struct StageState {
  int stage = 0;
  u32 phase = 0;

  // After so many steps.
  static __device__ __forceinline__ StageState at(int steps) {
    return {steps % kStages, steps / kStages % 2u};
  }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // By at most a round.
  __device__ __forceinline__ void advance(int stages) {
    stage += stages;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
    }
  }
};

template <int kStages, int kClusterSize, int kConsumerWarps>
struct Pipeline {
  static constexpr int kBytes = 2 * kStages * 8;
  using State = StageState<kStages>;

  u32 barriers;  // shared address of full[kStages], then empty[kStages]

  __device__ __forceinline__ u32 full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ u32 empty(int stage) const { return barriers + 8 * (kStages + stage); }

  // One thread; the caller then fences and synchronises the cluster.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), kConsumerWarps * kClusterSize);
    }
  }

  // Producer: wait until the stage is free everywhere. A fresh barrier counts as having completed
  // the phase before its first, hence the inverted parity.
  __device__ __forceinline__ void producer_wait(const State& state) const {
    wait(empty(state.stage), state.phase ^ 1);
  }

  // Producer, when it has no more to load: wait until every stage is free everywhere. Then no
  // arrival or multicast of a peer is still on its way to this CTA, which may exit. (A releasing
  // cluster barrier would wait for all stores to global memory as well, some 2000 clocks on an
  // H200, and a relaxed one would hold every warp until the slowest is done.)
  __device__ __forceinline__ void producer_drain(State state) const {
    for (int i = 0; i < kStages; ++i) {
      producer_wait(state);
      state.advance();
    }
  }

  __device__ __forceinline__ void consumer_wait(const State& state) const {
    wait(full(state.stage), state.phase);
  }

  // Every consumer warp: lane r tells CTA r of the cluster.
  __device__ __forceinline__ void consumer_release(int stage, int lane) const {
    if constexpr (kClusterSize == 1) {
      if (lane == 0) ptx::mbarrier_arrive(empty(stage));
    } else {
      if (lane < kClusterSize) ptx::mbarrier_arrive_shared_cluster(empty(stage), lane);
    }
  }
};

// The producer warp: a tile's k-blocks. issue(k_block, stage, full) makes the loads into a stage,
// in one lane, when the stage is free and `bytes` have been announced at its barrier `full`. All
// lanes walk the stages, so that ptxas keeps addresses and coordinates in uniform registers, as the
// copies want them: some 45 instructions a k-block. In one thread's loop each copy became a loop of
// its own, and it was 150.
template <class Pipeline, class Issue>
__device__ __forceinline__ void produce_k_blocks(const Pipeline& pipeline,
                                                 typename Pipeline::State& state, int k_blocks,
                                                 u32 bytes, const Issue& issue) {
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const u32 full = pipeline.full(state.stage);
    pipeline.producer_wait(state);
    if (ptx::elect_sync()) {
      ptx::mbarrier_arrive_expect_tx(full, bytes);
      issue(k_block, state.stage, full);
    }
    __syncwarp();
    state.advance();
  }
}

// acc[64, kN] = sum over `k_blocks` stages of A[64, 64] B[64, kN], one warpgroup; exact zeros
// without any. `tile_a`, `tile_b` are this warpgroup's parts of stage 0; a stage holds kBytesA of A
// and kBytesB of B. One k-block stays in flight: a stage is released when the products after it
// have been issued and its own have completed. overlap(k_block) is called while the products of
// k_block run, and those of the last one run on: returns its stage, or -1, for finish_products. The
// accumulators start as zeros rather than with an overwriting first product: ptxas keeps what that
// product would overwrite alive from tile to tile (184 bytes of stack), or, with the first k-block
// peeled, serialises the products (C7518).
template <Major kMajorA, Major kMajorB, int kBytesA, int kBytesB, int kN, class Pipeline,
          class Overlap>
__device__ __forceinline__ int start_products(float (&acc)[kN / 2], const Pipeline& pipeline,
                                              typename Pipeline::State& state, u32 tile_a,
                                              u32 tile_b, int k_blocks, int lane,
                                              const Overlap& overlap) {
  // Only the low halves of descriptors vary.
  constexpr u64 kHigh = make_descriptor(0) >> 32 << 32;
  const u32 first_a = make_descriptor(tile_a), first_b = make_descriptor(tile_b);
  u32 low_a = first_a + state.stage * (kBytesA >> 4),
      low_b = first_b + state.stage * (kBytesB >> 4);
#pragma unroll
  for (float& value : acc) value = 0.0f;
  int last = -1;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    pipeline.consumer_wait(state);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSwizzleElements / kAtomK; ++k) {
      Wgmma<kN, kMajorA, kMajorB>::mma_async(acc, kHigh | (low_a + k * kDescriptorStepK<kMajorA>),
                                             kHigh | (low_b + k * kDescriptorStepK<kMajorB>));
    }
    ptx::wgmma_commit_group();
    overlap(k_block);
    ptx::wgmma_wait_group<1>();  // <0>: -0.7 to +0.2 % (nt, nn)
    if (k_block > 0) pipeline.consumer_release(last, lane);
    last = state.stage;
    state.advance();
    low_a = state.stage == 0 ? first_a : low_a + (kBytesA >> 4);
    low_b = state.stage == 0 ? first_b : low_b + (kBytesB >> 4);
  }
  return last;
}

template <class Pipeline>
__device__ __forceinline__ void finish_products(const Pipeline& pipeline, int last, int lane) {
  ptx::wgmma_wait_group<0>();
  if (last >= 0) pipeline.consumer_release(last, lane);
}

// A warpgroup with no valid rows follows the stages without multiplying: the barriers count every
// warp.
template <class Pipeline>
__device__ __forceinline__ void skip_products(const Pipeline& pipeline,
                                              typename Pipeline::State& state, int k_blocks,
                                              int lane) {
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    pipeline.consumer_wait(state);
    __syncwarp();  // every lane has seen the stage full before any lets it go
    pipeline.consumer_release(state.stage, lane);
    state.advance();
  }
}

}  // namespace cake
