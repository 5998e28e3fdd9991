// FP32 products on TF32 tensor cores: the two-way split and the tiles it is made from.
//
// x = high + low, high the nearest TF32 number (11 bits) and low the exact rest, of which the
// tensor core takes the first 11 bits. Three of the four products matter in FP32 (Ootomo and Yokota
// 2022); the product of two rests lies below 2^-24 of the result, with either sign. A bf16 number
// is its own high part. A is split by the warps that multiply, from shared memory into the
// registers that wgmma takes A from; B by converter warps, once for all rows of the tile, into two
// K-major tiles. TF32 operands in shared memory must be K-major, so the converters also transpose.
//
// The tensor core may see the steps of a product in any order, if A's is B's. The order is the one
// in which a lane's reads of A are wide and free of bank conflicts; `contraction_step` has B's
// follow.
//
// Raw tiles, 32 contraction steps deep:
//   A, K-major    [rows][32] f32, 128B swizzle
//   A, MN-major   [rows / 32][32][32] f32, 128B
//   B, K-major    [columns][32] f32, 128B, or bf16, 64B
//   B, MN-major   [32][columns] f32, no swizzle, or [columns / 64][32][64] bf16, 128B
#pragma once

#include "cake/wgmma_rs.cuh"

namespace cake {

constexpr int kTileK = 32;  // contraction steps of a stage, and between promotions
constexpr int kAtoms = 4;   // products of 8 steps in a k-block

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INFINITY; }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32{x} << 16); }

// The halves of a bf16x2.
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

// A number that is not finite, or that TF32 rounds to Inf, has a NaN among its parts, and so have
// all its products.
__device__ __forceinline__ void split_tf32x2(float x, u32& high, u32& low) {
  high = (__float_as_uint(x) + 0x1000) & 0xffffe000;
  low = __float_as_uint(x - __uint_as_float(high));
}

// The contraction step at position 4 * quad + i of a part's row.
template <Major kMajorA>
__device__ __forceinline__ int contraction_step(int quad, int i) {
  return kMajorA == Major::K ? 16 * (quad / 4) + 4 * i + quad % 4
                             : 8 * (quad / 2) + 2 * i + quad % 2;
}

// The row, of eight, that the four lanes of `i` hold in a fragment of a K-major raw tile: two of
// them that read shared memory together must differ in the swizzle's upper bit.
template <Major kMajorA>
__device__ __forceinline__ int fragment_row(int i) {
  return kMajorA == Major::K ? i >> 1 | (i & 1) << 2 : i;
}

// A thread's fragments of a k-block of A. Of atom s, with lane q of four: [s][0] holds row `row`
// and the atom's step q, [1] the row eight below, [2], [3] the same rows and step q + 4.
struct Fragments {
  u32 high[kAtoms][4], low[kAtoms][4];

  __device__ __forceinline__ void set(int atom, int i, float x) {
    split_tf32x2(x, high[atom][i], low[atom][i]);
  }
};

// The raw tile of A, kRows x kTileK, as lane `q` of four sees it that share rows `row` and `row`
// + 8.
template <Major kMajor, int kRows>
struct RawA;

template <int kRows>
struct RawA<Major::K, kRows> {
  static constexpr int kBytes = kRows * kTileK * 4;
  u32 offset[2];  // of each half of the k-block

  __device__ __forceinline__ RawA(int row, int q) {
    offset[0] = address(row, 4 * q);
    offset[1] = address(row, 4 * q + 16);
  }

  __device__ __forceinline__ void load(Fragments& a, u32 tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 x = ptx::ld_shared_v4_f32(tile + offset[half] + i * 8 * 128);
        a.set(2 * half, i, x.x);
        a.set(2 * half, i + 2, x.y);
        a.set(2 * half + 1, i, x.z);
        a.set(2 * half + 1, i + 2, x.w);
      }
    }
  }

  static __device__ __forceinline__ u32 address(int row, int k) {
    return row * 128 + ((k / 4 ^ row % 8) << 4) + k % 4 * 4;
  }
};

template <int kRows>
struct RawA<Major::MN, kRows> {
  static constexpr int kBytes = kRows * kTileK * 4;
  u32 offset[4];  // of rows `row`, `row` + 8 at steps 2q, 2q + 1

  __device__ __forceinline__ RawA(int row, int q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) offset[i] = address(row + i % 2 * 8, 2 * q + i / 2);
  }

  __device__ __forceinline__ void load(Fragments& a, u32 tile) const {
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // the swizzle repeats after eight steps
        a.set(atom, i, ptx::ld_shared_f32(tile + offset[i] + atom * 8 * 128));
      }
    }
  }

  static __device__ __forceinline__ u32 address(int row, int k) {
    return row / 32 * 4096 + k * 128 + ((row % 32 / 4 ^ k % 8) << 4) + row % 4 * 4;
  }
};

// Parts of four neighbouring positions of a column: the high part's tile, then the low part's.
template <int kColumns>
__device__ __forceinline__ void store_parts(u32 parts, int column, int quad, const float (&x)[4]) {
  u32 high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_tf32x2(x[i], high[i], low[i]);
  const u32 to = parts + column * 128 + ((quad ^ column % 8) << 4);
  ptx::st_shared_v4_u32(to, high[0], high[1], high[2], high[3]);
  ptx::st_shared_v4_u32(to + kColumns * 128, low[0], low[1], low[2], low[3]);
}

// The raw tile of B, kColumns x kTileK. `split` makes its parts with kThreads threads, in one round
// if those are kItems.
template <Major kMajor, bool kF32, int kColumns>
struct RawB;

template <int kColumns>
struct RawB<Major::K, true, kColumns> {
  using Element = float;
  static constexpr int kBytes = kColumns * 128, kItems = kColumns * 2;

  // An item is half of a column's steps; 8 threads read 4 columns, which the swizzle keeps apart.
  template <Major kMajorA, int kThreads>
  static __device__ __forceinline__ void split(u32 tile, u32 parts, int thread) {
    static_assert(kMajorA == Major::K, "A is K-major where B is");
#pragma unroll 1
    for (int item = thread; item < kItems; item += kThreads) {
      const int column = item >> 1, half = item & 1;
      float4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = ptx::ld_shared_v4_f32(tile + column * 128 + ((4 * half + i ^ column % 8) << 4));
      }
      store_parts<kColumns>(parts, column, 4 * half, {x[0].x, x[1].x, x[2].x, x[3].x});
      store_parts<kColumns>(parts, column, 4 * half + 1, {x[0].y, x[1].y, x[2].y, x[3].y});
      store_parts<kColumns>(parts, column, 4 * half + 2, {x[0].z, x[1].z, x[2].z, x[3].z});
      store_parts<kColumns>(parts, column, 4 * half + 3, {x[0].w, x[1].w, x[2].w, x[3].w});
    }
  }
};

template <int kColumns>
struct RawB<Major::K, false, kColumns> {
  using Element = bf16;
  static constexpr int kBytes = kColumns * 64, kItems = kColumns * 2;

  template <Major kMajorA, int kThreads>
  static __device__ __forceinline__ void split(u32 tile, u32 parts, int thread) {
#pragma unroll 1
    for (int item = thread; item < kItems; item += kThreads) {
      const int column = item >> 1, half = item & 1;
      u32 x[8];  // pairs of steps
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 v =
            ptx::ld_shared_v4_u32(tile + column * 64 + ((2 * half + i ^ column / 2 % 4) << 4));
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 pair = x[2 * i + j / 2];
          high[i] = j % 2 ? pair & 0xffff0000 : pair << 16;
        }
        ptx::st_shared_v4_u32(parts + column * 128 + ((4 * half + j ^ column % 8) << 4), high[0],
                              high[1], high[2], high[3]);
      }
    }
  }
};

// How many threads share a column: as keep most of seven warps busy, in groups that split a k-block
// in one round; many rather than few, since the first k-block is waited for.
constexpr int threads_of_column(int columns) {
  int best = 1, most = 0;
  for (int threads = 1; threads <= 4; threads *= 2) {
    const int groups = min_of(7 / ceil_div(columns * threads, 32), 4);
    if (groups > 0 && columns * threads * groups >= most) {
      most = columns * threads * groups;
      best = threads;
    }
  }
  return best;
}

// MN-major, of either type: kRuns threads take a column, a run of its quads each.
template <int kColumns, bool kF32>
struct RawBRows {
  static constexpr int kRuns = threads_of_column(kColumns);
  static constexpr int kItems = kColumns * kRuns;

  template <Major kMajorA, int kThreads>
  static __device__ __forceinline__ void split(u32 tile, u32 parts, int thread) {
    using Raw = RawB<Major::MN, kF32, kColumns>;
    static_assert(kThreads >= kItems, "one round");
    const int column = thread % kColumns, run = thread / kColumns;
    if (run >= kRuns) return;
#pragma unroll(kF32 ? 8 : 4)  // bf16's addresses take more registers
    for (int n = 0; n < 8 / kRuns; ++n) {
      const int quad = run * (8 / kRuns) + n;
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = Raw::value(tile, column, contraction_step<kMajorA>(quad, i));
      }
      if constexpr (kF32) {
        store_parts<kColumns>(parts, column, quad, x);
      } else {
        ptx::st_shared_v4_u32(parts + column * 128 + ((quad ^ column % 8) << 4),
                              __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                              __float_as_uint(x[3]));
      }
    }
  }
};

template <int kColumns>
struct RawB<Major::MN, true, kColumns> : RawBRows<kColumns, true> {
  using Element = float;
  static constexpr int kBytes = kColumns * 128;

  static __device__ __forceinline__ float value(u32 tile, int column, int k) {
    return ptx::ld_shared_f32(tile + (k * kColumns + column) * 4);
  }
};

template <int kColumns>
struct RawB<Major::MN, false, kColumns> : RawBRows<kColumns, false> {
  using Element = bf16;
  static constexpr int kBytes = ceil_div(kColumns, 64) * 4096;

  static __device__ __forceinline__ float value(u32 tile, int column, int k) {
    return to_float(ptx::ld_shared_u16(tile + column / 64 * 4096 + k * 128 +
                                       ((column % 64 / 8 ^ k % 8) << 4) + column % 8 * 2));
  }
};

}  // namespace cake
