// Which tile a cluster works on next, from offsets that only the device knows.
//
// Persistent and static: cluster c of C takes tiles c, C + c, 2C + c, ... of a list that every warp
// of every role derives by itself from `offs`, so roles need no barrier to agree on a tile and the
// order of the work, hence every bit of the result, depends on nothing but the problem. Groups are
// looked up through a window of 32, one a lane, that only ever moves forward: a lookup costs one
// ballot and a few shuffles, and E may be anything.
//
// Offsets are not trusted. The end of group e is taken as max over i <= e of clamp(offs[i], 0, M)
// and its start as the end of group e - 1, which is what sorted offsets say and keeps any others
// inside [0, M].
#pragma once

#include "cake/ptx.cuh"

namespace cake {

// 32 consecutive groups, one a lane. Group E is [last end, M), the rows past every group, and
// groups after it are empty. The offsets of the next window are always under way.
struct GroupWindow {
  const int* offs;
  int num_groups;
  int num_rows;
  int first = -32;  // group of lane 0
  int begin = 0;    // rows of this lane's group
  int end = 0;
  int last_end = 0;  // end of lane 31's group
  int upcoming;      // offset of this lane's group in the next window

  __device__ __forceinline__ GroupWindow(const int* offs, int num_groups, int num_rows)
      : offs(offs), num_groups(num_groups), num_rows(num_rows), upcoming(offset(lane_id())) {}

  __device__ __forceinline__ int offset(int group) const {
    return group < num_groups ? offs[group] : num_rows;
  }

  __device__ __forceinline__ void advance() {
    first += 32;
    end = max(last_end, min(upcoming, num_rows));
    upcoming = offset(first + 32 + lane_id());
    begin = end_below();
    if (__any_sync(kAllLanes, end < begin)) {  // offsets that decrease
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        end = max(end, __shfl_up_sync(kAllLanes, end, distance));
      }
      begin = end_below();
    }
    last_end = __shfl_sync(kAllLanes, end, 31);
  }

 private:
  __device__ __forceinline__ int end_below() const {
    const int below = __shfl_up_sync(kAllLanes, end, 1);
    return lane_id() == 0 ? last_end : below;
  }
};

// dividend >= 0, divisor > 0. The divisors of a tile's number are often powers of two, and any
// other division is a chain of some 20 instructions, for which the first tile of a launch waits.
__device__ __forceinline__ int divide(int dividend, int divisor) {
  if ((divisor & (divisor - 1)) == 0) return dividend >> (__ffs(divisor) - 1);
  return static_cast<int>(static_cast<u32>(dividend) / static_cast<u32>(divisor));
}

struct Block {
  int m;
  int n;
};

// The super-block of a tile of a group: the first one, if it is not whole. Behind the last whole
// one there may be one without rows, which holds RaggedMScheduler's pairs.
template <int kSuperRows>
__device__ __forceinline__ int super_block(int tile, int m_blocks, int n_blocks) {
  return m_blocks >= kSuperRows ? divide(tile, kSuperRows * n_blocks) : 0;
}

// Order of the m_blocks x n_blocks tiles of one group: super-blocks of `kSuperRows` block rows,
// column by column within, every other one right to left. The tiles that run at one time then span
// a compact rectangle, whose panels of both operands stay in L2, and the panels at a turn are used
// twice. (The first probe of this kernel read 7.0 GB from an H200's DRAM with the turn and 7.4
// without, in a 65536 x 6144 x 4096 forward.)
template <int kSuperRows>
__device__ __forceinline__ Block raster(int tile, int m_blocks, int n_blocks) {
  const int super = super_block<kSuperRows>(tile, m_blocks, n_blocks);
  const int rest = tile - super * kSuperRows * n_blocks;
  const int rows = min(kSuperRows, m_blocks - super * kSuperRows);
  const int column = divide(rest, rows);
  return {super * kSuperRows + rest - column * rows,
          super % 2 == 0 ? column : n_blocks - 1 - column};
}

// The tiles of the ragged-M passes: `kTileM` x kClusterM rows of one group (a tile never spans two)
// times one block of columns. Where a group ends in kTileM rows or less, two CTAs on one block of
// columns would leave one idle: there a cluster of two makes a pair of column blocks side by side
// instead. After the groups come the tiles of the rows that belong to none.
template <int kTileM, int kClusterM, int kSuperRows>
struct RaggedMScheduler {
  static constexpr int kRows = kTileM * kClusterM;

  GroupWindow window;
  int n_blocks;
  int num_tiles = 0;  // tiles of all groups up to the window's end
  int tiles_end = 0;  // tiles of all groups up to this lane's, inclusive

  __device__ __forceinline__ RaggedMScheduler(const int* offs, int num_groups, int num_rows,
                                              int n_blocks)
      : window(offs, num_groups, num_rows), n_blocks(n_blocks) {}

  // Tile number `tile`, not less than the one asked for before. False: there is none. The cluster
  // makes rows [row, row_end) of `group` (group == E: no group owns them) by column block
  // `n_block`; if `side_by_side`, its CTAs make the same rows by n_block and by `n_block_2`, which
  // may not exist.
  __device__ __forceinline__ bool find(int tile, int& group, int& row, int& row_end, int& n_block,
                                       int& n_block_2, bool& side_by_side) {
    while (tile >= num_tiles) {
      if (window.first + 32 > window.num_groups) return false;
      advance();
    }
    const int lane = __ffs(__ballot_sync(kAllLanes, tile < tiles_end)) - 1;
    const int begin = __shfl_sync(kAllLanes, window.begin, lane);
    const int length = __shfl_sync(kAllLanes, window.end - window.begin, lane);
    tile -= __shfl_sync(kAllLanes, tiles_end, lane) - tiles_of(length);
    group = window.first + lane;
    row_end = begin + length;

    // As `raster`; in the last super-block every second column is followed by the pair's tile.
    const int m_blocks = full_blocks(length);
    const bool pairs = has_pairs(length);
    const int super = super_block<kSuperRows>(tile, m_blocks, n_blocks);
    const int rest = tile - super * kSuperRows * n_blocks;
    const int rows = min(kSuperRows, m_blocks - super * kSuperRows);
    const bool last = (super + 1) * kSuperRows > m_blocks;
    int column, m_block;
    if (pairs && last) {
      const int pair = divide(rest, 2 * rows + 1);
      const int in_pair = rest - pair * (2 * rows + 1);
      side_by_side = in_pair == min(2, n_blocks - 2 * pair) * rows;
      column = 2 * pair + (!side_by_side && in_pair >= rows);
      m_block = side_by_side ? m_blocks : super * kSuperRows + in_pair - (column - 2 * pair) * rows;
    } else {
      side_by_side = false;
      column = divide(rest, rows);
      m_block = super * kSuperRows + rest - column * rows;
    }
    row = begin + m_block * kRows;
    n_block = super % 2 == 0 ? column : n_blocks - 1 - column;
    n_block_2 = super % 2 == 0 ? column + 1 : n_blocks - 2 - column;
    return true;
  }

 private:
  // Rows of a group in whole tiles, the last of which may be partial.
  __device__ __forceinline__ int full_blocks(int length) const {
    return length / kRows + (length % kRows > (kClusterM == 2 ? kTileM : 0));
  }

  __device__ __forceinline__ bool has_pairs(int length) const {
    return kClusterM == 2 && full_blocks(length) * kRows < length;
  }

  __device__ __forceinline__ int tiles_of(int length) const {
    return full_blocks(length) * n_blocks + (has_pairs(length) ? ceil_div(n_blocks, 2) : 0);
  }

  __device__ __forceinline__ void advance() {
    window.advance();
    tiles_end = tiles_of(window.end - window.begin);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int below = __shfl_up_sync(kAllLanes, tiles_end, distance);
      if (lane_id() >= distance) tiles_end += below;
    }
    tiles_end += num_tiles;
    num_tiles = __shfl_sync(kAllLanes, tiles_end, 31);
  }
};

// Order of the groups of the ragged-K pass. A tile costs its group's k-blocks, so groups go heavy
// first (ties by index): a heavy tile that starts last would leave every other cluster idle, 14 %
// of a pass by arithmetic when one of four groups holds half the rows. Up to kSorted groups are
// ranked in shared memory, by counting; more groups are small next to the whole and keep their own
// order.
struct GroupOrder {
  static constexpr int kSorted = 256;
  static constexpr int kBytes = kSorted * (4 + 4 + 2);

  alignas(16) u32 keys[kSorted];  // k-blocks of group e, and 255 - e: the greatest goes first
  int ends[kSorted];              // end of group e
  u16 order[kSorted];             // group of rank r

  // All threads of the CTA, before they part into roles; it synchronises them.
  __device__ __forceinline__ void build(const int* offs, int num_groups, int num_rows,
                                        int rows_per_block) {
    if (num_groups > kSorted) return;
    if (threadIdx.x < 32) {
      GroupWindow window(offs, num_groups, num_rows);
      while (window.first + 32 < num_groups) {
        window.advance();
        const int group = window.first + lane_id();
        const u32 k_blocks =
            min(ceil_div(window.end - window.begin, rows_per_block), (1 << 24) - 1);
        ends[group] = window.end;
        keys[group] = group < num_groups ? k_blocks * kSorted + kSorted - 1 - group : 0;
      }
    }
    __syncthreads();
    for (int group = threadIdx.x; group < num_groups; group += blockDim.x) {
      const u32 mine = keys[group];
      int rank = 0;
      for (int other = 0; other < num_groups; other += 4) {
        const uint4 theirs = *reinterpret_cast<const uint4*>(keys + other);
        rank += (theirs.x > mine) + (theirs.y > mine) + (theirs.z > mine) + (theirs.w > mine);
      }
      order[rank] = static_cast<u16>(group);
    }
    __syncthreads();
  }

  __device__ __forceinline__ int begin(int group) const { return group == 0 ? 0 : ends[group - 1]; }
};
static_assert(sizeof(GroupOrder) == GroupOrder::kBytes, "the host adds this to the shared memory");

// Tiles of the ragged-K pass: every group has the same m_blocks x n_blocks tiles.
template <int kSuperRows>
struct RaggedKScheduler {
  GroupWindow window;
  const GroupOrder& order;
  int m_blocks;
  int n_blocks;

  __device__ __forceinline__ RaggedKScheduler(const GroupOrder& order, const int* offs,
                                              int num_groups, int num_rows, int m_blocks,
                                              int n_blocks)
      : window(offs, num_groups, num_rows), order(order), m_blocks(m_blocks), n_blocks(n_blocks) {}

  // The tile of a cluster's round `round`. Odd rounds are dealt in reverse, so that over two rounds
  // of falling cost every cluster gets about the same.
  __device__ __forceinline__ int tile_of_round(int round, int cluster, int num_clusters) const {
    return round * num_clusters + (round % 2 == 0 ? cluster : num_clusters - 1 - cluster);
  }

  // Rows [row, row_end) of `group` are the contraction of tile number `tile`. False: there is none.
  __device__ __forceinline__ bool find(int tile, int& group, int& row, int& row_end, Block& block) {
    const int tiles = m_blocks * n_blocks;
    const int rank = divide(tile, tiles);
    if (rank >= window.num_groups) return false;
    if (window.num_groups <= GroupOrder::kSorted) {
      group = order.order[rank];
      row = order.begin(group);
      row_end = order.ends[group];
    } else {
      while (rank >= window.first + 32) window.advance();
      group = rank;
      row = __shfl_sync(kAllLanes, window.begin, rank - window.first);
      row_end = __shfl_sync(kAllLanes, window.end, rank - window.first);
    }
    block = raster<kSuperRows>(tile - rank * tiles, m_blocks, n_blocks);
    return true;
  }
};

}  // namespace cake
