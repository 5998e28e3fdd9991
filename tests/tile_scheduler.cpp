// Runs csrc/include/cake/tile_scheduler.cuh itself on the host, for random group sizes and offsets
// that are no offsets, and checks that the clusters of a launch make every tile once. A warp is 32
// fibers that take turns at each shuffle, ballot and barrier.
//
// Usage: tile_scheduler SEED PROBLEMS. Prints the first fault and exits with 1.
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

// ---- what the header takes from CUDA ----

#define __device__
#define __host__
#define __forceinline__ inline

struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct {
  int x;
} threadIdx, blockDim{32};

using std::max;
using std::min;

namespace {

constexpr int kLanes = 32;
ucontext_t fibers[kLanes], outside;
std::vector<char> stacks(kLanes << 16);
std::function<void()> program;
int exchanged[2][kLanes];  // of this exchange and of the one before, which others may still read
int turn[kLanes];

void switch_to_next_lane() {
  const int lane = threadIdx.x;
  threadIdx.x = (lane + 1) % kLanes;
  swapcontext(&fibers[lane], &fibers[threadIdx.x]);
}

const int* exchange(int value) {
  const int lane = threadIdx.x;
  int* values = exchanged[turn[lane] ^= 1];
  values[lane] = value;
  switch_to_next_lane();
  return values;
}

void run_lane() {
  program();
  if (threadIdx.x == kLanes - 1) setcontext(&outside);
  switch_to_next_lane();
}

// All lanes run `body`, which must make the same exchanges in each.
void run_warp(std::function<void()> body) {
  program = std::move(body);
  for (int lane = 0; lane < kLanes; ++lane) {
    turn[lane] = 0;
    getcontext(&fibers[lane]);
    fibers[lane].uc_stack.ss_sp = &stacks[lane << 16];
    fibers[lane].uc_stack.ss_size = 1 << 16;
    makecontext(&fibers[lane], run_lane, 0);
  }
  threadIdx.x = 0;
  swapcontext(&outside, &fibers[0]);
}

int __shfl_sync(unsigned, int value, int source) { return exchange(value)[source & 31]; }
int __shfl_up_sync(unsigned, int value, int distance) {
  const int lane = threadIdx.x;
  const int* values = exchange(value);
  return lane >= distance ? values[lane - distance] : value;
}
unsigned __ballot_sync(unsigned, bool vote) {
  const int* votes = exchange(vote);
  unsigned bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= unsigned(votes[lane]) << lane;
  return bits;
}
bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
int __ffs(unsigned bits) { return __builtin_ffs(bits); }
void __syncthreads() { exchange(0); }
size_t __cvta_generic_to_shared(const void* pointer) { return size_t(pointer); }
float __uint_as_float(unsigned) { return 0; }

}  // namespace

#include "cake/tile_scheduler.cuh"

// ---- the checks ----

namespace {

struct Problem {
  std::vector<int> offs;
  int num_rows;
  int m_blocks, n_blocks, num_clusters;  // m_blocks: of the ragged-K pass
  std::vector<int> begin, end;           // of every group, and of the rows that belong to none
};

void require(bool condition, const char* what, const Problem& problem) {
  if (condition) return;
  printf("%s: M %d, n_blocks %d, clusters %d, offs", what, problem.num_rows, problem.n_blocks,
         problem.num_clusters);
  for (int offset : problem.offs) printf(" %d", offset);
  printf("\n");
  fflush(stdout);
  _exit(1);  // exit() would free the stack of the fiber that this may be
}

// Every row of every group, and those behind the groups, meets every column block in one CTA.
template <int kTileM, int kClusterM, int kSuperRows>
void check_ragged_m(const Problem& problem) {
  const int num_groups = problem.offs.size();
  std::map<std::tuple<int, int>, int> rows_of;  // (first row, column block) -> rows
  for (int cluster = 0; cluster < problem.num_clusters; ++cluster) {
    run_warp([&] {
      const bool records = threadIdx.x == 17;  // any lane: the result is the same in all
      cake::RaggedMScheduler<kTileM, kClusterM, kSuperRows> scheduler(
          problem.offs.data(), num_groups, problem.num_rows, problem.n_blocks);
      int group, row, row_end, n_block, n_block_2;
      bool side_by_side;
      for (int tile = cluster;
           scheduler.find(tile, group, row, row_end, n_block, n_block_2, side_by_side);
           tile += problem.num_clusters) {
        if (!records) continue;
        require(0 <= group && group <= num_groups, "no such group", problem);
        require(row >= problem.begin[group] && row < row_end && row_end == problem.end[group],
                "rows outside the group", problem);
        require(0 <= n_block && n_block < problem.n_blocks, "no such column block", problem);
        for (int rank = 0; rank < kClusterM; ++rank) {
          const int first = side_by_side ? row : row + rank * kTileM;
          const int column = side_by_side && rank == 1 ? n_block_2 : n_block;
          const bool exists = 0 <= column && column < problem.n_blocks;
          const int rows = exists ? min(row_end - first, kTileM) : 0;
          require(rows > 0 || rank == 1 && side_by_side, "a CTA without work", problem);
          if (rows <= 0) continue;
          require(!side_by_side || row_end - row <= kTileM, "rows that nobody makes", problem);
          require(rows_of.emplace(std::make_tuple(first, column), rows).second, "a tile made twice",
                  problem);
        }
      }
    });
  }
  size_t tiles = 0;
  for (int group = 0; group <= num_groups; ++group) {
    for (int row = problem.begin[group]; row < problem.end[group]; row += kTileM) {
      for (int n_block = 0; n_block < problem.n_blocks; ++n_block, ++tiles) {
        const auto found = rows_of.find({row, n_block});
        require(found != rows_of.end() && found->second == min(kTileM, problem.end[group] - row),
                "a tile not made", problem);
      }
    }
  }
  require(tiles == rows_of.size(), "a tile too many", problem);
}

template <int kSuperRows>
void check_ragged_k(const Problem& problem) {
  const int num_groups = problem.offs.size();
  static cake::GroupOrder order;
  run_warp([&] { order.build(problem.offs.data(), num_groups, problem.num_rows, 64); });
  std::map<std::tuple<int, int, int>, int> times;
  for (int cluster = 0; cluster < problem.num_clusters; ++cluster) {
    run_warp([&] {
      const bool records = threadIdx.x == 5;
      cake::RaggedKScheduler<kSuperRows> scheduler(order, problem.offs.data(), num_groups,
                                                   problem.num_rows, problem.m_blocks,
                                                   problem.n_blocks);
      int group, row, row_end;
      cake::Block block;
      for (int round = 0;
           scheduler.find(scheduler.tile_of_round(round, cluster, problem.num_clusters), group, row,
                          row_end, block);
           ++round) {
        if (!records) continue;
        require(0 <= group && group < num_groups && row == problem.begin[group] &&
                    row_end == problem.end[group],
                "another group's rows", problem);
        require(0 <= block.m && block.m < problem.m_blocks && 0 <= block.n &&
                    block.n < problem.n_blocks,
                "no such block", problem);
        ++times[{group, block.m, block.n}];
      }
    });
  }
  for (const auto& entry : times) require(entry.second == 1, "a tile made twice", problem);
  require(times.size() == size_t(num_groups) * problem.m_blocks * problem.n_blocks,
          "a tile not made", problem);
}

// Up to 256 groups are taken by falling k-blocks, and in their own order where these are equal.
void check_order(const Problem& problem) {
  const int num_groups = problem.offs.size();
  if (num_groups > cake::GroupOrder::kSorted) return;
  static cake::GroupOrder order;
  run_warp([&] { order.build(problem.offs.data(), num_groups, problem.num_rows, 64); });
  std::vector<int> wanted(num_groups);
  std::iota(wanted.begin(), wanted.end(), 0);
  const auto k_blocks = [&](int group) {
    return (problem.end[group] - problem.begin[group] + 63) / 64;
  };
  std::stable_sort(wanted.begin(), wanted.end(),
                   [&](int a, int b) { return k_blocks(a) > k_blocks(b); });
  for (int rank = 0; rank < num_groups; ++rank) {
    require(order.order[rank] == wanted[rank], "another order", problem);
  }
}

void find_ends(Problem& problem) {
  int end = 0;
  for (int offset : problem.offs) {
    problem.begin.push_back(end);
    problem.end.push_back(end = max(end, min(offset, problem.num_rows)));
  }
  problem.begin.push_back(end);
  problem.end.push_back(problem.num_rows);
}

Problem random_problem(std::mt19937& random) {
  const auto uniform = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const int some[] = {uniform(1, 12), uniform(1, 12), uniform(1, 100), 31, 32, 33, 64};
  Problem problem;
  const int num_groups = uniform(0, 40) ? some[uniform(0, 6)] : uniform(250, 600);
  const int kind = uniform(0, 4), largest = num_groups > 12 ? 600 : 5000;
  int rows = 0;
  for (int group = 0; group < num_groups; ++group) {
    const int sizes[] = {uniform(0, 300), uniform(0, 2) ? 0 : uniform(0, largest),
                         128 * uniform(0, largest / 128) + uniform(0, 1), uniform(0, 2) ? 128 : 127,
                         2048 * uniform(0, largest / 2048) + 128};
    problem.offs.push_back(rows += sizes[kind]);
  }
  problem.num_rows = rows + uniform(0, 1) * uniform(0, 700);
  if (uniform(0, 5) == 0) {
    for (int& offset : problem.offs) {
      const int wrong[] = {uniform(-1000, rows + 1000), INT_MIN, INT_MAX};
      if (uniform(0, 2) == 0) offset = wrong[uniform(0, 3) ? 0 : uniform(1, 2)];
    }
  }
  problem.m_blocks = uniform(1, 20);
  problem.n_blocks = uniform(1, num_groups > 100 ? 3 : 13);
  problem.num_clusters = uniform(0, 3) ? uniform(1, 9) : uniform(1, 66);
  find_ends(problem);
  return problem;
}

// As many rows as there can be, in up to 256 groups: tiles too many to make.
Problem largest_problem(std::mt19937& random) {
  const int counts[] = {1, 2, 255, 256};
  Problem problem;
  problem.num_rows = 1 << 30;
  problem.offs.resize(counts[random() % 4]);
  for (int& offset : problem.offs) {
    const int ends[] = {0, 1 << 30, static_cast<int>(random() % (1 << 30))};
    offset = ends[random() % 3];
  }
  if (random() % 2) std::sort(problem.offs.begin(), problem.offs.end());
  find_ends(problem);
  return problem;
}

}  // namespace

int main(int, char** arguments) {
  std::mt19937 random(atoi(arguments[1]));
  const int problems = atoi(arguments[2]);
  for (int i = 0; i < problems; ++i) {
    const Problem problem = random_problem(random);
    check_ragged_m<128, 2, 8>(problem);  // the policies that are built
    check_ragged_m<128, 1, 16>(problem);
    check_ragged_m<64, 1, 32>(problem);
    check_ragged_m<128, 2, 1>(problem);  // other super-blocks
    check_ragged_m<128, 2, 3>(problem);
    check_ragged_k<8>(problem);
    check_ragged_k<16>(problem);
    check_order(problem);
    check_order(largest_problem(random));
  }
  printf("%d problems\n", problems);
}
