// From wgmma accumulators to global memory, one warpgroup at a time.
//
// A warpgroup owns its 64 rows from the first product to the last store: its own staging buffers,
// its own named barrier, its own bulk stores. It writes 64-row, 128-byte-wide slices (64 bf16 or 32
// FP32 columns), one a buffer, with the 128-byte swizzle, hands them to the copy engine together
// and goes on, while the other warpgroup may still be multiplying. Where all slices of a tile have
// a buffer, nothing waits for the copy engine within the tile.
#pragma once

#include "cake/wgmma.cuh"

namespace cake {

constexpr int kWarpgroup = 128;

template <class Element>
constexpr int kSliceColumns = 128 / sizeof(Element);

// Columns [kSlice * kSliceColumns, ...) of the accumulators -> one staging buffer, converted to
// Element.
template <class Element, int kSlice, int kColumns>
__device__ __forceinline__ void write_slice(const float (&acc)[kColumns / 2], u32 buffer,
                                            int thread) {
  const int warp = thread / 32, lane = thread % 32;
  if constexpr (sizeof(Element) == 2) {
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* d = acc + 4 * (8 * kSlice + j);
      const int chunk = (j + lane / 16) ^ (row % 8);
      ptx::stmatrix_x4(buffer + row * 128 + chunk * 16, ptx::cvt_rn_bf16x2_f32(d[0], d[1]),
                       ptx::cvt_rn_bf16x2_f32(d[2], d[3]), ptx::cvt_rn_bf16x2_f32(d[4], d[5]),
                       ptx::cvt_rn_bf16x2_f32(d[6], d[7]));
    }
  } else {
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* d = acc + 4 * (4 * kSlice + j);
      const int chunk = (2 * j + lane % 4 / 2) ^ (row % 8);
      const u32 address = buffer + row * 128 + chunk * 16 + lane % 2 * 8;
      ptx::st_shared_v2_f32(address, d[0], d[1]);
      ptx::st_shared_v2_f32(address + 8 * 128, d[2], d[3]);
    }
  }
}

template <class Element, int kColumns, int kFirst, int kCount, int kDone = 0>
__device__ __forceinline__ void write_slices(const float (&acc)[kColumns / 2], u32 staging,
                                             int thread) {
  if constexpr (kDone < kCount) {
    write_slice<Element, kFirst + kDone, kColumns>(acc, staging + kDone * kBoxBytes, thread);
    write_slices<Element, kColumns, kFirst, kCount, kDone + 1>(acc, staging, thread);
  }
}

// Stages the accumulators, as many slices at a time as there are buffers, and calls emit(first
// column, buffer) for each, in all 128 threads, once it is visible to the copy engine and to the
// warpgroup's own reads. Thread 0 must issue every bulk store that emit makes: it is the one that
// waits for them before a buffer is written again.
template <class Element, int kColumns, int kMaxBuffers, int kSlice = 0, class Emit>
__device__ __forceinline__ void store_slices(const float (&acc)[kColumns / 2], u32 staging,
                                             int barrier, int thread, const Emit& emit) {
  constexpr int kSlices = kColumns / kSliceColumns<Element>;
  constexpr int kBuffers = min_of(kSlices, kMaxBuffers);
  static_assert(kSlices % kBuffers == 0, "every round of slices fills the same buffers");
  if constexpr (kSlice < kSlices) {
    if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
    ptx::bar_sync(barrier, kWarpgroup);
    write_slices<Element, kColumns, kSlice, kBuffers>(acc, staging, thread);
    ptx::fence_proxy_async_shared_cta();
    ptx::bar_sync(barrier, kWarpgroup);
#pragma unroll
    for (int i = 0; i < kBuffers; ++i) {
      emit((kSlice + i) * kSliceColumns<Element>, staging + i * kBoxBytes);
    }
    if (thread == 0) ptx::cp_async_bulk_commit_group();
    store_slices<Element, kColumns, kMaxBuffers, kSlice + kBuffers>(acc, staging, barrier, thread,
                                                                    emit);
  }
}

// Copies the first `rows` rows of a staged bf16 slice to out[.., column ..], clipped to
// `num_columns`: the rows below belong to another group. 16 bytes a thread, 128 contiguous bytes a
// row.
__device__ __forceinline__ void copy_rows(u32 buffer, bf16* out, i64 ld, int rows, int column,
                                          int num_columns, int thread) {
  const int chunk = thread % 8;
  if (column + 8 * chunk >= num_columns) return;
#pragma unroll
  for (int row = thread / 8; row < kAtomM; row += kWarpgroup / 8) {
    if (row < rows) {
      const uint4 value = ptx::ld_shared_v4_u32(buffer + row * 128 + (chunk ^ (row % 8)) * 16);
      *reinterpret_cast<uint4*>(out + row * ld + column + 8 * chunk) = value;
    }
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
