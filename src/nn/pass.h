#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/group.h"
#include "nn/adapters.h"
#include "nn/cache.h"
#include "ops/registry.h"
#include "ops/sequences.h"

namespace heddle::ops {
struct ContextParallel;
}

namespace heddle::nn {

struct RowAdapters;

/// How many of the experts that routers are given (router replay) they would have chosen
/// themselves.
struct RouterAgreement {
  at::Tensor counted;  ///< [T/tp] int64: 1 for rows that count, else 0.
  at::Tensor agreed;   ///< 0-d int64: sum over routers, counted rows and their experts.
};

/// One forward pass over packed sequences: what every block is given besides its hidden states.
struct Pass {
  const ops::KernelTable* kernels = nullptr;
  ops::Sequences sequences;
  at::Tensor cos, sin;  ///< [T, rotary/2] of all rows, see ops::rotary_tables.
  /// The earlier tokens of the sequences, which the pass attends to and appends its own to; null if
  /// the sequences begin with the pass and nothing is kept of them. Without gradients.
  std::shared_ptr<const CachedSequences> cached;
  /// Of all T rows, in order; empty: the base model.
  std::vector<AdaptedRows> adapters;
  /// In their place, for a pass that is recorded, tables on the device say which set each row has.
  /// They outlive the pass. Null: none.
  const RowAdapters* row_adapters = nullptr;
  /// The ranks that share each block's heads and widths, and outside of them the rows of hidden
  /// states, T/tp each in order; null if this rank has all.
  const comm::Group* tensor_group = nullptr;
  /// The ranks that share the batch's tokens, whose fragments here `sequences` are; null if this
  /// rank has all.
  std::shared_ptr<const ops::ContextParallel> context;
  std::int64_t real_tokens = 0;  ///< Tokens before the dummy tail.
  bool training = false;         ///< Dropout and auxiliary losses are on.
  /// Results of elementwise operators and norms that only feed a product are not kept for its
  /// backward but made again there.
  bool recompute_elementwise = false;
  /// Only the gradients of the stage are wanted: what makes its output and nothing else may be left
  /// out.
  bool output_unused = false;
  /// The ranks that share the routed experts; null if this rank has all.
  const comm::Group* expert_group = nullptr;
  /// [T/tp,k]: the experts of each token of this rank's rows, which the router takes instead of its
  /// top k (router replay).
  at::Tensor experts;
  /// If set, routers that are given their experts add to it.
  RouterAgreement* agreement = nullptr;
  /// Auxiliary losses pool all layers: blocks hand out their load instead of a loss.
  bool pooled_auxiliary_loss = false;
};

}  // namespace heddle::nn
