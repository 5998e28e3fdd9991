// What the math warpgroups of a router tile do: the products of each k-block, added up in FP32.
//
// A warpgroup splits its rows of A (tf32x3.cuh), multiplies them by B's parts, and adds the
// products of a k-block to its sums while something else multiplies: its own next k-block, or,
// where registers do not suffice for two, the other warpgroup. Config is that of
// sm90_router_gemm.cu.
#pragma once

#include "cake/router_pipeline.cuh"

namespace cake {

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

// Where a math thread stands in the rings: the raw k-block that it takes next, and those of raw
// k-blocks and of parts that it lets go next.
template <class Config>
struct MathState {
  StageState<Config::kStages> raw, multiplied;
  StageState<Config::kPartsBuffers> parts, added;
};

// What a math warpgroup does for a k-block: makes A's fragments, waits for B's parts, starts the
// products, and adds them when they are done.
template <class Config>
struct MathSteps {
  static constexpr int kCount = Config::kTileN / 2;
  using Products = float[kCount];

  const RouterBarriers<Config>& barriers;
  const typename Config::RawA& raw;
  u32 smem;
  int lane;
  MathState<Config>& state;

  __device__ __forceinline__ void load(Fragments& a) const {
    wait(barriers.full(state.raw.stage), state.raw.phase);
    raw.load(a, smem + state.raw.stage * Config::kStageBytes);
    state.raw.advance();
  }

  __device__ __forceinline__ void await_parts() const {
    wait(barriers.parts_full(state.parts.stage), state.parts.phase);
  }

  __device__ __forceinline__ void start(Products& products, const Fragments& a) const {
    const u32 parts = smem + Config::kParts + state.parts.stage * Config::kPartsBytes;
    multiply_k_block<Config>(products, a, parts);
    // Only now is the raw k-block free: products are issued when their registers have been loaded,
    // but an arrival behind the loads would overtake them (seen as one wrong result in a thousand).
    if (lane == 0) ptx::mbarrier_arrive(barriers.empty(state.multiplied.stage));
    state.multiplied.advance();
    state.parts.advance();
  }

  __device__ __forceinline__ void add(Products& sum, const Products& products) const {
    if (lane == 0) ptx::mbarrier_arrive(barriers.parts_empty(state.added.stage));
    state.added.advance();
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] += products[i];
  }
};

// sum[64, kTileN] of a tile's k-blocks, the next k-block's products under way while one's are
// added.
template <class Config>
__device__ __forceinline__ void multiply_ahead(float (&sum)[Config::kTileN / 2],
                                               const MathSteps<Config>& steps, int k_blocks) {
  if (k_blocks == 0) return;
  float even[Config::kTileN / 2], odd[Config::kTileN / 2];
  Fragments even_a, odd_a;
  const auto start = [&](float (&products)[Config::kTileN / 2], const Fragments& a) {
    steps.await_parts();
    steps.start(products, a);
  };
  steps.load(even_a);
  start(even, even_a);
  if (k_blocks > 1) steps.load(odd_a);
  // The products of k_block are under way, the fragments of the next one at hand.
  int k_block = 0;
#pragma unroll 1
  for (; k_block + 2 < k_blocks; k_block += 2) {
    start(odd, odd_a);
    ptx::wgmma_wait_group<1>();
    steps.add(sum, even);
    steps.load(even_a);
    start(even, even_a);
    ptx::wgmma_wait_group<1>();
    steps.add(sum, odd);
    if (k_block + 3 < k_blocks) steps.load(odd_a);
  }
  if (k_block + 1 < k_blocks) {
    start(odd, odd_a);
    ptx::wgmma_wait_group<1>();
    steps.add(sum, even);
    ptx::wgmma_wait_group<0>();
    steps.add(sum, odd);
  } else {
    ptx::wgmma_wait_group<0>();
    steps.add(sum, even);
  }
}

// Two math warpgroups that multiply in turns: barrier 2 is the first one's turn, 3 the second's.
__device__ __forceinline__ void await_turn(int warpgroup) {
  if (warpgroup == 0) {
    ptx::bar_sync(2, 256);
  } else {
    ptx::bar_sync(3, 256);
  }
}

__device__ __forceinline__ void pass_turn(int warpgroup) {
  if (warpgroup == 0) {
    ptx::bar_arrive(3, 256);
  } else {
    ptx::bar_arrive(2, 256);
  }
}

// The same where registers do not suffice for that: one warpgroup makes fragments and adds products
// while the other one multiplies. `last`: no tile follows, and no turn is left over.
template <class Config>
__device__ __forceinline__ void multiply_in_turns(float (&sum)[Config::kTileN / 2],
                                                  const MathSteps<Config>& steps, int k_blocks,
                                                  int warpgroup, bool last) {
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    float products[Config::kTileN / 2];
    Fragments fragments;
    steps.load(fragments);
    steps.await_parts();
    await_turn(warpgroup);
    steps.start(products, fragments);
    if (warpgroup == 0 || !last || k_block + 1 < k_blocks) pass_turn(warpgroup);
    ptx::wgmma_wait_group<0>();
    steps.add(sum, products);
  }
}

}  // namespace cake
