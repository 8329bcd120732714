#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/layout_report.h"

namespace heddle::plan {

/// A layout that was considered, as a run would be given it.
struct Proposal {
  std::vector<std::string> settings;  ///< "parallel.tp=2", ..., "train.recompute=full"
  StepTime time;
  double tokens_per_s = 0;
  double mfu = 0;         ///< Share of all GPUs' peak, as training reports it.
  double peak_bytes = 0;  ///< Bytes of the fullest rank.
  bool has_eight_bit_experts = false;
};

struct Search {
  std::int64_t considered = 0;     ///< Layouts that a run would accept.
  std::vector<Proposal> best;      ///< That fit, the fastest first.
  std::vector<Proposal> smallest;  ///< One, if none fits: that which lacks least.
  /// If none fits: the fastest that fits with further settings (optim.offload, LoRA, ...), one for
  /// each set of them that is enough.
  std::vector<Proposal> otherwise;
  std::string refusal;  ///< A run's words to the first layout that it would not accept.
};

/// Tries the divisions of `world` ranks over tp (inside a host), cp, fsdp, dp, pp and ep with each
/// recomputation, and keeps the `count` fastest that fit the memory. What the user set of these
/// (origins) is kept, and so is what the configuration says about everything else, such as
/// train.global_batch_size. Throws ConfigError where no layout keeps what is set.
Search search_layouts(const config::RunConfig& config, const models::Config& model,
                      std::int64_t world, const Hardware& hardware, std::size_t count);

}  // namespace heddle::plan
