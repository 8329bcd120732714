#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/config.h"
#include "ops/registry.h"

namespace heddle::bench {

/// One thing that is timed, with the least it must compute and move: each input read once, each
/// output written once.
struct OperatorCall {
  std::string name;  ///< "forward", "backward", "forward, library"
  std::function<void()> run;
  double flops = 0, bytes = 0;
};

/// One operator at one shape; holds its tensors.
struct OperatorCase {
  std::string name;    ///< "16/32 heads, 4 x 8192"
  std::string kernel;  ///< Name of the kernel that the registry chose.
  std::vector<OperatorCall> calls;
};
/// Makes a case when it is its turn: the tensors of all do not fit together.
using CaseMaker = std::function<OperatorCase()>;

struct OperatorPlace {
  c10::Device device;
  c10::ScalarType dtype;
  ops::KernelPolicy policy;
};

/// Shape of a batch: `batch` sequences of `length` tokens or, with a median, as many tokens
/// in sequences whose lengths have a lognormal distribution (sigma 1) of that median.
struct OperatorTokens {
  std::int64_t batch = 1, length = 2048, median = 0;

  std::int64_t total() const { return batch * length; }
  /// Cumulative; one of many draws of the lengths.
  std::vector<std::int32_t> boundaries(std::uint64_t draw = 0) const;
  std::string describe() const;
};

struct DeltaHeads {
  std::int64_t keys, values, dim = 128;
};
/// The heads of a preset. Throws ConfigError if it has no Gated DeltaNet.
DeltaHeads delta_heads(const models::Config& config);
/// Some of the published shapes; of both empty: all.
struct DeltaSelection {
  std::vector<DeltaHeads> heads;
  std::vector<std::string> layouts;  ///< Lengths of sequences: "4 x 8192", "28672+4096".
};
/// The gated delta rule at the head counts and lengths for which other kernels' times are published
/// (bench/cuda/published.tsv). Throws ConfigError for heads or a layout that are not among them.
std::vector<CaseMaker> published_gated_delta_rule_cases(const OperatorPlace& place,
                                                        const DeltaSelection& selection);
/// At the heads of one model.
std::vector<CaseMaker> gated_delta_rule_cases(const OperatorPlace& place,
                                              const models::Config& config,
                                              const OperatorTokens& tokens);
/// The products of a model's layers, layers that share an input side by side: by the library one
/// by one, and as training makes them.
std::vector<CaseMaker> product_cases(const OperatorPlace& place, const models::Config& config,
                                     const OperatorTokens& tokens);
/// The products of a model's layers with a low-rank adapter on each: as training makes them.
std::vector<CaseMaker> adapter_cases(const OperatorPlace& place, const models::Config& config,
                                     const OperatorTokens& tokens, std::int64_t rank);
/// One AdamW step over the matrices of a layer of each kind and the embedding, for each kind of
/// optimizer state that the type of the parameters can have. The tokens do not matter.
std::vector<CaseMaker> adamw_cases(const OperatorPlace& place, const models::Config& config,
                                   const OperatorTokens& tokens);
std::vector<CaseMaker> attention_cases(const OperatorPlace& place, const models::Config& config,
                                       const OperatorTokens& tokens);
/// Loss and both gradients of the language-model head.
std::vector<CaseMaker> head_cases(const OperatorPlace& place, const models::Config& config,
                                  const OperatorTokens& tokens);
/// One layer's routed experts, in the form of `kernels.frozen_experts`; its share of a roofline is
/// that of products in the place's type. Throws ConfigError for a model without any.
std::vector<CaseMaker> expert_cases(const OperatorPlace& place, const models::Config& config,
                                    const OperatorTokens& tokens);

/// Relative L2 errors against double of the gated delta rule's output and gradients ("o", "dq",
/// ..., "dS0" of the initial state).
struct DeltaErrors {
  std::string data;  ///< One of the data kinds of docs/gdn.md, "Numerics".
  std::string kernel;
  std::vector<std::pair<std::string, double>> of;
};

/// Errors for every data kind over one sequence of `length` tokens with an initial state. Double:
/// the reference on the same device (on the CPU where the device has no double), one key head at a
/// time; first it is compared with the recurrence over a short sequence. Throws Error if they
/// differ.
std::vector<DeltaErrors> gated_delta_rule_errors(const OperatorPlace& place,
                                                 const DeltaHeads& heads, std::int64_t length);

}  // namespace heddle::bench
