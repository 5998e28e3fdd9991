// From a router tile's sums to global memory, through shared memory.
//
// Without a cluster each warp stores its own 16 rows, 32 columns at a time, by way of a slab of its
// own: the math warps of a CTA do not wait for each other. In a cluster the math warpgroups write
// their sums into one tile, rows and columns as in the result; each CTA then reads its share of the
// rows from the tiles of all, through distributed shared memory, and adds them in the order of the
// ranks. Rows go out four numbers a thread, or one by one where the result is not aligned for that.
#pragma once

#include "cake/tf32x3.cuh"

namespace cake {

constexpr int kSlabPitch = 32 + 8;  // floats: four rows that are written together differ in banks
constexpr int kSlabBytes = 16 * kSlabPitch * 4;

// The result, or what begins at a tile of it: where it lies, how far it reaches, and how it is
// stored.
class Result {
 public:
  __device__ __forceinline__ Result(void* d, i64 ld, int output, int rows, int columns)
      : d_(static_cast<char*>(d)),
        ld_(ld),
        rows_(rows),
        columns_(columns),
        low_(output & 1),
        add_(output & 2),
        vector_((reinterpret_cast<u64>(d) | size() * ld) % (4 * size()) == 0 && columns % 4 == 0) {}

  __device__ __forceinline__ Result tile(int row, int column) const {
    Result tile = *this;
    tile.d_ += (row * ld_ + column) * size();
    tile.rows_ -= row;
    tile.columns_ -= column;
    return tile;
  }

  __device__ __forceinline__ bool contains(int row, int column) const {
    return row < rows_ && column < columns_;
  }

  // Whether four numbers at a time can be stored.
  __device__ __forceinline__ bool vector() const { return vector_; }

  // Four neighbouring numbers, of which the first lies inside; with kVector all do.
  template <bool kVector>
  __device__ __forceinline__ void store(int row, int column, float4 sum) const {
    char* at = d_ + (row * ld_ + column) * size();
    if constexpr (!kVector) {
#pragma unroll 1
      for (int i = 0; i < 4 && column + i < columns_; ++i, at += size()) {
        store_scalar(at, sum.x);
        sum.x = sum.y, sum.y = sum.z, sum.z = sum.w;
      }
    } else if (low_) {
      uint2* to = reinterpret_cast<uint2*>(at);
      if (add_) {
        const uint2 old = *to;
        sum.x += low_float(old.x), sum.y += high_float(old.x);
        sum.z += low_float(old.y), sum.w += high_float(old.y);
      }
      *to = make_uint2(ptx::cvt_rn_bf16x2_f32(sum.x, sum.y), ptx::cvt_rn_bf16x2_f32(sum.z, sum.w));
    } else {
      float4* to = reinterpret_cast<float4*>(at);
      if (add_) {
        const float4 old = *to;
        sum.x += old.x, sum.y += old.y, sum.z += old.z, sum.w += old.w;
      }
      *to = sum;
    }
  }

 private:
  __device__ __forceinline__ u64 size() const { return low_ ? 2 : 4; }

  __device__ __forceinline__ void store_scalar(char* at, float sum) const {
    if (low_) {
      bf16* to = reinterpret_cast<bf16*>(at);
      sum += add_ ? to_float(*to) : 0.0f;
      *to = static_cast<bf16>(ptx::cvt_rn_bf16x2_f32(sum, 0.0f));
    } else {
      float* to = reinterpret_cast<float*>(at);
      *to = sum + (add_ ? *to : 0.0f);
    }
  }

  char* d_;
  i64 ld_;
  int rows_, columns_;
  bool low_, add_, vector_;
};

// ---- no cluster ----

// A warp's slab into its 16 rows of the result, from `column` on.
template <class Config, bool kVector>
__device__ __forceinline__ void store_slab(u32 slab, const Result& rows, int column, int lane) {
  const u32 from = slab + lane / 8 * kSlabPitch * 4 + lane % 8 * 16;
  column += lane % 8 * 4;
#pragma unroll(kVector ? 4 : 1)
  for (int i = 0; i < 4; ++i) {
    const float4 sum = ptx::ld_shared_v4_f32(from + i * 4 * kSlabPitch * 4);
    const int row = fragment_row<Config::kMajorA>(i % 2 * 4 + lane / 8) + i / 2 * 8;
    if (column < Config::kTileN && rows.contains(row, column)) {
      rows.store<kVector>(row, column, sum);
    }
  }
}

// A warp's sums into its 16 rows of the result. Columns turn through sum[0..15], as in
// multiply_add.
template <class Config>
__device__ __forceinline__ void store_sums(float (&sum)[Config::kTileN / 2], u32 slab,
                                           const Result& rows, int lane) {
  constexpr int kCount = Config::kTileN / 2;
  constexpr int kPitch = kSlabPitch * 4;
  const u32 to = slab + lane / 4 * kPitch + lane % 4 * 8;
#pragma unroll 1
  for (int column = 0; column < Config::kTileN; column += 32) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::st_shared_v2_f32(to + j * 32, sum[4 * j], sum[4 * j + 1]);
      ptx::st_shared_v2_f32(to + 8 * kPitch + j * 32, sum[4 * j + 2], sum[4 * j + 3]);
    }
    __syncwarp();
    if (rows.vector()) {
      store_slab<Config, true>(slab, rows, column, lane);
    } else {
      store_slab<Config, false>(slab, rows, column, lane);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i + 16 < kCount; ++i) sum[i] = sum[i + 16];
  }
}

// ---- a cluster ----

// All threads of the cluster: what they wrote to shared memory, they may read of each other. A
// release of all memory would wait for all memory: 0.1 to 0.4 us more than none at all (H200).
__device__ __forceinline__ void cluster_sync_shared() {
  ptx::fence_release_shared_cluster();
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();
  ptx::fence_acquire_shared_cluster();
}

// A math warpgroup's sums into the finished tile, rows as in d.
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

// The math threads of all ranks: the sums of all tiles into the result, each rank its share of the
// rows.
template <class Config>
__device__ __forceinline__ void store_tile(u32 tile, const Result& result, int rank, int thread) {
  constexpr int kQuads = Config::kTileColumns / 4;
  constexpr int kRows = Config::kTileRows / Config::kClusterK;
#pragma unroll 1
  for (int item = thread; item < kRows * kQuads; item += Config::kMathThreads) {
    const int row = rank * kRows + item / kQuads, column = item % kQuads * 4;
    // What a rank loads from a peer it also stores: a load that nothing waits for could outlive the
    // peer, for the barrier at the end orders nothing.
    if (!result.contains(row, column)) continue;
    float4 part[Config::kClusterK];
#pragma unroll
    for (int r = 0; r < Config::kClusterK; ++r) {
      const u32 at = tile + (row * Config::kTilePitch + column) * 4;
      part[r] = ptx::ld_shared_cluster_v4_f32(ptx::mapa_shared_cluster(at, r));
    }
#pragma unroll
    for (int r = 1; r < Config::kClusterK; ++r) {
      part[0].x += part[r].x, part[0].y += part[r].y;
      part[0].z += part[r].z, part[0].w += part[r].w;
    }
    if (result.vector()) {
      result.store<true>(row, column, part[0]);
    } else {
      result.store<false>(row, column, part[0]);
    }
  }
}

}  // namespace cake
