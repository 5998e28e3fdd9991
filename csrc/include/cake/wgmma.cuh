// Warpgroup matrix products on bf16 tiles in shared memory: descriptors and the m64nNk16 atoms.
//
// A tile is a stack of 64-element-wide boxes as TMA writes them with the 128-byte swizzle: each box
// row is 128 bytes, each 8 rows a 1024-byte swizzle pattern. The contiguous axis is K (K-major:
// rows are M or N, the box is as wide as the 64-element k-block) or MN (MN-major: rows are the
// k-block's 64 contraction steps, and the tile is 64-column boxes of 8 KB, side by side). In both
// layouts element (64 * i) of the M or N axis lies 8192 * i bytes into the tile.
#pragma once

#include "cake/ptx.cuh"

namespace cake {

constexpr int kAtomM = 64;            // rows of one warpgroup product
constexpr int kAtomK = 16;            // contraction steps of one bf16 product
constexpr int kSwizzleElements = 64;  // bf16 elements in a 128-byte swizzled row
constexpr int kBoxBytes = 64 * 128;   // 64 box rows of 128 bytes

// Shared-memory matrix descriptor (PTX ISA, "Matrix descriptor format"), all offsets in 16-byte
// units: start address, leading byte offset (MN-major: distance of 64-column boxes; unused for
// K-major), stride byte offset (distance of 8-row patterns), and layout 1 = 128-byte swizzle.
__device__ __forceinline__ constexpr u64 make_descriptor(u32 tile) {
  constexpr u64 kLeading = kBoxBytes >> 4;
  constexpr u64 kStride = 1024 >> 4;
  return (u64{1} << 62) | (kStride << 32) | (kLeading << 16) | ((tile & 0x3ffff) >> 4);
}

// What a descriptor grows by per 16 contraction steps: 32 bytes along a row, or 16 rows.
template <Major kMajor>
constexpr u32 kDescriptorStepK = (kMajor == Major::K ? 32 : 16 * 128) >> 4;

// d[64, N] += A[64, 16] B[16, N]. Thread t of the warpgroup holds, for each 8-column block j,
// d[4j + 0, 4j + 1] = row 16 * (t / 32) + t % 32 / 4, columns 8j + 2 * (t % 4) + {0, 1}, and
// d[4j + 2, 4j + 3] = the same columns eight rows below.
template <int kN, Major kMajorA, Major kMajorB>
struct Wgmma;

#define CAKE_REGS10(tens)                                                                      \
  "%" tens "0, %" tens "1, %" tens "2, %" tens "3, %" tens "4, %" tens "5, %" tens "6, %" tens \
  "7, %" tens "8, %" tens "9, "
#define CAKE_REGS30 CAKE_REGS10("") CAKE_REGS10("1") CAKE_REGS10("2")
#define CAKE_REGS60 CAKE_REGS30 CAKE_REGS10("3") CAKE_REGS10("4") CAKE_REGS10("5")
#define CAKE_REGS120                                                              \
  CAKE_REGS60 CAKE_REGS10("6") CAKE_REGS10("7") CAKE_REGS10("8") CAKE_REGS10("9") \
      CAKE_REGS10("10") CAKE_REGS10("11")
#define CAKE_D8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CAKE_D32(i) CAKE_D8(i), CAKE_D8(i + 8), CAKE_D8(i + 16), CAKE_D8(i + 24)

// `regs` lists the N/2 accumulators; a, b, ta, tb number the operands after them. "1, 1, 1" are
// scale-d (accumulate) and the signs of A and B.
#define CAKE_WGMMA(n, regs, a, b, ta, tb, ...)                                                    \
  template <Major kMajorA, Major kMajorB>                                                         \
  struct Wgmma<n, kMajorA, kMajorB> {                                                             \
    static __device__ __forceinline__ void mma_async(float (&d)[n / 2], u64 desc_a, u64 desc_b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, %" a     \
                   ", %" b ", 1, 1, 1, %" ta ", %" tb ";\n"                                       \
                   : __VA_ARGS__                                                                  \
                   : "l"(desc_a), "l"(desc_b), "n"(static_cast<int>(kMajorA)),                    \
                     "n"(static_cast<int>(kMajorB)));                                             \
    }                                                                                             \
  }

CAKE_WGMMA(64, CAKE_REGS30 "%30, %31", "32", "33", "34", "35", CAKE_D32(0));
CAKE_WGMMA(128, CAKE_REGS60 "%60, %61, %62, %63", "64", "65", "66", "67", CAKE_D32(0),
           CAKE_D32(32));
CAKE_WGMMA(256, CAKE_REGS120 "%120, %121, %122, %123, %124, %125, %126, %127", "128", "129", "130",
           "131", CAKE_D32(0), CAKE_D32(32), CAKE_D32(64), CAKE_D32(96));

#undef CAKE_WGMMA
#undef CAKE_D32
#undef CAKE_D8
#undef CAKE_REGS120
#undef CAKE_REGS60
#undef CAKE_REGS30
#undef CAKE_REGS10

}  // namespace cake
