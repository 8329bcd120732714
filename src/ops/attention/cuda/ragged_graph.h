#pragma once

#include <compare>
#include <cstdint>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include "ops/attention/cuda/ragged_layout.h"

/// Graphs of cudnn-frontend, whose names stay in one source: libtorch_cuda has another version of
/// it.
namespace heddle::ops::attention_cudnn {

/// The tensors of a graph, by which it is told where they lie.
enum Uid : std::int64_t { kQ, kK, kV, kO, kGradO, kLse, kDq, kDk, kDv, kTable };

inline std::int64_t uid_of(cuda::RaggedRow row) { return kTable + static_cast<std::int64_t>(row); }

/// All that a graph depends on.
struct GraphSizes {
  std::int64_t device, is_backward, keep, is_bfloat16;
  std::int64_t is_deterministic;           ///< The backward adds in one order on every run.
  std::int64_t is_square;                  ///< Every sequence has as many keys as queries.
  std::int64_t batch, q_length, k_length;  ///< Sequences, and the tokens of each at most.
  std::int64_t q_tokens, k_tokens;         ///< Of all sequences at most: sizes the scratch.
  std::int64_t q_heads, k_heads, dim;
  std::int64_t k_strides[2], v_strides[2];  ///< Between tokens, between heads.
  double scale;

  auto operator<=>(const GraphSizes&) const = default;
};

/// Where each tensor of a graph lies.
using Pack = std::unordered_map<std::int64_t, void*>;

/// Runs the graph of these sizes on the current stream; made when first asked for, in about 50 ms
/// (the first of a process in 1.7 s), and kept for this thread. Scratch comes from the allocator of
/// `like`. TORCH_CHECKs that cuDNN has such a plan.
void execute(const GraphSizes& sizes, const Pack& pack, const at::Tensor& like);

}  // namespace heddle::ops::attention_cudnn
