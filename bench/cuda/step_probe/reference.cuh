// The step again, product by product with sums in double, for comparison.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "../random_matrix.cuh"
#include "model.h"

namespace heddle::step_probe {

using bench_cuda::check;
using bf16 = __nv_bfloat16;

/// y[row, column] = sum over the depth of x norm times the column of a; a[column, depth], or
/// [depth, columns] if kTurned.
template <bool kTurned>
__global__ void product(const double* x, const bf16* norm, const bf16* a, double* y, int depth,
                        int columns) {
  const int column = blockIdx.x, row = blockIdx.y;
  double sum = 0;
  for (int k = threadIdx.x; k < depth; k += 32) {
    const int64_t at = kTurned ? int64_t{k} * columns + column : int64_t{column} * depth + k;
    const double n = norm ? static_cast<double>(__bfloat162float(norm[k])) : 1.;
    sum += x[int64_t{row} * depth + k] * n * static_cast<double>(__bfloat162float(a[at]));
  }
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (threadIdx.x == 0) y[int64_t{row} * columns + column] = sum;
}

inline double rounded(double x) {
  return static_cast<double>(__bfloat162float(__float2bfloat16(static_cast<float>(x))));
}

/// Vectors of the last layer that the step leaves in the exchange, and the logits.
struct Results {
  std::vector<double> inputs, mixed, middle, inner, residual, logits;
};

class Reference {
 public:
  Reference() {
    check(cudaMalloc(&x_, kMostSequences * kInner * sizeof(double)));
    check(cudaMalloc(&y_, int64_t{kMostSequences} * kVocabulary * sizeof(double)));
  }

  Results step(const Model& m, int rows, int layers, bool lora) {
    Results r;
    std::vector<bf16> embedding(rows * kWidth);
    check(cudaMemcpy(embedding.data(), m.embedding, embedding.size() * 2, cudaMemcpyDeviceToHost));
    std::vector<double> residual;
    for (const bf16 v : embedding) residual.push_back(static_cast<double>(__bfloat162float(v)));
    const auto all_rounded = [](std::vector<double> v) {
      for (double& x : v) x = rounded(x);
      return v;
    };
    r.residual = all_rounded(residual);
    for (int64_t l = 0; l < layers; ++l) {
      r.inputs = run(r.residual, kWidth, m.norm_inputs + l * kWidth,
                     m.inputs + l * kInputs * kWidth, kInputs, rows);
      if (lora) {
        change(r.inputs, r.residual, kWidth, m.norm_inputs + l * kWidth,
               m.a_inputs + l * kInputAdapters * kRank * kWidth, kInputAdapters, false,
               m.b_inputs + l * kInputs * kRank, kInputs, rows, input_adapter);
      }
      scale(r.inputs, r.residual, kInputs, rows);
      r.inputs = all_rounded(r.inputs);
      r.mixed.assign(int64_t{rows} * kMixer, 0);
      for (int i = 0; i < rows * kMixer; ++i) {
        const double* v = &r.inputs[int64_t{i / kMixer} * kInputs];
        const int c = i % kMixer;
        const double z = v[6144 + c], gate = v[8192 + c / 128];
        r.mixed[i] = rounded(z / (1 + std::exp(-z)) *
                             (v[4096 + c] + v[c] * v[2048 + c] / (1 + std::exp(-gate))));
      }
      auto out = run(r.mixed, kMixer, nullptr, m.out + l * kWidth * kMixer, kWidth, rows);
      const auto one = [](int) { return 0; };
      if (lora)
        change(out, r.mixed, kMixer, nullptr, m.a_out + l * kMixer * kRank, 1, true,
               m.b_out + l * kWidth * kRank, kWidth, rows, one);
      for (size_t i = 0; i < out.size(); ++i) residual[i] += out[i];
      r.middle = all_rounded(residual);
      auto both = run(r.middle, kWidth, m.norm_gate_up + l * kWidth,
                      m.gate_up + l * 2 * kInner * kWidth, 2 * kInner, rows);
      if (lora)
        change(both, r.middle, kWidth, m.norm_gate_up + l * kWidth,
               m.a_gate_up + l * 2 * kRank * kWidth, 2, false, m.b_gate_up + l * 2 * kInner * kRank,
               2 * kInner, rows, [](int column) { return column / kInner; });
      scale(both, r.middle, 2 * kInner, rows);
      r.inner.assign(int64_t{rows} * kInner, 0);
      for (int i = 0; i < rows * kInner; ++i) {
        const double* v = &both[int64_t{i / kInner} * 2 * kInner + i % kInner];
        r.inner[i] = rounded(v[0] / (1 + std::exp(-v[0])) * v[kInner]);
      }
      out = run(r.inner, kInner, nullptr, m.down + l * kWidth * kInner, kWidth, rows);
      if (lora)
        change(out, r.inner, kInner, nullptr, m.a_down + l * kInner * kRank, 1, true,
               m.b_down + l * kWidth * kRank, kWidth, rows, one);
      for (size_t i = 0; i < out.size(); ++i) residual[i] += out[i];
      r.residual = all_rounded(residual);
    }
    r.logits = run(r.residual, kWidth, m.norm_head, m.head, kVocabulary, rows);
    scale(r.logits, r.residual, kVocabulary, rows);
    return r;
  }

 private:
  std::vector<double> run(const std::vector<double>& x, int depth, const bf16* norm, const bf16* a,
                          int columns, int rows, bool turned = false) {
    check(cudaMemcpy(x_, x.data(), x.size() * sizeof(double), cudaMemcpyHostToDevice));
    const dim3 grid(columns, rows);
    if (turned)
      product<true><<<grid, 32>>>(x_, norm, a, y_, depth, columns);
    else
      product<false><<<grid, 32>>>(x_, norm, a, y_, depth, columns);
    std::vector<double> y(int64_t{rows} * columns);
    check(cudaMemcpy(y.data(), y_, y.size() * sizeof(double), cudaMemcpyDeviceToHost));
    return y;
  }
  void change(std::vector<double>& y, const std::vector<double>& x, int depth, const bf16* norm,
              const bf16* a, int adapters, bool turned, const bf16* b, int columns, int rows,
              const std::function<int(int)>& adapter) {
    const auto low = run(x, depth, norm, a, adapters * kRank, rows, turned);
    std::vector<bf16> factor(int64_t{columns} * kRank);
    check(cudaMemcpy(factor.data(), b, factor.size() * 2, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < int64_t{rows} * columns; ++i) {
      const int64_t column = i % columns, row = i / columns;
      const double* lows = &low[(row * adapters + adapter(static_cast<int>(column))) * kRank];
      for (int k = 0; k < kRank; ++k)
        y[i] += lows[k] * static_cast<double>(__bfloat162float(factor[column * kRank + k]));
    }
  }
  static void scale(std::vector<double>& y, const std::vector<double>& x, int columns, int rows) {
    for (int row = 0; row < rows; ++row) {
      double squares = 0;
      for (int i = 0; i < kWidth; ++i) squares += x[row * kWidth + i] * x[row * kWidth + i];
      const double factor = 1 / std::sqrt(squares / kWidth + 1e-6);
      for (int i = 0; i < columns; ++i) y[int64_t{row} * columns + i] *= factor;
    }
  }

  double *x_, *y_;
};

}  // namespace heddle::step_probe
