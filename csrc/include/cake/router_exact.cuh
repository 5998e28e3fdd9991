// The sums of a router tile that are not finite, once more: by FP32 multiply-adds from global
// memory.
//
// Parts of Inf, NaN, or a number that TF32 rounds to Inf hold a NaN, and a sum may overflow between
// products that cancel. FP32 has its own answer to all of these, which this finds. It is slow:
// every thread reads its operands number by number.
#pragma once

#include "cake/tf32x3.cuh"

namespace cake {

// The operands in global memory, by index. One outside stands for the last one inside: the tile has
// it, the result has not.
template <class Config>
struct Operands {
  const float* a;
  const typename Config::RawB::Element* b;
  i64 lda, ldb;
  int M, N;

  __device__ __forceinline__ float a_value(int m, i64 k) const {
    m = min(m, M - 1);
    return a[Config::kMajorA == Major::K ? m * lda + k : k * lda + m];
  }
  __device__ __forceinline__ float b_value(int n, i64 k) const {
    n = min(n, N - 1);
    return to_float(b[Config::kMajorB == Major::K ? n * ldb + k : k * ldb + n]);
  }
};

// Makes the sums that are not finite again, over k = [first_k, end_k), by FP32 multiply-adds from
// global memory. `m` and `n` are the rows and columns of sum[0]. The sums turn through sum[0..3],
// so that the code is short: what is fetched and never run costs time, too.
template <class Config>
__device__ __forceinline__ void multiply_add(float (&sum)[Config::kTileN / 2],
                                             const Operands<Config>& operands, int m, int n,
                                             int first_k, int end_k) {
  constexpr int kCount = Config::kTileN / 2;
#pragma unroll 1
  for (int j = 0; j < kCount / 4; ++j) {
    float turn[4] = {sum[0], sum[1], sum[2], sum[3]};
    if (!is_finite(turn[0] + turn[1]) || !is_finite(turn[2] + turn[3])) {
      float exact[4] = {};
#pragma unroll 1
      for (int k = first_k; k < end_k; ++k) {
        const float a[2] = {operands.a_value(m, k), operands.a_value(m + 8, k)};
        const float b[2] = {operands.b_value(n + 8 * j, k), operands.b_value(n + 8 * j + 1, k)};
#pragma unroll
        for (int i = 0; i < 4; ++i) exact[i] = fmaf(a[i / 2], b[i % 2], exact[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) turn[i] = is_finite(turn[i]) ? turn[i] : exact[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = i < kCount - 4 ? sum[i + 4] : turn[i - kCount + 4];
  }
}

}  // namespace cake
