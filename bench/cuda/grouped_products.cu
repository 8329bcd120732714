// Times the products of several sets' low-rank changes in a pass of training: x a^T, dy b, dy^T low
// and d_low^T x, each kind one launch for eight sets of ranks 8 to 64, of few rows the two of dy in
// one launch, y += low b^T and dx += d_low a. Needs no libtorch:
//   heddle_grouped_bench [ROWS ...]     of each set; 16, 64, 512 and 2048 by default
// Each figure is a call of a graph whose calls go over four copies of the matrices in turn.
#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "ops/grouped_low_rank/cuda/grouped_products.h"
#include "random_matrix.cuh"

namespace {

using namespace heddle::ops::cuda;
using bf16 = __nv_bfloat16;
using heddle::bench_cuda::check;
using heddle::bench_cuda::fill;

constexpr int kCopies = 4, kCalls = 20, kSets = 8;
constexpr const char* kKinds[] = {"x a^T", "dy b", "dy^T low", "d_low^T x", "dy b and dy^T low"};
constexpr int kBoth = 4;
constexpr const char* kWideKinds[] = {"y += low b^T", "dx += d_low a"};

/// Layers that share an input.
struct Layers {
  const char* name;
  int in;
  std::vector<int> out;
};

const std::vector<Layers> kLayers = {{"0.8B gated delta", 1024, {6144, 2048, 16, 16}},
                                     {"0.8B attention", 1024, {4096, 512, 512}},
                                     {"0.8B gate, up", 1024, {3584, 3584}},
                                     {"0.8B down", 3584, {1024}},
                                     {"0.8B output", 2048, {1024}},
                                     {"4B gated delta", 2560, {8192, 4096, 32, 32}},
                                     {"4B gate, up", 2560, {9216, 9216}},
                                     {"4B down", 9216, {2560}}};

/// Memory of the products of one kind.
class Matrices {
 public:
  ~Matrices() {
    for (void* p : all_) cudaFree(p);
  }
  bf16* random(int64_t count) {
    auto* const data = static_cast<bf16*>(room(count * 2));
    fill<<<512, 256>>>(data, count, static_cast<unsigned>(all_.size()), 1);
    return data;
  }
  void* room(int64_t bytes) {
    void* p = nullptr;
    check(cudaMalloc(&p, static_cast<size_t>(bytes)));
    all_.push_back(p);
    return p;
  }

 private:
  std::vector<void*> all_;
};

/// The products of one kind for all sets and layers; `bytes`: of the wide matrices.
std::vector<NarrowProduct> products_of(const Layers& layers, int kind, int rows, Matrices& memory,
                                       int64_t& bytes) {
  std::vector<NarrowProduct> products;
  const int64_t all_rows = int64_t{kSets} * rows;
  const bool is_of_input = kind == 0 || kind == 3;
  bf16* const x = memory.random(all_rows * layers.in);
  bytes = is_of_input ? all_rows * layers.in * 2 : 0;
  for (const int out : layers.out) {
    const int width = is_of_input ? layers.in : out;
    const bf16* const tall = is_of_input ? x : memory.random(all_rows * out);
    if (!is_of_input) bytes += all_rows * out * 2;
    for (int set = 0; set < kSets; ++set) {
      const int rank = 8 * (set + 1);
      const bool sums_rows = kind == 2 || kind == 3;
      NarrowProduct p;
      p.tall = tall + int64_t{set} * rows * width;
      p.tall_stride = width;
      p.m = sums_rows ? width : rows;
      p.k = sums_rows ? rows : width;
      p.n = rank;
      p.turned = kind == 3;
      p.narrow = memory.random(int64_t{rank} * p.k);
      p.narrow_stride = kind == 0 ? width : rank;
      p.out = memory.room(int64_t{p.m} * rank * (sums_rows ? 4 : 2));
      p.out_stride = p.turned ? width : rank;
      if (kind == kBoth) {
        p.low = memory.random(int64_t{rows} * rank);
        p.low_stride = rank;
        p.gradient = static_cast<float*>(memory.room(int64_t{width} * rank * 4));
      }
      products.push_back(p);
    }
  }
  return products;
}

/// The sums of one kind: of each layer's output, or of the input's gradient over all layers.
std::vector<WideSum> sums_of(const Layers& layers, bool is_of_input, int rows, Matrices& memory,
                             int64_t& bytes) {
  std::vector<WideSum> sums;
  bytes = 0;
  const auto term = [&](int width, int set) {
    const int rank = 8 * (set + 1);
    return WideTerm{memory.random(int64_t{rows} * rank), memory.random(int64_t{width} * rank), rank,
                    is_of_input ? width : rank, rank};
  };
  const auto sum = [&](bf16* y, int width, int set) {
    sums.push_back({y + int64_t{set} * rows * width, width, rows, width, {}});
    bytes += int64_t{rows} * width * 4;
  };
  if (is_of_input) {
    bf16* const dx = memory.random(int64_t{kSets} * rows * layers.in);
    for (int set = 0; set < kSets; ++set) {
      sum(dx, layers.in, set);
      for (size_t i = 0; i < layers.out.size(); ++i)
        sums.back().terms.push_back(term(layers.in, set));
    }
    return sums;
  }
  for (const int out : layers.out) {
    bf16* const y = memory.random(int64_t{kSets} * rows * out);
    for (int set = 0; set < kSets; ++set) {
      sum(y, out, set);
      sums.back().terms.push_back(term(out, set));
    }
  }
  return sums;
}

/// Microseconds of a call, the least of five replays.
template <class Products, class F>
double time_of(const std::array<Products, kCopies>& copies, const F& run) {
  cudaStream_t stream{};
  cudaGraph_t graph{};
  cudaGraphExec_t replay{};
  check(cudaStreamCreate(&stream));
  run(copies[0], stream);
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kCalls; ++i) run(copies[i % kCopies], stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  std::array<cudaEvent_t, 2> ends{};
  for (cudaEvent_t& end : ends) check(cudaEventCreate(&end));
  float least = 1e9f;
  for (int i = 0; i < 6; ++i) {
    float ms = 0;
    check(cudaEventRecord(ends[0], stream));
    check(cudaGraphLaunch(replay, stream));
    check(cudaEventRecord(ends[1], stream));
    check(cudaEventSynchronize(ends[1]));
    check(cudaEventElapsedTime(&ms, ends[0], ends[1]));
    if (i > 0) least = std::min(least, ms);
  }
  for (cudaEvent_t end : ends) cudaEventDestroy(end);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return least * 1e3 / kCalls;
}

void print(const Layers& layers, int rows, const char* kind, double us, int64_t bytes) {
  std::printf("| %s | %d | %s | %.1f | %.2f |\n", layers.name, rows, kind, us,
              static_cast<double>(bytes) / us * 1e-6);
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<int> all_rows;
  for (int i = 1; i < argc; ++i) all_rows.push_back(std::atoi(argv[i]));
  if (all_rows.empty()) all_rows = {16, 64, 512, 2048};
  constexpr NarrowForm kForms[] = {NarrowForm::kRows, NarrowForm::kDeep, NarrowForm::kGradients,
                                   NarrowForm::kGradients, NarrowForm::kDeep};
  std::printf(
      "| layers | rows of a set | product | us | TB/s of the wide matrix "
      "|\n|---|---|---|---|---|\n");
  for (const int rows : all_rows) {
    if (rows <= 0) throw std::invalid_argument("rows of a set: expected a number above 0");
    for (const Layers& layers : kLayers) {
      for (int kind = 0; kind <= kBoth; ++kind) {
        if (kind == kBoth && rows > kMostRowsOfBoth) continue;
        Matrices memory;
        std::array<std::vector<NarrowProduct>, kCopies> copies;
        int64_t bytes = 0;
        for (auto& products : copies) products = products_of(layers, kind, rows, memory, bytes);
        const double us = time_of(copies, [&](const auto& products, cudaStream_t stream) {
          narrow_products(kForms[kind], products, stream);
        });
        print(layers, rows, kKinds[kind], us, bytes);
      }
      for (const bool is_of_input : {false, true}) {
        Matrices memory;
        std::array<std::vector<WideSum>, kCopies> copies;
        int64_t bytes = 0;
        for (auto& sums : copies) sums = sums_of(layers, is_of_input, rows, memory, bytes);
        const double us = time_of(copies, [&](const auto& sums, cudaStream_t stream) {
          wide_sums(is_of_input, sums, stream);
        });
        print(layers, rows, kWideKinds[is_of_input], us, bytes);
      }
    }
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "heddle_grouped_bench: %s\n", error.what());
  return 1;
}
