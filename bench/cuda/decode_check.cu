// Checks the products of a step of generation with low-rank changes (few_rows, batch_rows) on
// random cases: against sums in double, and bit by bit
// - launches again, one by one and in replays of a graph in which a kernel before each makes its
// rows;
// - the same runs of rows in a longer table;
// - single rows alone with what they are among others.
//   heddle_decode_check [CASES] [SEED]      the exit status is 1 if a case fails
#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ops/linear/cuda/batch_rows.h"
#include "ops/linear/cuda/few_rows.h"
#include "random_matrix.cuh"

namespace {

using namespace heddle::ops::cuda;
using bf16 = __nv_bfloat16;
using heddle::bench_cuda::check;
using heddle::bench_cuda::fill;

constexpr int kMostRows = kMostBatchRows, kMostRank = 128, kMostColumns = 20'000;
constexpr std::size_t kTable = kMostRows;  ///< Runs of a table, of which the last ones are none.

struct Shape {
  int depth;
  std::vector<int> columns;
  bool is_gated, has_norm, has_residual;
};
const std::vector<Shape> kShapes = {
    {1024, {6144, 2048, 16, 16}, false, true, false},
    {1024, {4096, 512, 512}, false, true, false},
    {1024, {3584, 3584}, true, true, false},
    {2048, {1024}, false, false, true},
    {3584, {1024}, false, false, true},
    {2560, {8192, 4096, 32, 32}, false, true, false},
    {2560, {8192, 1024, 1024}, false, true, false},
    {2560, {9216, 9216}, true, true, false},
    {4096, {2560}, false, false, true},
    {9216, {2560}, false, false, true},
    {1000, {520}, false, true, true},
    {72, {516, 516}, true, true, false},
    {64, {600, 8}, false, true, false},
    {2560, {3001}, false, true, true},
    {256, {1024, 512, 4, 4}, false, true, false},
    {256, {512}, false, false, false},
    {640, {528, 24, 24, 16}, false, true, false},
};

/// Numbers at random places of these.
struct Pools {
  static constexpr int64_t kMatrices = 120'000'000, kFactors = 60'000'000, kRows = 4'000'000;
  bf16 *matrices, *factors, *rows;
  Pools() {
    const auto make = [](bf16*& to, int64_t count, unsigned seed, float scale) {
      check(cudaMalloc(&to, count * 2));
      fill<<<1024, 256>>>(to, count, seed, scale);
    };
    make(matrices, kMatrices, 1, 0.05f);
    make(factors, kFactors, 2, 0.1f);
    make(rows, kRows, 3, 1);
  }
};

/// A layer of a case and its outputs in double.
struct Layer {
  const bf16* weight;
  int columns;
  const SlotFactors* slots;
};

/// low [rows,kMostRank] = x A^T of one layer, where x are the rows times the norm's weight.
__global__ void plain_lows(Layer layer, FewRowNorm norm, const bf16* x, int depth,
                           const int* set_of_row, double* low) {
  const int row = static_cast<int>(blockIdx.y), r = static_cast<int>(blockIdx.x),
            set = set_of_row[row];
  __shared__ double sums[128];
  double sum = 0;
  const bool is_there = set >= 0 && r < layer.slots[set].rank;
  for (int k = threadIdx.x; is_there && k < depth; k += 128) {
    float v = __bfloat162float(x[row * depth + k]);
    if (norm.weight != nullptr)
      v = __bfloat162float(__float2bfloat16_rn(
          v * (norm.offset + __bfloat162float(static_cast<const bf16*>(norm.weight)[k]))));
    sum +=
        double{v} * __bfloat162float(static_cast<const bf16*>(layer.slots[set].a)[r * depth + k]);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 64; step > 0; step /= 2) {
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) low[row * kMostRank + r] = is_there ? sums[0] * layer.slots[set].scale : 0;
}

/// y [rows,columns] of one layer before what follows the sum. A warp each output.
__global__ void plain_sums(Layer layer, FewRowNorm norm, const bf16* x, int depth, int rows,
                           const int* set_of_row, const double* low, double* y) {
  const int i = static_cast<int>(blockIdx.x * 8 + threadIdx.x / 32), lane = threadIdx.x % 32,
            row = i / layer.columns, column = i % layer.columns;
  if (row >= rows) return;
  double sum = 0, squares = 0;
  for (int k = lane; k < depth; k += 32) {
    float v = __bfloat162float(x[row * depth + k]);
    squares += double{v} * v;
    if (norm.weight != nullptr)
      v = __bfloat162float(__float2bfloat16_rn(
          v * (norm.offset + __bfloat162float(static_cast<const bf16*>(norm.weight)[k]))));
    sum += double{v} * __bfloat162float(layer.weight[int64_t{column} * depth + k]);
  }
  const int set = set_of_row[row];
  for (int r = lane; set >= 0 && r < layer.slots[set].rank; r += 32)
    sum += low[row * kMostRank + r] *
           __bfloat162float(static_cast<const bf16*>(
               layer.slots[set].b)[int64_t{column} * layer.slots[set].rank + r]);
  for (int step = 1; step < 32; step *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, step);
    squares += __shfl_xor_sync(0xffffffffu, squares, step);
  }
  if (lane == 0) y[i] = norm.weight != nullptr ? sum * rsqrt(squares / depth + norm.eps) : sum;
}

/// found[0]: the largest difference over the root of the mean square, in millionths; [1]: numbers
/// that are none.
__global__ void compare(const double* y, const double* up, const bf16* start, const bf16* found,
                        int count, double rms, unsigned* result) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  double v = y[i];
  if (up != nullptr) v = v / (1 + exp(-v)) * up[i];
  if (start != nullptr) v += __bfloat162float(start[i]);
  const double off = fabs(v - __bfloat162float(found[i])) / (fabs(v) + rms);
  if (!(off < 1000)) atomicAdd(result + 1, 1U);
  atomicMax(result, static_cast<unsigned>(fmin(off, 1000.) * 1e6));
}

__global__ void count_other_bits(const bf16* a, const bf16* b, int64_t count, unsigned* others) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (reinterpret_cast<const unsigned short*>(a)[i] !=
        reinterpret_cast<const unsigned short*>(b)[i])
      atomicAdd(others, 1U);
  }
}

/// Makes the rows of the next launch, late.
__global__ void bring_rows(const bf16* from, bf16* to, int count) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x))
    to[i] = from[i];
}

using Sums = void (*)(int, const std::vector<FewRowSum>&, cudaStream_t, const FewRowNorm&,
                      const FewRowSlots&);

struct Checker {
  Pools pools;
  std::mt19937 random;
  cudaStream_t stream;
  bf16 *x, *y, *y_again, *y_third, *lows;
  double *sums[2], *low_sums;
  SlotFactors* slots;
  SlotRun* runs;
  int* sets;
  unsigned* result;
  int64_t launches = 0, failures = 0;
  double worst = 0;
  std::string worst_of = {};

  explicit Checker(unsigned seed) : random(seed) {
    check(cudaStreamCreate(&stream));
    const int64_t width = int64_t{kMostRows} * kMostColumns;
    for (bf16** p : {&x, &y, &y_again, &y_third}) check(cudaMalloc(p, width * 2));
    for (double** p : {&sums[0], &sums[1]}) check(cudaMalloc(p, width * 8));
    check(cudaMalloc(&low_sums, kMostRows * kMostRank * 8));
    check(cudaMalloc(&lows, int64_t{kMostRows} * kMostRank * kMostFewRowSums * 2));
    check(cudaMalloc(&slots, kMostFewRowSums * kMostRows * sizeof(SlotFactors)));
    check(cudaMalloc(&runs, kTable * sizeof(SlotRun)));
    check(cudaMalloc(&sets, kMostRows * 4));
    check(cudaMalloc(&result, 8));
  }
  int below(int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }
  const bf16* place(const bf16* pool, int64_t all, int64_t count) {
    return pool + static_cast<int64_t>(random()) % ((all - count) / 8) * 8;
  }
  void report(const std::string& what) {
    ++failures;
    std::printf("FAILED: %s\n", what.c_str());
  }
  unsigned others(const bf16* a, const bf16* b, int64_t count) {
    check(cudaMemsetAsync(result, 0, 8, stream));
    count_other_bits<<<256, 256, 0, stream>>>(a, b, count, result);
    unsigned found = 0;
    check(cudaMemcpyAsync(&found, result, 4, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    return found;
  }
  std::vector<SlotRun> runs_of(const std::vector<int>& set_of_row) {
    std::vector<SlotRun> own;
    const int rows = static_cast<int>(set_of_row.size());
    for (int first = 0; first < rows;) {
      int last = first;
      while (last < rows && last - first < kMostSlotRows && set_of_row[last] == set_of_row[first])
        ++last;
      own.push_back({set_of_row[first], first, last - first, 0});
      first = last;
    }
    return own;
  }

  void put_table(std::vector<SlotRun> own) {
    own.resize(kTable);
    check(cudaMemcpyAsync(runs, own.data(), kTable * sizeof(SlotRun), cudaMemcpyHostToDevice,
                          stream));
    check(cudaStreamSynchronize(stream));
  }

  void run(int rows, const Shape& shape, int set_count, int most_rank, bool any_rank) {
    std::vector<int> set_of_row;
    for (int row = 0; row < rows; ++row) set_of_row.push_back(row * set_count / rows);
    if (below(2) == 0) {
      for (int& set : set_of_row) set = below(8) == 0 ? -1 : set;
    }
    int rank = 16;
    std::vector<SlotFactors> all;
    std::vector<int> ranks;
    for (int set = 0; set < set_count; ++set) {
      ranks.push_back(any_rank ? 1 + below(most_rank) : most_rank);
      while (rank < ranks.back()) rank *= 2;
    }
    const int layers = static_cast<int>(shape.columns.size());
    for (int layer = 0; layer < layers; ++layer) {
      const bool is_left_out = layers > 1 && below(8) == 0;
      for (int set = 0; set < set_count; ++set) {
        const int own = is_left_out ? 0 : ranks[static_cast<std::size_t>(set)],
                  columns = shape.columns[static_cast<std::size_t>(layer)];
        all.push_back({place(pools.factors, Pools::kFactors, int64_t{own} * shape.depth),
                       place(pools.factors, Pools::kFactors, int64_t{own} * columns), own,
                       0.5f * static_cast<float>(1 + below(8))});
      }
    }
    const std::vector<SlotRun> own_runs = runs_of(set_of_row);
    check(cudaMemcpy(slots, all.data(), all.size() * sizeof(SlotFactors), cudaMemcpyHostToDevice));
    put_table(own_runs);
    check(cudaMemcpy(sets, set_of_row.data(), set_of_row.size() * 4, cudaMemcpyHostToDevice));
    const bf16* const given = place(pools.rows, Pools::kRows, int64_t{rows} * shape.depth);
    const bf16* const residual = place(pools.rows, Pools::kRows, int64_t{rows} * shape.columns[0]);
    FewRowNorm norm;
    if (shape.has_norm)
      norm = {place(pools.factors, Pools::kFactors, shape.depth), Element::kBFloat16, 1.f, 1e-6f};
    std::vector<Layer> plain;
    for (int layer = 0; layer < layers; ++layer) {
      const int columns = shape.columns[static_cast<std::size_t>(layer)];
      plain.push_back({place(pools.matrices, Pools::kMatrices, int64_t{columns} * shape.depth),
                       columns, slots + layer * set_count});
    }
    // Sums of `some` rows from `first` on, to `to`.
    const auto sums_of = [&](int first, bf16* to) {
      std::vector<FewRowSum> work;
      int64_t at = 0;
      for (int layer = 0; layer < layers; ++layer) {
        const Layer& l = plain[static_cast<std::size_t>(layer)];
        FewRowChange change;
        change.slots = l.slots;
        change.low = lows + int64_t{layer} * rank;
        change.low_stride = layers * rank;
        if (shape.is_gated && layer == 1) {
          work[0].up = l.weight;
          work[0].up_change = change;
          continue;
        }
        FewRowSum sum;
        sum.columns = l.columns;
        sum.y = to + at;
        sum.y_stride = l.columns;
        if (shape.has_residual)
          sum.start = residual + int64_t{first} * l.columns, sum.start_stride = l.columns;
        sum.terms[0] = {x + int64_t{first} * shape.depth, l.weight, shape.depth, shape.depth,
                        shape.depth};
        sum.term_count = 1;
        sum.change = change;
        work.push_back(sum);
        at += int64_t{kMostRows} * l.columns;
      }
      return work;
    };
    const int output_count = shape.is_gated ? 1 : layers;
    int64_t width = 0;
    for (int i = 0; i < output_count; ++i) width += shape.columns[static_cast<std::size_t>(i)];
    const int64_t bytes = int64_t{kMostRows} * width * 2;
    const std::string name = std::to_string(rows) + " rows of " + std::to_string(shape.depth) +
                             " to " + std::to_string(shape.columns[0]) + ", " +
                             std::to_string(set_count) + " sets of rank " + std::to_string(rank);
    check(cudaMemcpyAsync(x, given, int64_t{rows} * shape.depth * 2, cudaMemcpyDeviceToDevice,
                          stream));
    for (const Sums kernel : {Sums{batch_row_sums}, Sums{few_row_sums}}) {
      if (kernel == Sums{few_row_sums} && rows > kMostFewRows) continue;
      const std::string of = (kernel == Sums{few_row_sums} ? "few_rows, " : "batch_rows, ") + name;
      const FewRowSlots table{runs, static_cast<int>(own_runs.size()), rank};
      FewRowSlots longer = table;
      longer.sets = set_count;
      longer.count = static_cast<int>(std::min(own_runs.size() + 1, kTable));
      check(cudaMemsetAsync(y, 0xff, bytes, stream));
      kernel(rows, sums_of(0, y), stream, norm, table);
      ++launches;
      // Against sums in double.
      int64_t at = 0;
      for (int i = 0; i < output_count; ++i) {
        const int columns = shape.columns[static_cast<std::size_t>(i)], count = rows * columns;
        for (int layer = i; layer < i + (shape.is_gated ? 2 : 1); ++layer) {
          const Layer& l = plain[static_cast<std::size_t>(layer)];
          plain_lows<<<dim3(kMostRank, rows), 128, 0, stream>>>(l, norm, x, shape.depth, sets,
                                                                low_sums);
          plain_sums<<<(count + 7) / 8, 256, 0, stream>>>(l, norm, x, shape.depth, rows, sets,
                                                          low_sums, sums[layer - i]);
        }
        check(cudaMemsetAsync(result, 0, 8, stream));
        compare<<<(count + 255) / 256, 256, 0, stream>>>(
            sums[0], shape.is_gated ? sums[1] : nullptr, shape.has_residual ? residual : nullptr,
            y + at, count, 1., result);
        unsigned found[2];
        check(cudaMemcpyAsync(found, result, 8, cudaMemcpyDeviceToHost, stream));
        check(cudaStreamSynchronize(stream));
        if (found[0] * 1e-6 > worst) worst = found[0] * 1e-6, worst_of = of;
        if (found[0] > (shape.is_gated ? 150'000 : 30'000) || found[1] > 0)
          report(of + ": output " + std::to_string(i) + " differs by " +
                 std::to_string(found[0] * 1e-6) + ", " + std::to_string(found[1]) + " are none");
        at += int64_t{kMostRows} * columns;
      }
      const auto expect_same = [&](const char* what) {
        if (const unsigned count = others(y, y_again, bytes / 2); count > 0)
          report(of + ": " + std::to_string(count) + " others " + what);
      };
      for (int i = 0; i < 2; ++i) {
        check(cudaMemsetAsync(y_again, 0xff, bytes, stream));
        kernel(rows, sums_of(0, y_again), stream, norm, i == 0 ? table : longer);
        ++launches;
        expect_same(i == 0 ? "again" : "in a longer table");
      }
      check_replays(rows, of, kernel, sums_of, norm, table, given, shape.depth, bytes);
      check_alone(rows, of, kernel, sums_of, norm, table, set_of_row, ranks);
    }
  }

  template <class Work>
  void check_replays(int rows, const std::string& of, Sums kernel, const Work& sums_of,
                     const FewRowNorm& norm, const FewRowSlots& table, const bf16* given, int depth,
                     int64_t bytes) {
    constexpr int kCalls = 3, kPairs = 2, kReplays = 3;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) {
      bring_rows<<<16, 256, 0, stream>>>(given, x, rows * depth);
      for (int j = 0; j < kPairs; ++j) {
        kernel(rows, sums_of(0, y_again), stream, norm, table);
        kernel(rows, sums_of(0, y_third), stream, norm, table);
      }
      for (bf16* found : {y_again, y_third}) {
        count_other_bits<<<256, 256, 0, stream>>>(y, found, bytes / 2, result);
        check(cudaMemsetAsync(found, 0xff, bytes, stream));
      }
      check(cudaMemsetAsync(x, 0, int64_t{rows} * depth * 2, stream));
    }
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&replay, graph, 0));
    check(cudaMemsetAsync(result, 0, 8, stream));
    for (bf16* found : {y_again, y_third}) check(cudaMemsetAsync(found, 0xff, bytes, stream));
    for (int i = 0; i < kReplays; ++i) check(cudaGraphLaunch(replay, stream));
    launches += 2 * kCalls * kPairs * kReplays;
    check(cudaMemcpyAsync(x, given, int64_t{rows} * depth * 2, cudaMemcpyDeviceToDevice, stream));
    unsigned count = 0;
    check(cudaMemcpyAsync(&count, result, 4, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    if (count > 0) report(of + ": " + std::to_string(count) + " others replayed");
    check(cudaGraphExecDestroy(replay));
    check(cudaGraphDestroy(graph));
  }

  template <class Work>
  void check_alone(int rows, const std::string& of, Sums kernel, const Work& sums_of,
                   const FewRowNorm& norm, const FewRowSlots& slots_of_all,
                   const std::vector<int>& set_of_row, const std::vector<int>& ranks) {
    for (int i = 0; i < 2; ++i) {
      const int row = below(rows);
      const SlotRun own{set_of_row[static_cast<std::size_t>(row)], 0, 1, 0};
      put_table({own});
      // Once as one run, with a rank of its own; once in a longer table.
      FewRowSlots slots_of_row = slots_of_all;
      slots_of_row.count = 1 + i;
      if (own.slot >= 0 && i == 0) {
        slots_of_row.rank = 16;
        while (slots_of_row.rank < ranks[static_cast<std::size_t>(own.slot)])
          slots_of_row.rank *= 2;
      }
      kernel(1, sums_of(row, y_again), stream, norm, slots_of_row);
      ++launches;
      int64_t at = 0;
      for (const FewRowSum& sum : sums_of(row, y)) {
        if (const unsigned count =
                others(y + at + int64_t{row} * sum.columns, y_again + at, sum.columns);
            count > 0)
          report(of + ": " + std::to_string(count) + " others alone, row " + std::to_string(row) +
                 ", launch " + std::to_string(i) + ", set " + std::to_string(own.slot) + ", rank " +
                 std::to_string(own.slot < 0 ? 0 : ranks[static_cast<std::size_t>(own.slot)]) +
                 ", runs " + std::to_string(runs_of(set_of_row).size()));
        at += int64_t{kMostRows} * sum.columns;
      }
    }
    put_table(runs_of(set_of_row));
  }
};

}  // namespace

int main(int argc, char** argv) {
  try {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    const int cases = argc > 1 ? std::atoi(argv[1]) : 200;
    Checker checker(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1);
    const int all_rows[] = {1, 2, 5, 8, 9, 16, 17, 32, 33, 48, 63, 64};
    for (int i = 0; i < cases; ++i) {
      const Shape& shape = kShapes[static_cast<std::size_t>(i) % kShapes.size()];
      const int rows = all_rows[checker.below(12)], kind = checker.below(4),
                sets = kind < 2    ? 1
                       : kind == 2 ? 1 + checker.below(std::min(rows, 32))
                                   : std::min(rows, 32);
      const int ranks[] = {16, 16, 16, 8, 1, 64}, rank = ranks[checker.below(6)];
      checker.run(rows, shape, sets, rank, checker.below(3) == 0);
    }
    std::printf("%d cases, %lld launches, %lld failures, largest difference %.4f: %s\n", cases,
                static_cast<long long>(checker.launches), static_cast<long long>(checker.failures),
                checker.worst, checker.worst_of.c_str());
    return checker.failures > 0 ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_decode_check: %s\n", error.what());
    return 1;
  }
}
