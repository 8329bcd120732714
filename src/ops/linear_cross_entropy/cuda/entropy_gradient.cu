#include "ops/linear_cross_entropy/cuda/entropy_gradient.h"

#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 512;

/// A row a CTA.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    entropy_gradient_kernel(int64_t vocabulary, void* all, EntropyGradientRows rows) {
  const int64_t row = blockIdx.x, label = rows.labels[row];
  T* const logits = static_cast<T*>(all) + row * vocabulary;
  // A label beyond the vocabulary has the log-probability NaN, which the row becomes.
  float logit[1];
  read(logits + (label < vocabulary ? label : 0), logit);
  const float normalizer = logit[0] - rows.logprobs[row], entropy = rows.entropies[row],
              factor = rows.factors[row], by_entropy = rows.entropy_gradients[row];
  __syncthreads();  // that logit is read
  for (int64_t i = threadIdx.x * N; i < vocabulary; i += kThreads * N) {
    float x[N];
    read(logits + i, x);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float log_p = x[n] - normalizer, p = __expf(log_p);
      // Where p is 0 its product with log p is.
      const float bend = p > 0 ? p * (log_p + entropy) : 0.f;
      x[n] = factor * (p - (i + n == label ? 1.f : 0.f)) - by_entropy * bend;
    }
    write(logits + i, x);
  }
}

}  // namespace

void entropy_gradient(const SoftmaxGradientShape& shape, void* logits,
                      const EntropyGradientRows& rows, cudaStream_t stream) {
  if (shape.rows == 0 || shape.vocabulary == 0) return;
  const bool wide =
      aligned(InputRows{logits, shape.vocabulary, 0}, shape.type, shape.vocabulary, 16);
  dispatch_access(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    entropy_gradient_kernel<T, N><<<static_cast<unsigned>(shape.rows), kThreads, 0, stream>>>(
        shape.vocabulary, logits, rows);
  });
  check_launch("entropy_gradient");
}

}  // namespace heddle::ops::cuda
