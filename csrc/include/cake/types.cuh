// Fixed-width aliases, the opaque tensor map and a few integer helpers.
//
// Nothing here includes a host header (<cuda.h>, <stdint.h>), so that nvcc and NVRTC compile the
// same sources. A CUtensorMap is 128 opaque bytes for device code: only its address matters.
#pragma once

// Joins the kernel's stem and its config, once they are expanded, to the symbol of an instance.
#define CAKE_CONCATENATE_(a, b) a##b
#define CAKE_CONCATENATE(a, b) CAKE_CONCATENATE_(a, b)

namespace cake {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using bf16 = unsigned short;  // storage only: arithmetic is FP32

struct alignas(64) TensorMap {
  char opaque[128];
};
static_assert(sizeof(TensorMap) == 128, "a CUtensorMap is 128 bytes");

constexpr u32 kAllLanes = 0xffffffff;

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// A value that is the same in all lanes of a warp, where the compiler cannot see it.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

// Which axis of an operand is contiguous in memory (and in its shared-memory tile): the contraction
// axis (K), or the axis that survives in the output (MN).
enum class Major { K = 0, MN = 1 };

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
__host__ __device__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
__host__ __device__ constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

}  // namespace cake
