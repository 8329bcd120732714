#pragma once

#include "nn/block.h"
#include "nn/linear.h"
#include "ops/collectives.h"

/// The two ends of a part of a block that the ranks along tp share: a projection whose rows are
/// divided, and behind it one whose columns are. "Megatron-LM" (arXiv 1909.08053), section 3.
namespace heddle::nn {

/// The same hidden states on every rank; their gradient is the sum of what the ranks send back.
inline LinearInput enter_tensor_parallel(const LinearInput& x, const BlockInputs& inputs) {
  if (inputs.tensor_group == nullptr) return x;
  return {ops::copy_to_group(x.value, *inputs.tensor_group), x.again};
}

/// The sum of the ranks' partial products.
inline at::Tensor leave_tensor_parallel(const at::Tensor& y, const BlockInputs& inputs) {
  return inputs.tensor_group == nullptr ? y : ops::reduce_from_group(y, *inputs.tensor_group);
}

/// This rank's rows of what all ranks along tp have: routed experts, which are not divided along
/// tp, take each token from one rank alone. "Sequence parallelism" (arXiv 2205.05198).
inline at::Tensor enter_sequence_parallel(const at::Tensor& x, const BlockInputs& inputs) {
  return inputs.tensor_group == nullptr ? x : ops::split_rows(x, *inputs.tensor_group);
}

/// All `rows` rows again.
inline at::Tensor leave_sequence_parallel(const at::Tensor& y, std::int64_t rows,
                                          const BlockInputs& inputs) {
  return inputs.tensor_group == nullptr ? y : ops::join_rows(y, rows, *inputs.tensor_group);
}

}  // namespace heddle::nn
