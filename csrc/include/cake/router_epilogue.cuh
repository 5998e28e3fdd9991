// From a router tile's sums to global memory, through shared memory.
//
// The math warpgroups write their sums into one tile, rows and columns as in the result. Where K is
// split over a cluster, each of its CTAs then reads its share of the rows from the tiles of all,
// through distributed shared memory, and adds them in the order of the ranks. Rows go out four
// numbers a thread, or one by one where the result is not aligned for that.
#pragma once

#include "cake/tf32x3.cuh"

namespace cake {

// A math warpgroup's sums -> the finished tile in shared memory, rows as in d.
template <class Config>
__device__ __forceinline__ void write_tile(const float (&sum)[Config::kTileN / 2], u32 tile,
                                           int row, int q) {
  constexpr int kPitch = Config::kTilePitch * 4;
#pragma unroll
  for (int j = 0; j < Config::kTileN / 8; ++j) {
    const float* s = sum + 4 * j;
    const int column = 8 * j + 2 * q;
    if constexpr (Config::kTransposed) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::st_shared_f32(tile + (column + i % 2) * kPitch + (row + i / 2 * 8) * 4, s[i]);
      }
    } else {
      ptx::st_shared_v2_f32(tile + row * kPitch + column * 4, s[0], s[1]);
      ptx::st_shared_v2_f32(tile + (row + 8) * kPitch + column * 4, s[2], s[3]);
    }
  }
}

// Four columns of the finished tile: its own sum, or those of all ranks, added in their order.
template <class Config>
__device__ __forceinline__ float4 load_quad(u32 tile, u32 offset) {
  if constexpr (Config::kClusterK == 1) {
    return ptx::ld_shared_v4_f32(tile + offset);
  } else {
    float4 part[Config::kClusterK];
#pragma unroll
    for (int r = 0; r < Config::kClusterK; ++r) {
      part[r] = ptx::ld_shared_cluster_v4_f32(ptx::mapa_shared_cluster(tile + offset, r));
    }
#pragma unroll
    for (int r = 1; r < Config::kClusterK; ++r) {
      part[0].x += part[r].x, part[0].y += part[r].y;
      part[0].z += part[r].z, part[0].w += part[r].w;
    }
    return part[0];
  }
}

// The math threads of all ranks: the finished tile into d, each rank its share of the rows. `rows`
// and `columns` bound the tile in d.
template <class Config>
__device__ __forceinline__ void store_tile(u32 tile, void* d, i64 ldd, int rows, int columns,
                                           int rank, int output, int thread) {
  constexpr int kQuads = Config::kTileColumns / 4;
  constexpr int kRows = Config::kTileRows / Config::kClusterK;
  const bool low = output & 1, add = output & 2;
  const u64 size = low ? 2 : 4;
  const int first_row = rank * kRows;
  if ((reinterpret_cast<u64>(d) | size * ldd) % (4 * size) == 0 && columns % 4 == 0) {
#pragma unroll(Config::kClusterK == 1 ? 4 : 1)
    for (int item = thread; item < kRows * kQuads; item += Config::kMathThreads) {
      const int row = first_row + item / kQuads, column = item % kQuads * 4;
      if (row >= rows || column >= columns) continue;
      float4 sum = load_quad<Config>(tile, (row * Config::kTilePitch + column) * 4);
      const i64 at = row * ldd + column;
      if (low) {
        uint2* to = reinterpret_cast<uint2*>(static_cast<bf16*>(d) + at);
        if (add) {
          const uint2 old = *to;
          sum.x += low_float(old.x), sum.y += high_float(old.x);
          sum.z += low_float(old.y), sum.w += high_float(old.y);
        }
        *to =
            make_uint2(ptx::cvt_rn_bf16x2_f32(sum.x, sum.y), ptx::cvt_rn_bf16x2_f32(sum.z, sum.w));
      } else {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(d) + at);
        if (add) {
          const float4 old = *to;
          sum.x += old.x, sum.y += old.y, sum.z += old.z, sum.w += old.w;
        }
        *to = sum;
      }
    }
    return;
  }
#pragma unroll 1
  for (int item = thread; item < kRows * kQuads; item += Config::kMathThreads) {
    const int row = first_row + item / kQuads, column = item % kQuads * 4;
    // What a rank loads from a peer it also stores: a load that nothing waits for could outlive the
    // peer, for the barrier at the end orders nothing.
    if (row >= rows || column >= columns) continue;
    const float4 sum = load_quad<Config>(tile, (row * Config::kTilePitch + column) * 4);
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i >= columns) break;
      const i64 at = row * ldd + column + i;
      if (low) {
        bf16* to = static_cast<bf16*>(d) + at;
        const float value = values[i] + (add ? low_float(*to) : 0.0f);
        *to = static_cast<bf16>(ptx::cvt_rn_bf16x2_f32(value, 0.0f));
      } else {
        float* to = static_cast<float*>(d) + at;
        *to = values[i] + (add ? *to : 0.0f);
      }
    }
  }
}

}  // namespace cake
