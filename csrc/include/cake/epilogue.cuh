// From wgmma accumulators to global memory.
//
// A warpgroup owns its 64 rows from the first product to the last store. BF16 results are packed
// into half as many registers and stored while the next tile is multiplied: a slice of 64 columns
// in each of the next k-blocks, through a slab of shared memory of each warp's own. So between two
// tiles the tensor cores wait for the packing alone. FP32 results leave no registers for that: they
// are staged as 128-byte-wide slices and handed to the copy engine before the next tile begins,
// while the other warpgroup may still be multiplying.
#pragma once

#include "cake/wgmma.cuh"

namespace cake {

constexpr int kWarpgroup = 128;
constexpr int kSlabBytes = 16 * 128;  // a warp's 16 rows of one slice

// The bf16 results of a warpgroup's tile, 64 rows of kColumns, on their way out. 8 groups of 16,384
// rows, N = 6144, K = 2048 on an H200: 3.6 % faster than storing before the next tile begins.
template <int kColumns>
class DeferredTile {
 public:
  __device__ __forceinline__ DeferredTile(u32 slabs, int thread)
      : slab_(slabs + thread / 32 * kSlabBytes), thread_(thread) {}

  // Takes a tile, when the last one has been stored: `rows` rows and `columns` columns of it are
  // written to `out`, whose rows are ld elements apart.
  __device__ __forceinline__ void pack(const float (&acc)[kColumns / 2], bf16* out, i64 ld,
                                       int rows, int columns) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      packed_[i] = ptx::cvt_rn_bf16x2_f32(acc[2 * i], acc[2 * i + 1]);
    }
    const int row = thread_ / 32 * 16 + thread_ % 32 / 8, column = 8 * (thread_ % 8);
    out_ = out + row * ld + column;
    ld_ = ld;
    rows_ = rows - row;
    columns_ = columns - column;
    pending_ = true;
  }

  // Stores one slice of the tile, if there is one.
  __device__ __forceinline__ void store(int slice) const {
    if (slice >= kSlices || !pending_) return;
    if (slice == 0) store_slice<0>();
    if constexpr (kSlices > 1) {
      if (slice == 1) store_slice<1>();
    }
    if constexpr (kSlices > 2) {
      if (slice == 2) store_slice<2>();
      if (slice == 3) store_slice<3>();
    }
  }

  // Stores the slices from `slice` on.
  __device__ __forceinline__ void store_from(int slice) const {
    for (; slice < kSlices; ++slice) store(slice);
  }

 private:
  static constexpr int kSlices = kColumns / 64;
  static_assert(kSlices == 1 || kSlices == 2 || kSlices == 4, "store() names each slice");

  // The warp's rows as wgmma deals them out -> 128 contiguous bytes of a row for 8 lanes.
  template <int kSlice>
  __device__ __forceinline__ void store_slice() const {
    const int lane = thread_ % 32;
    __syncwarp();  // the slab has been read
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const u32* d = packed_ + 2 * (8 * kSlice + j);
      const int row = lane % 16, chunk = (j + lane / 16) ^ (row % 8);
      ptx::stmatrix_x4(slab_ + row * 128 + chunk * 16, d[0], d[1], d[2], d[3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int row = i + lane / 8, chunk = (lane % 8) ^ (row % 8);
      const uint4 value = ptx::ld_shared_v4_u32(slab_ + row * 128 + chunk * 16);
      if (i < rows_ && kSlice * 64 < columns_) {
        *reinterpret_cast<uint4*>(out_ + i * ld_ + kSlice * 64) = value;
      }
    }
  }

  u32 packed_[kColumns / 4];
  bf16* out_;  // of this thread's first chunk of 8 columns; rows_ and columns_ are left from there
  i64 ld_;
  int rows_, columns_;
  u32 slab_;
  int thread_;
  bool pending_ = false;
};

// FP32 columns [kSlice * 32, ...) of the accumulators -> one staging buffer.
template <int kSlice, int kColumns>
__device__ __forceinline__ void write_slice(const float (&acc)[kColumns / 2], u32 buffer,
                                            int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* d = acc + 4 * (4 * kSlice + j);
    const int chunk = (2 * j + lane % 4 / 2) ^ (row % 8);
    const u32 address = buffer + row * 128 + chunk * 16 + lane % 2 * 8;
    ptx::st_shared_v2_f32(address, d[0], d[1]);
    ptx::st_shared_v2_f32(address + 8 * 128, d[2], d[3]);
  }
}

// Stages the accumulators, two slices at a time, and calls emit(first column, buffer) for each, in
// thread 0, once it is visible to the copy engine. emit makes bulk stores: thread 0 waits for them
// before a buffer is written again.
template <int kColumns, int kSlice = 0, class Emit>
__device__ __forceinline__ void store_slices(const float (&acc)[kColumns / 2], u32 staging,
                                             int barrier, int thread, const Emit& emit) {
  static_assert(kColumns % 64 == 0, "every round fills both buffers");
  if constexpr (kSlice < kColumns / 32) {
    if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
    ptx::bar_sync(barrier, kWarpgroup);
    write_slice<kSlice, kColumns>(acc, staging, thread);
    write_slice<kSlice + 1, kColumns>(acc, staging + kBoxBytes, thread);
    ptx::fence_proxy_async_shared_cta();
    ptx::bar_sync(barrier, kWarpgroup);
    if (thread == 0) {
      emit(kSlice * 32, staging);
      emit((kSlice + 1) * 32, staging + kBoxBytes);
      ptx::cp_async_bulk_commit_group();
    }
    store_slices<kColumns, kSlice + 2>(acc, staging, barrier, thread, emit);
  }
}

// acc += the bf16 values at out[rows, columns], so that the sum is rounded once. `out` is the
// warpgroup's first element; elements outside are left alone.
template <int kColumns>
__device__ __forceinline__ void add_bf16(float (&acc)[kColumns / 2], const bf16* out, i64 ld,
                                         int rows, int columns, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int column = 2 * (thread % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) continue;
    const bf16* source = out + (row + 8 * half) * ld + column;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (8 * j >= columns) continue;  // a multiple of 8: whole blocks are in or out
      const u32 pair = *reinterpret_cast<const u32*>(source + 8 * j);
      acc[4 * j + 2 * half] += __uint_as_float(pair << 16);
      acc[4 * j + 2 * half + 1] += __uint_as_float(pair & 0xffff0000);
    }
  }
}

}  // namespace cake
