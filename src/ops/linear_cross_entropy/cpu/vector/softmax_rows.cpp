#include "ops/linear_cross_entropy/cpu/vector/softmax_rows.h"

#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

/// Partial sums this long keep fp32 sums over a large vocabulary exact to a few ulp.
constexpr long kSumBlock = 4096;

template <class C>
void run(C* __restrict logits, long width, long label, const C* factor, const C* by_entropy,
         C* logprob, C* entropy) {
  C largest = logits[0];
#pragma omp simd reduction(max : largest)
  for (long i = 0; i < width; ++i) largest = logits[i] > largest ? logits[i] : largest;
  const C label_logit = logits[label];
  double sum = 0, depth = 0;  // of e^(x - largest), and of that times largest - x
  for (long begin = 0; begin < width; begin += kSumBlock) {
    const long end = begin + kSumBlock < width ? begin + kSumBlock : width;
    C part = 0, part_depth = 0;
    if (factor != nullptr && by_entropy == nullptr) {
#pragma omp simd reduction(+ : part, part_depth)
      for (long i = begin; i < end; ++i) {
        const C below = largest - logits[i], e = exp_of(-below);
        logits[i] = e;
        part += e;
        part_depth += e * below;
      }
    } else {
#pragma omp simd reduction(+ : part, part_depth)
      for (long i = begin; i < end; ++i) {
        const C below = largest - logits[i], e = exp_of(-below);
        part += e;
        part_depth += e * below;
      }
    }
    sum += part;
    depth += part_depth;
  }
  *logprob = static_cast<C>(static_cast<double>(label_logit - largest) - __builtin_log(sum));
  // logsumexp - sum of p x, both relative to the largest: no term is negative.
  *entropy = static_cast<C>(__builtin_log(sum) + depth / sum);
  if (factor == nullptr) return;
  if (by_entropy != nullptr) {
    const C inverse = static_cast<C>(1 / sum), straight = *factor, bend = *by_entropy,
            depth_of_mean = static_cast<C>(depth / sum);
#pragma omp simd
    for (long i = 0; i < width; ++i) {
      const C below = largest - logits[i], p = exp_of(-below) * inverse;
      // log p + entropy: what both have of the sum is gone.
      logits[i] = p * (straight - bend * (depth_of_mean - below));
    }
    logits[label] -= straight;
    return;
  }
  const C scale = static_cast<C>(*factor / sum);
#pragma omp simd
  for (long i = 0; i < width; ++i) logits[i] *= scale;
  logits[label] -= *factor;
}

}  // namespace

SoftmaxRowKernels softmax_row_kernels() { return {run<float>, run<double>}; }

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
