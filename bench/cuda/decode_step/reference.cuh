// The step again, operator by operator in double, for comparison. Vectors are rounded to bf16 where
// the kernel hands them on.
#pragma once

#include "adapters.cuh"

namespace heddle::bench_cuda {

static __device__ double d(bf16 x) { return static_cast<double>(__bfloat162float(x)); }
static __device__ double rounded(double x) { return d(__float2bfloat16(static_cast<float>(x))); }
static __device__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }
/// The sum over a CTA of up to 256 threads.
static __device__ double total(double x) {
  __shared__ double parts[8];
  for (int n = 16; n; n /= 2) x += __shfl_xor_sync(~0u, x, n);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += parts[w];
  return sum;
}

/// y[row, first + column] = sum of x over the depth, RMS-normalised if there is `norm`, times a.
static __global__ void product(const double* x, const bf16* norm, float offset, float eps,
                               const bf16* a, double* y, int depth, int stride, int first) {
  const int column = blockIdx.x, row = blockIdx.y;
  double sum = 0, squares = 0;
  for (int k = threadIdx.x; k < depth; k += 32) {
    const double v = x[int64_t{row} * depth + k];
    squares += v * v;
    sum += v * (norm ? static_cast<double>(offset) + d(norm[k]) : 1.) *
           d(a[int64_t{column} * depth + k]);
  }
  for (int n = 16; n; n /= 2) {
    sum += __shfl_xor_sync(~0u, sum, n);
    squares += __shfl_xor_sync(~0u, squares, n);
  }
  if (norm) sum *= rsqrt(squares / depth + static_cast<double>(eps));
  if (threadIdx.x == 0) y[int64_t{row} * stride + first + column] = sum;
}

/// Columns of a row's y get what its factors add, in one CTA.
static __global__ void add_change(const double* x, const bf16* norm, float offset, float eps,
                                  SlotFactors f, double* y, int depth, int columns) {
  __shared__ double low[64];
  double squares = 0;
  for (int k = threadIdx.x; k < depth; k += 256) squares += x[k] * x[k];
  squares = total(squares);
  for (int rank = 0; rank < f.rank; ++rank) {
    double sum = 0;
    for (int k = threadIdx.x; k < depth; k += 256)
      sum += x[k] * (norm ? static_cast<double>(offset) + d(norm[k]) : 1.) *
             d(static_cast<const bf16*>(f.a)[rank * depth + k]);
    sum = total(sum);
    if (norm) sum *= rsqrt(squares / depth + static_cast<double>(eps));
    if (threadIdx.x == 0) low[rank] = sum * static_cast<double>(f.scale);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += 256) {
    double sum = 0;
    for (int rank = 0; rank < f.rank; ++rank)
      sum += low[rank] * d(static_cast<const bf16*>(f.b)[int64_t{column} * f.rank + rank]);
    y[column] += sum;
  }
}

/// x += y, and x rounded; y may be null.
static __global__ void add(double* x, const double* y, double* x_rounded, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  if (y) x[i] += y[i];
  x_rounded[i] = rounded(x[i]);
}
static __global__ void swiglu(const double* both, double* inner) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), row = i / kInner;
  const double gate = both[int64_t{row} * 2 * kInner + i % kInner];
  inner[i] = rounded(gate * sigmoid(gate) * both[int64_t{row} * 2 * kInner + kInner + i % kInner]);
}

/// A head of a row; a thread a column of 128. `inputs` are rounded by it.
static __global__ void delta_net(DecodeStepLayer layer, const double* inputs, const int64_t* slots,
                                 bf16* conv_states, double* states, float eps, double* mixed) {
  const int head = blockIdx.x, row = blockIdx.y, c = threadIdx.x;
  const double* const in = inputs + int64_t{row} * (4 * kMixer + 32);
  const auto* const conv = static_cast<const bf16*>(layer.conv);
  __shared__ double q[128], k[128];
  double y[3];
  for (int part = 0; part < 3; ++part) {
    const int channel = part * kMixer + head * 128 + c;
    bf16* const history = conv_states + (slots[row] * kChannels + channel) * 3;
    const double now = rounded(in[channel]);
    double sum = d(conv[4 * channel + 3]) * now;
    for (int i = 0; i < 3; ++i) sum += d(conv[4 * channel + i]) * d(history[i]);
    history[0] = history[1], history[1] = history[2];
    history[2] = __float2bfloat16(static_cast<float>(now));
    y[part] = sum * sigmoid(sum);
  }
  const double q_norm = rsqrt(total(y[0] * y[0]) + 1e-6) / sqrt(128.),
               k_norm = rsqrt(total(y[1] * y[1]) + 1e-6);
  q[c] = y[0] * q_norm, k[c] = y[1] * k_norm;
  __syncthreads();
  const double a = rounded(in[4 * kMixer + 16 + head]) + static_cast<double>(layer.dt_bias[head]);
  const double decay = exp(-exp(static_cast<double>(layer.a_log[head])) * log1p(exp(a)));
  const double beta = sigmoid(rounded(in[4 * kMixer + head]));
  double* const state = states + (slots[row] * 16 + head) * 128 * 128 + c;
  double ks = 0, o = 0;
  for (int i = 0; i < 128; ++i) ks += k[i] * decay * state[i * 128];
  for (int i = 0; i < 128; ++i) {
    state[i * 128] = decay * state[i * 128] + k[i] * beta * (y[2] - ks);
    o += q[i] * state[i * 128];
  }
  const double rstd = rsqrt(total(o * o) / 128 + static_cast<double>(eps));
  const double z = rounded(in[kChannels + head * 128 + c]);
  mixed[int64_t{row} * kMixer + head * 128 + c] =
      rounded(o * rstd * d(static_cast<const bf16*>(layer.norm)[c]) * z * sigmoid(z));
}

/// x normalised and rotated; a thread a number of the head's 256.
static __device__ double normed_and_turned(double x, const void* weight, const DecodeStepRows& rows,
                                           int64_t position, float offset, float eps) {
  const int i = threadIdx.x, half = Shape::kRotaryDim / 2;
  __shared__ double all[256];
  x *= rsqrt(total(x * x) / 256 + static_cast<double>(eps)) *
       (static_cast<double>(offset) + d(static_cast<const bf16*>(weight)[i]));
  all[i] = x;
  __syncthreads();
  if (i < 2 * half) {
    const double c = rows.cos[position * half + i % half], s = rows.sin[position * half + i % half];
    x = x * c + (i < half ? -s * all[i + half] : s * all[i - half]);
  }
  __syncthreads();
  return rounded(x);
}

/// A query head of a row, of the head's 256 numbers a thread each. The first query head of a key
/// head writes the new key and value.
static __global__ void attention(DecodeStepLayer layer, const double* inputs, DecodeStepRows rows,
                                 bf16* keys, bf16* values, float offset, float eps, double* mixed) {
  const int head = blockIdx.x, row = blockIdx.y, c = threadIdx.x, key_head = head / 4;
  const double* const in = inputs + int64_t{row} * (2 * kMixer + 2 * kKeys);
  const int64_t before = rows.lengths[row];
  const double q =
      normed_and_turned(rounded(in[head * 512 + c]), layer.q_norm, rows, before, offset, eps);
  const double key = normed_and_turned(rounded(in[2 * kMixer + key_head * 256 + c]), layer.k_norm,
                                       rows, before, offset, eps);
  const double value = rounded(in[2 * kMixer + kKeys + key_head * 256 + c]);
  const auto place = [&](int64_t token) {
    const int64_t page = rows.pages[row * rows.table_pages + token / kPageTokens];
    return ((page * kPageTokens + token % kPageTokens) * 2 + key_head) * 256 + c;
  };
  double most = -1e300, sum = 0, o = 0;
  for (int64_t token = 0; token <= before; ++token) {
    const bool is_new = token == before;
    const double score = total(q * (is_new ? key : d(keys[place(token)]))) / 16;
    const double next = fmax(most, score), kept = exp(most - next), weight = exp(score - next);
    most = next;
    sum = sum * kept + weight;
    o = o * kept + weight * (is_new ? value : d(values[place(token)]));
  }
  if (head % 4 == 0) {
    keys[place(before)] = __float2bfloat16(static_cast<float>(key));
    values[place(before)] = __float2bfloat16(static_cast<float>(value));
  }
  mixed[int64_t{row} * kMixer + head * 256 + c] =
      rounded(o / sum * sigmoid(rounded(in[head * 512 + 256 + c])));
}

static __global__ void widen(const float* from, double* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    to[i] = static_cast<double>(from[i]);
}

/// Caches of its own, those of the model when it is made.
class Reference {
 public:
  Reference(const DecodeStepModel& model, const CacheSizes& sizes,
            const Adapters* adapters = nullptr)
      : model_(model), adapters_(adapters) {
    for (int l = 0; l < model.layers; ++l) {
      const DecodeStepLayer& layer = model.layer[l];
      const auto copy = [](const void* from, int64_t count) {
        bf16* const to = allocate<bf16>(count);
        check(cudaMemcpy(to, from, static_cast<size_t>(count) * 2, cudaMemcpyDeviceToDevice));
        return to;
      };
      if (layer.is_attention) {
        first.push_back(copy(layer.keys, sizes.keys()));
        second.push_back(copy(layer.values, sizes.keys()));
        states.push_back(nullptr);
      } else {
        first.push_back(copy(layer.conv_states, sizes.conv()));
        second.push_back(nullptr);
        states.push_back(allocate<double>(sizes.states()));
        widen<<<1024, 256>>>(layer.states, states.back(), sizes.states());
      }
    }
    const int64_t rows = Shape::kMostRows;
    residual_ = allocate<double>(rows * kWidth), x_ = allocate<double>(rows * kInner);
    y_ = allocate<double>(rows * 4 * kMixer + rows * 32);
    logits = allocate<double>(rows * model.vocabulary);
  }
  ~Reference() {
    for (auto* v : first) cudaFree(v);
    for (auto* v : second) cudaFree(v);
    for (auto* v : states) cudaFree(v);
    for (auto* v : {residual_, x_, y_, logits}) cudaFree(v);
  }

  void step(const DecodeStepRows& rows) {
    const unsigned n = static_cast<unsigned>(rows.rows);
    const auto run = [&](const void* norm, const void* a, double* y, int columns, int depth,
                         int stride, int start) {
      product<<<dim3(static_cast<unsigned>(columns), n), 32>>>(
          x_, static_cast<const bf16*>(norm), model_.norm_offset, model_.eps,
          static_cast<const bf16*>(a), y, depth, stride, start);
    };
    const auto change = [&](int l, int matrix, const void* norm, int stride, int start) {
      for (int row = 0; adapters_ != nullptr && row < rows.rows; ++row) {
        const SlotFactors f = adapters_->of(l, matrix, row);
        const auto [columns, depth] = shape_of(model_.layer[l], matrix);
        if (f.rank > 0)
          add_change<<<1, 256>>>(x_ + int64_t{row} * depth, static_cast<const bf16*>(norm),
                                 model_.norm_offset, model_.eps, f,
                                 y_ + int64_t{row} * stride + start, depth, columns);
      }
    };
    const int width = rows.rows * kWidth;
    const auto onto_residual = [&] {
      add<<<static_cast<unsigned>((width + 255) / 256), 256>>>(residual_, y_, x_, width);
    };
    std::vector<int64_t> tokens(n);
    check(cudaMemcpy(tokens.data(), rows.tokens, tokens.size() * 8, cudaMemcpyDeviceToHost));
    std::vector<bf16> hidden(static_cast<size_t>(width));
    for (size_t row = 0; row < tokens.size(); ++row) {
      check(cudaMemcpy(hidden.data() + row * kWidth,
                       static_cast<const bf16*>(model_.embedding) + tokens[row] * kWidth,
                       kWidth * sizeof(bf16), cudaMemcpyDeviceToHost));
    }
    std::vector<double> wide;
    for (const bf16 v : hidden) wide.push_back(static_cast<double>(__bfloat162float(v)));
    check(cudaMemcpy(residual_, wide.data(), wide.size() * 8, cudaMemcpyHostToDevice));
    check(cudaMemcpy(x_, wide.data(), wide.size() * 8, cudaMemcpyHostToDevice));
    for (int l = 0; l < model_.layers; ++l) {
      const DecodeStepLayer& layer = model_.layer[l];
      const size_t i = static_cast<size_t>(l);
      if (layer.is_attention) {
        const int columns[3] = {2 * kMixer, kKeys, kKeys}, all = 2 * kMixer + 2 * kKeys;
        for (int p = 0, start = 0; p < 3; start += columns[p++])
          run(layer.norm_mixer, layer.inputs[p], y_, columns[p], kWidth, all, start);
        for (int p = 0, start = 0; p < 3; start += columns[p++])
          change(l, p, layer.norm_mixer, all, start);
        attention<<<dim3(8, n), 256>>>(layer, y_, rows, first[i], second[i], model_.norm_offset,
                                       model_.eps, x_);
      } else {
        const int columns[4] = {kChannels, kMixer, 16, 16}, all = 4 * kMixer + 32;
        for (int p = 0, start = 0; p < 4; start += columns[p++])
          run(layer.norm_mixer, layer.inputs[p], y_, columns[p], kWidth, all, start);
        for (int p = 0, start = 0; p < 4; start += columns[p++])
          change(l, p, layer.norm_mixer, all, start);
        delta_net<<<dim3(16, n), 128>>>(layer, y_, rows.slots, first[i], states[i], model_.eps, x_);
      }
      run(nullptr, layer.out, y_, kWidth, kMixer, kWidth, 0);
      change(l, 4, nullptr, kWidth, 0);
      onto_residual();
      run(layer.norm_mlp, layer.gate, y_, kInner, kWidth, 2 * kInner, 0);
      run(layer.norm_mlp, layer.up, y_, kInner, kWidth, 2 * kInner, kInner);
      change(l, 5, layer.norm_mlp, 2 * kInner, 0);
      change(l, 6, layer.norm_mlp, 2 * kInner, kInner);
      swiglu<<<static_cast<unsigned>(rows.rows * kInner / 256), 256>>>(y_, x_);
      run(nullptr, layer.down, y_, kWidth, kInner, kWidth, 0);
      change(l, 7, nullptr, kWidth, 0);
      onto_residual();
    }
    run(model_.norm, model_.head, logits, model_.vocabulary, kWidth, model_.vocabulary, 0);
    check(cudaGetLastError());
  }

  std::vector<bf16*> first, second;  ///< By layer: inputs of the convolution, or keys; values.
  std::vector<double*> states;
  double* logits;

 private:
  const DecodeStepModel& model_;
  const Adapters* adapters_;
  double *residual_, *x_, *y_;
};

}  // namespace heddle::bench_cuda
