// Times the products of a step of generation: sums of products of a few rows (few_rows, batch_rows)
// compared with cuBLAS one by one and with a copy. Needs no libtorch:
//   heddle_decode_bench [ROWS ...] [TEXT ...]     of projections whose names have a text
//   heddle_decode_bench --sets N [--rank R] [--slots S] ...   also with low-rank changes of N sets,
//   in turns of rows, in tables of S slots
// Each figure is a replay of a graph whose calls have matrices of their own, more than the cache
// holds. Results are compared with a plain kernel first.
#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
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

__global__ void copy(const uint4* from, uint4* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    to[i] = from[i];
}

/// The change of one output before its row's norm: low-rank factors of the row's set.
__device__ float change_of(const FewRowTerm& t, const SlotFactors& factors, const bf16* a,
                           const FewRowNorm& norm, int column) {
  float y = 0;
  for (int r = 0; r < factors.rank; ++r) {
    float low = 0;
    for (int k = 0; k < t.depth; ++k) {
      float x = __bfloat162float(a[k]);
      if (norm.weight != nullptr)
        x *= norm.offset + __bfloat162float(static_cast<const bf16*>(norm.weight)[k]);
      low += x * __bfloat162float(static_cast<const bf16*>(factors.a)[r * t.depth + k]);
    }
    y += low * __bfloat162float(static_cast<const bf16*>(factors.b)[column * factors.rank + r]);
  }
  return y * factors.scale;
}

/// y = what few_row_sums() makes of one sum, a thread each output.
__global__ void plain(FewRowSum sum, FewRowNorm norm, FewRowSlots slots, int rows, float* y) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), row = i / sum.columns,
            column = i % sum.columns;
  if (row >= rows) return;
  const FewRowTerm& t = sum.terms[0];
  const bf16* a = static_cast<const bf16*>(t.a) + row * t.a_stride;
  float squares = 0, total = 0, up = 0;
  for (int k = 0; k < t.depth; ++k) {
    float x = __bfloat162float(a[k]);
    squares += x * x;
    if (norm.weight != nullptr)
      x *= norm.offset + __bfloat162float(static_cast<const bf16*>(norm.weight)[k]);
    total += x * __bfloat162float(static_cast<const bf16*>(t.b)[column * t.b_stride + k]);
    if (sum.up != nullptr)
      up += x * __bfloat162float(static_cast<const bf16*>(sum.up)[column * t.b_stride + k]);
  }
  for (int i = 0; i < slots.count; ++i) {
    const SlotRun run = slots.runs[i];
    if (run.slot < 0 || row < run.first || row >= run.first + run.rows) continue;
    total += change_of(t, sum.change.slots[run.slot], a, norm, column);
    if (sum.up != nullptr) up += change_of(t, sum.up_change.slots[run.slot], a, norm, column);
  }
  const float rstd = norm.weight != nullptr ? rsqrtf(squares / t.depth + norm.eps) : 1.f;
  float v = total * rstd;
  if (sum.up != nullptr) v = v / (1 + expf(-v)) * up * rstd;
  if (sum.start != nullptr)
    v += __bfloat162float(static_cast<const bf16*>(sum.start)[row * sum.start_stride + column]);
  y[i] = v;
}

struct Shape {
  const char* name;
  int depth;
  std::vector<int> columns;
  bool is_gated, has_norm, has_residual;
};

const std::vector<Shape> kShapes = {
    {"0.8B gated delta net's inputs", 1024, {6144, 2048, 16, 16}, false, true, false},
    {"0.8B attention's inputs", 1024, {4096, 512, 512}, false, true, false},
    {"0.8B gate and up", 1024, {3584, 3584}, true, true, false},
    {"0.8B output", 2048, {1024}, false, false, true},
    {"0.8B down", 3584, {1024}, false, false, true},
    {"4B gated delta net's inputs", 2560, {8192, 4096, 32, 32}, false, true, false},
    {"4B attention's inputs", 2560, {8192, 1024, 1024}, false, true, false},
    {"4B gate and up", 2560, {9216, 9216}, true, true, false},
    {"4B output", 4096, {2560}, false, false, true},
    {"4B down", 9216, {2560}, false, false, true},
};

constexpr int kMostRows = 64;

/// Sets of adapters, if any, their rank, and the slots of a table, or 0: one for each set.
struct Changes {
  int sets = 0, rank = 16, slots = 0;
  int table() const { return std::max(sets, slots); }
};

struct Data {
  const Shape& shape;
  const Changes changes;
  int copies;
  int64_t matrix_elements = 0;
  bf16 *matrices = nullptr, *x = nullptr, *norm = nullptr, *residual = nullptr, *y = nullptr;
  int width = 0;
  int64_t factor_elements = 0;
  bf16 *factors = nullptr, *lows = nullptr;
  SlotFactors* slots = nullptr;  ///< [copies, matrices, slots]
  SlotRun* runs = nullptr;       ///< [rows, most runs]

  Data(const Shape& shape, const Changes& changes) : shape(shape), changes(changes) {
    for (const int columns : shape.columns) {
      matrix_elements += int64_t{columns} * shape.depth;
      width += columns;
    }
    for (const int columns : shape.columns)
      factor_elements += int64_t{changes.sets} * changes.rank * (shape.depth + columns);
    copies = static_cast<int>(std::min<int64_t>(40, 600'000'000 / (matrix_elements * 2)));
    const auto make = [](bf16*& to, int64_t count, unsigned seed, float scale) {
      check(cudaMalloc(&to, count * 2));
      fill<<<1024, 256>>>(to, count, seed, scale);
    };
    make(matrices, matrix_elements * copies, 1, 0.05f);
    make(x, int64_t{kMostRows} * shape.depth, 2, 1);
    make(norm, shape.depth, 3, 0.5f);
    make(residual, int64_t{kMostRows} * width, 4, 1);
    make(y, int64_t{kMostRows} * width * 2, 5, 1);
    if (changes.sets > 0) {
      make(factors, factor_elements * copies, 6, 0.05f);
      make(lows, int64_t{kMostRows} * low_width() * 4, 7, 1);
      make_tables();
    }
    check(cudaDeviceSynchronize());
  }
  int low_width() const {
    return (changes.rank + 15) / 16 * 16 * static_cast<int>(shape.columns.size());
  }
  void make_tables() {
    std::vector<SlotFactors> all;
    const bf16* at = factors;
    for (int copy = 0; copy < copies; ++copy) {
      for (const int columns : shape.columns) {
        for (int set = 0; set < changes.sets; ++set) {
          all.push_back({at, at + int64_t{changes.rank} * shape.depth, changes.rank, 1.f});
          at += int64_t{changes.rank} * (shape.depth + columns);
        }
        for (int set = changes.sets; set < changes.table(); ++set) all.push_back({});
      }
    }
    check(cudaMalloc(&slots, all.size() * sizeof(SlotFactors)));
    check(cudaMemcpy(slots, all.data(), all.size() * sizeof(SlotFactors), cudaMemcpyHostToDevice));
    std::vector<SlotRun> some;
    for (int rows = 1; rows <= kMostRows; ++rows) {
      std::vector<SlotRun> own = runs_of(rows);
      own.resize(kMostRows);
      some.insert(some.end(), own.begin(), own.end());
    }
    check(cudaMalloc(&runs, some.size() * sizeof(SlotRun)));
    check(cudaMemcpy(runs, some.data(), some.size() * sizeof(SlotRun), cudaMemcpyHostToDevice));
  }
  /// Rows in the order of their sets, a power of two of runs, as the rollout engine makes them.
  std::vector<SlotRun> runs_of(int rows) const {
    std::vector<SlotRun> own;
    const int sets = std::min(changes.sets, rows);
    for (int set = 0; set < sets; ++set) {
      const int end = rows * (set + 1) / sets;
      for (int first = rows * set / sets; first < end; first += kMostSlotRows)
        own.push_back({set, first, std::min(kMostSlotRows, end - first), 0});
    }
    std::size_t count = 1;
    while (count < own.size()) count *= 2;
    own.resize(count);
    return own;
  }
  FewRowSlots slots_of(int rows) const {
    if (changes.sets == 0) return {};
    return {runs + (rows - 1) * kMostRows, static_cast<int>(runs_of(rows).size()),
            (changes.rank + 15) / 16 * 16, changes.table()};
  }
  FewRowChange change(int copy, std::size_t i) const {
    FewRowChange made;
    if (changes.sets == 0) return made;
    made.slots = slots + (static_cast<std::size_t>(copy) * shape.columns.size() + i) *
                             static_cast<std::size_t>(changes.table());
    made.low = lows + static_cast<int>(i) * ((changes.rank + 15) / 16 * 16);
    made.low_stride = low_width();
    return made;
  }
  ~Data() {
    for (bf16* p : {matrices, x, norm, residual, y, factors, lows}) cudaFree(p);
    cudaFree(slots);
    cudaFree(runs);
  }
  const bf16* matrix(int copy, std::size_t i) const {
    int64_t at = matrix_elements * copy;
    for (std::size_t j = 0; j < i; ++j) at += int64_t{shape.columns[j]} * shape.depth;
    return matrices + at;
  }
  FewRowNorm own_norm() const {
    FewRowNorm n;
    if (shape.has_norm) n = {norm, Element::kBFloat16, 1.f, 1e-6f};
    return n;
  }
  std::vector<FewRowSum> sums(int copy, bool is_changed = false) const {
    std::vector<FewRowSum> all;
    int64_t at = 0;
    for (std::size_t i = 0; i < shape.columns.size(); ++i) {
      if (shape.is_gated && i == 1) {
        all[0].up = matrix(copy, 1);
        if (is_changed) all[0].up_change = change(copy, 1);
        continue;
      }
      FewRowSum sum;
      sum.columns = shape.columns[i];
      sum.y = y + at;
      sum.y_stride = sum.columns;
      if (shape.has_residual) sum.start = residual, sum.start_stride = sum.columns;
      sum.terms[0] = {x, matrix(copy, i), shape.depth, shape.depth, shape.depth};
      sum.term_count = 1;
      if (is_changed) sum.change = change(copy, i);
      all.push_back(sum);
      at += int64_t{kMostRows} * sum.columns;
    }
    return all;
  }
};

/// Microseconds of a call in replays of a graph of `calls`.
double time_of(int calls, const std::function<void(int, cudaStream_t)>& call) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  call(0, stream);
  check(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(i, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(replay, stream));
    check(cudaEventRecord(end, stream));
    check(cudaStreamSynchronize(stream));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return 1e3 * times[times.size() / 2] / calls;
}

/// The largest difference of a result from the plain kernel's, over the root of the mean square.
double error_of(const Data& data, int rows, const std::vector<FewRowSum>& sums,
                const FewRowSlots& slots = {}) {
  double worst = 0;
  for (const FewRowSum& sum : sums) {
    const int count = rows * sum.columns;
    float* exact;
    check(cudaMalloc(&exact, count * 4));
    plain<<<(count + 255) / 256, 256>>>(sum, data.own_norm(), slots, rows, exact);
    std::vector<float> expected(count);
    std::vector<bf16> found(count);
    check(cudaMemcpy(expected.data(), exact, count * 4, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(found.data(), sum.y, count * 2, cudaMemcpyDeviceToHost));
    cudaFree(exact);
    double square = 0, most = 0;
    for (int i = 0; i < count; ++i) {
      square += double{expected[i]} * expected[i];
      const double off = std::abs(double{expected[i]} - __bfloat162float(found[i]));
      most = std::isfinite(off) ? std::max(most, off) : INFINITY;
    }
    worst = std::max(worst, most / std::sqrt(square / count));
  }
  return worst;
}

using Sums = void (*)(int, const std::vector<FewRowSum>&, cudaStream_t, const FewRowNorm&,
                      const FewRowSlots&);

/// Microseconds and error of a kernel.
struct Figures {
  double us, error;
};
Figures measure(const Data& data, int rows, bool is_changed, Sums kernel) {
  const FewRowSlots slots = is_changed ? data.slots_of(rows) : FewRowSlots{};
  Figures figures{};
  figures.us = time_of(data.copies, [&](int copy, cudaStream_t stream) {
    kernel(rows, data.sums(copy, is_changed), stream, data.own_norm(), slots);
  });
  check(cudaMemset(data.y, 0xff, int64_t{kMostRows} * data.width * 2));
  kernel(rows, data.sums(0, is_changed), nullptr, data.own_norm(), slots);
  check(cudaDeviceSynchronize());
  figures.error = error_of(data, rows, data.sums(0, is_changed), slots);
  return figures;
}

double copy_rate() {
  constexpr int64_t kBytes = 1 << 30;
  void *from, *to;
  check(cudaMalloc(&from, kBytes));
  check(cudaMalloc(&to, kBytes));
  const double us = time_of(8, [&](int, cudaStream_t s) {
    copy<<<4096, 256, 0, s>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to),
                              kBytes / 16);
  });
  cudaFree(from);
  cudaFree(to);
  return 2e-6 * kBytes / us;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    std::vector<int> all_rows;
    std::vector<std::string> texts;
    Changes changes;
    for (int i = 1; i < argc; ++i) {
      const std::string given = argv[i];
      if ((given == "--sets" || given == "--rank" || given == "--slots") && i + 1 < argc)
        (given == "--sets"   ? changes.sets
         : given == "--rank" ? changes.rank
                             : changes.slots) = std::atoi(argv[++i]);
      else if (given.find_first_not_of("0123456789") == std::string::npos)
        all_rows.push_back(std::clamp(std::atoi(argv[i]), 1, kMostRows));
      else
        texts.push_back(given);
    }
    if (all_rows.empty()) all_rows = {16, 32, 64};
    cudaDeviceProp device{};
    check(cudaGetDeviceProperties(&device, 0));
    const double rate = copy_rate();
    std::printf("%s, a copy of 1 GiB reads and writes %.2f TB/s; us a call\n\n", device.name, rate);
    const bool is_changed = changes.sets > 0;
    std::printf("| projections | rows | floor | cuBLAS | few_rows | batch_rows | error |%s\n",
                is_changed ? " few_rows, changed | batch_rows, changed | floor | error |" : "");
    std::printf("|---|---|---|---|---|---|---|%s\n", is_changed ? "---|---|---|---|" : "");
    cublasHandle_t library;
    if (cublasCreate(&library) != CUBLAS_STATUS_SUCCESS)
      throw std::runtime_error("cublasCreate fails");
    void* workspace;
    check(cudaMalloc(&workspace, 64 << 20));
    cublasSetWorkspace(library, workspace, 64 << 20);
    for (const Shape& shape : kShapes) {
      const auto is_named = [&](const std::string& text) {
        return std::string(shape.name).find(text) != std::string::npos;
      };
      if (!texts.empty() && std::none_of(texts.begin(), texts.end(), is_named)) continue;
      const Data data(shape, changes);
      for (const int rows : all_rows) {
        const double floor = data.matrix_elements * 2e-6 / rate;
        const double by_library = time_of(data.copies, [&](int copy, cudaStream_t stream) {
          cublasSetStream(library, stream);
          int64_t at = 0;
          for (std::size_t i = 0; i < shape.columns.size(); ++i) {
            const float one = 1, beta = shape.has_residual ? 1 : 0;
            cublasGemmEx(library, CUBLAS_OP_T, CUBLAS_OP_N, shape.columns[i], rows, shape.depth,
                         &one, data.matrix(copy, i), CUDA_R_16BF, shape.depth, data.x, CUDA_R_16BF,
                         shape.depth, &beta, data.y + at, CUDA_R_16BF, shape.columns[i],
                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
            at += int64_t{kMostRows} * shape.columns[i];
          }
        });
        std::printf("| %s | %d | %.1f | %.1f |", shape.name, rows, floor, by_library);
        double worst = 0;
        const auto print = [&](bool with_changes, Sums kernel) {
          const Figures figures = measure(data, rows, with_changes, kernel);
          worst = std::max(worst, figures.error);
          std::printf(" %.1f |", figures.us);
        };
        for (const bool with_changes : {false, true}) {
          if (with_changes && !is_changed) break;
          worst = 0;
          rows <= kMostFewRows ? print(with_changes, few_row_sums) : void(std::printf(" |"));
          print(with_changes, batch_row_sums);
          if (with_changes)
            std::printf(" %.1f |", floor + std::min(1., double(rows) / changes.sets) *
                                               data.factor_elements * 2e-6 / rate);
          std::printf(" %.4f |", worst);
        }
        std::printf("\n");
      }
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heddle_decode_bench: %s\n", error.what());
    return 1;
  }
}
