// One inline function per PTX instruction, named after it. No policy lives here.
//
// Shared-memory operands are 32-bit shared-window addresses (`shared_address`); `bar` is the
// address of an mbarrier. A function issued by "one thread" is meant for a thread chosen by the
// caller.
#pragma once

#include "cake/types.cuh"

namespace cake::ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- warps, warpgroups, clusters ----

// True in one lane of a warp whose lanes are all here.
__device__ __forceinline__ bool elect_sync() {
  u32 elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(elected));
  return elected != 0;
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ u32 cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Orders no writes: for a barrier that only keeps shared memory alive, or behind a fence.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Around a relaxed barrier: they order accesses to shared memory alone.
__device__ __forceinline__ void fence_release_shared_cluster() {
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
}

__device__ __forceinline__ void fence_acquire_shared_cluster() {
  asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}

// ---- programmatic dependent launch ----

__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- mbarrier ----

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives on the same barrier of CTA `rank` of the cluster. Without `.release.cluster`: that
// qualifier costs a MEMBAR.ALL.GPU per arrival (757 -> 635 TFLOP/s on an H200), and what it would
// order is the wgmma reads that `wgmma.wait_group` has already seen complete.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(u32 bar, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(bar),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- bulk tensor copies (TMA) ----

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#define CAKE_TMA_LOAD(rank) \
  "cp.async.bulk.tensor." rank ".shared::cluster.global.mbarrier::complete_tx::bytes"

__device__ __forceinline__ void cp_async_bulk_tensor_2d(u32 dst, const TensorMap& map, u32 bar,
                                                        int x, int y) {
  asm volatile(CAKE_TMA_LOAD("2d") " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst), "l"(&map), "r"(bar),
               "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d(u32 dst, const TensorMap& map, u32 bar,
                                                        int x, int y, int z) {
  asm volatile(CAKE_TMA_LOAD("3d") " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst), "l"(&map),
               "r"(bar), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d(u32 dst, const TensorMap& map, u32 bar,
                                                        int x, int y, int z, int w) {
  asm volatile(CAKE_TMA_LOAD("4d") " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst), "l"(&map),
               "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// The multicast forms write the box at the same offset of every CTA in `ctas` (one bit each) and
// complete on the same barrier offset there.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(u32 dst, const TensorMap& map,
                                                                  u32 bar, u16 ctas, int x, int y,
                                                                  int z) {
  asm volatile(
      CAKE_TMA_LOAD("3d") ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(dst),
      "l"(&map), "r"(bar), "h"(ctas), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_multicast(u32 dst, const TensorMap& map,
                                                                  u32 bar, u16 ctas, int x, int y,
                                                                  int z, int w) {
  asm volatile(
      CAKE_TMA_LOAD("4d") ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(dst),
      "l"(&map), "r"(bar), "h"(ctas), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

#undef CAKE_TMA_LOAD

__device__ __forceinline__ void cp_async_bulk_tensor_3d_store(const TensorMap& map, u32 src, int x,
                                                              int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(src), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void cp_reduce_async_bulk_tensor_3d_add(const TensorMap& map, u32 src,
                                                                   int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(&map),
      "r"(src), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's newest groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- wgmma bookkeeping (the products are in wgmma.cuh) ----

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- data movement and conversion ----

__device__ __forceinline__ void stmatrix_x4(u32 dst, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void st_shared_v2_f32(u32 dst, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(dst), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void st_shared_f32(u32 dst, float a) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(dst), "f"(a) : "memory");
}

__device__ __forceinline__ void st_shared_v4_u32(u32 dst, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ float ld_shared_f32(u32 src) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(src) : "memory");
  return v;
}

__device__ __forceinline__ u16 ld_shared_u16(u32 src) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(src) : "memory");
  return v;
}

__device__ __forceinline__ float4 ld_shared_v4_f32(u32 src) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(src)
               : "memory");
  return v;
}

// The address that `local` has in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ u32 mapa_shared_cluster(u32 local, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}

__device__ __forceinline__ float4 ld_shared_cluster_v4_f32(u32 src) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(src)
               : "memory");
  return v;
}

__device__ __forceinline__ uint4 ld_shared_v4_u32(u32 src) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(src)
               : "memory");
  return v;
}

// Packs two floats into bf16x2, round to nearest even; `low` goes to the lower address.
__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace cake::ptx
