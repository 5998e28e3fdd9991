// wgmma with A from registers: what a kernel needs that makes its A operand on the fly.
//
// Kept apart from wgmma.cuh because it comes in many widths: a router's tile has as many columns as
// make the tiles of a problem fill the GPU once.
#pragma once

#include "cake/wgmma.cuh"

namespace cake {

// d[64, N] += A[64, 8] B[8, N] of TF32, B K-major. Thread t of the warpgroup holds d as described
// in wgmma.cuh, and of A, with row = 16 * (t / 32) + t % 32 / 4 and k = t % 4: a[0] = A[row][k],
// a[1] the same eight rows below, a[2] = A[row][k + 4], a[3] eight rows below that.
template <int kN>
struct WgmmaRs;

#define CAKE_R10(tens)                                                                         \
  "%" tens "0, %" tens "1, %" tens "2, %" tens "3, %" tens "4, %" tens "5, %" tens "6, %" tens \
  "7, %" tens "8, %" tens "9, "
#define CAKE_R30 CAKE_R10("") CAKE_R10("1") CAKE_R10("2")
#define CAKE_R60 CAKE_R30 CAKE_R10("3") CAKE_R10("4") CAKE_R10("5")
#define CAKE_LAST2(tens) "%" tens "0, %" tens "1"
#define CAKE_LAST4(tens) CAKE_LAST2(tens) ", %" tens "2, %" tens "3"
#define CAKE_LAST6(tens) CAKE_LAST4(tens) ", %" tens "4, %" tens "5"
#define CAKE_LAST8(tens) CAKE_LAST6(tens) ", %" tens "6, %" tens "7"
#define CAKE_LAST10(tens) CAKE_LAST8(tens) ", %" tens "8, %" tens "9"
#define CAKE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CAKE_D8(i) CAKE_D4(i), CAKE_D4(i + 4)
#define CAKE_D16(i) CAKE_D8(i), CAKE_D8(i + 8)
#define CAKE_D32(i) CAKE_D16(i), CAKE_D16(i + 16)
#define CAKE_D64(i) CAKE_D32(i), CAKE_D32(i + 32)

// `regs` lists the N/2 accumulators; a0..a3 and b number the operands after them. "1, 1, 1" are
// scale-d (accumulate) and the signs of A and B.
#define CAKE_WGMMA_RS(n, regs, a0, a1, a2, a3, b, ...)                                         \
  template <>                                                                                  \
  struct WgmmaRs<n> {                                                                          \
    static __device__ __forceinline__ void mma_async(float (&d)[n / 2], const u32 (&a)[4],     \
                                                     u64 desc_b) {                             \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" regs "}, {%" a0 \
                   ", %" a1 ", %" a2 ", %" a3 "}, %" b ", 1, 1, 1;\n"                          \
                   : __VA_ARGS__                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b));                 \
    }                                                                                          \
  }

CAKE_WGMMA_RS(8, CAKE_LAST4(""), "4", "5", "6", "7", "8", CAKE_D4(0));
CAKE_WGMMA_RS(16, CAKE_LAST8(""), "8", "9", "10", "11", "12", CAKE_D8(0));
CAKE_WGMMA_RS(24, CAKE_R10("") CAKE_LAST2("1"), "12", "13", "14", "15", "16", CAKE_D8(0),
              CAKE_D4(8));
CAKE_WGMMA_RS(32, CAKE_R10("") CAKE_LAST6("1"), "16", "17", "18", "19", "20", CAKE_D16(0));
CAKE_WGMMA_RS(40, CAKE_R10("") CAKE_LAST10("1"), "20", "21", "22", "23", "24", CAKE_D16(0),
              CAKE_D4(16));
CAKE_WGMMA_RS(48, CAKE_R10("") CAKE_R10("1") CAKE_LAST4("2"), "24", "25", "26", "27", "28",
              CAKE_D16(0), CAKE_D8(16));
CAKE_WGMMA_RS(64, CAKE_R30 CAKE_LAST2("3"), "32", "33", "34", "35", "36", CAKE_D32(0));
CAKE_WGMMA_RS(80, CAKE_R30 CAKE_LAST10("3"), "40", "41", "42", "43", "44", CAKE_D32(0),
              CAKE_D8(32));
CAKE_WGMMA_RS(96, CAKE_R30 CAKE_R10("3") CAKE_LAST8("4"), "48", "49", "50", "51", "52", CAKE_D32(0),
              CAKE_D16(32));
CAKE_WGMMA_RS(112, CAKE_R30 CAKE_R10("3") CAKE_R10("4") CAKE_LAST6("5"), "56", "57", "58", "59",
              "60", CAKE_D32(0), CAKE_D16(32), CAKE_D8(48));
CAKE_WGMMA_RS(128, CAKE_R60 CAKE_LAST4("6"), "64", "65", "66", "67", "68", CAKE_D64(0));
CAKE_WGMMA_RS(152, CAKE_R60 CAKE_R10("6") CAKE_LAST6("7"), "76", "77", "78", "79", "80",
              CAKE_D64(0), CAKE_D8(64), CAKE_D4(72));

#undef CAKE_WGMMA_RS
#undef CAKE_D64
#undef CAKE_D32
#undef CAKE_D16
#undef CAKE_D8
#undef CAKE_D4
#undef CAKE_LAST10
#undef CAKE_LAST8
#undef CAKE_LAST6
#undef CAKE_LAST4
#undef CAKE_LAST2
#undef CAKE_R60
#undef CAKE_R30
#undef CAKE_R10

}  // namespace cake
