// Prints what csrc/kernels/sm90_router_gemm.cu itself says of each configuration that
// csrc/instances.cmake builds: threads, cluster, stages and dynamic shared memory. The header of
// names comes from the test, a line CAKE_BUILT(name) for each.
#include <algorithm>
#include <cmath>
#include <cstdio>

// ---- what the kernel takes from CUDA; nothing of it runs ----

#define __device__
#define __host__
#define __global__ inline
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define asm(...)
#define volatile(...) ("")

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
uint2 make_uint2(unsigned x, unsigned y);
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct {
  unsigned x;
} threadIdx, blockIdx, gridDim;

using std::max;
using std::min;

int __shfl_sync(unsigned, int value, int);
void __syncthreads();
void __syncwarp();
unsigned __float_as_uint(float);
float __uint_as_float(unsigned);
unsigned long long __cvta_generic_to_shared(const void*);

#define CAKE_CONFIG nt_f32_64x8_k8
#include "../csrc/kernels/sm90_router_gemm.cu"

template <class Config>
void print(const char* name) {
  std::printf("%s %d %d %d %d\n", name, Config::kThreads, Config::kClusterK, Config::kStages,
              Config::kSmemBytes);
}

int main() {
#define CAKE_BUILT(name) print<cake::config::name>(#name);
#include CAKE_NAMES
}
