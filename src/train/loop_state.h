#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::train {

/// Numbers of the training loop that a checkpoint keeps besides weights and optimizer state.
struct LoopState {
  static constexpr int kVersion = 1;

  std::int64_t step = 0;             ///< Steps done.
  std::int64_t optimizer_steps = 0;  ///< Updates done, for the corrections of AdamW.
  nlohmann::json cursor;             ///< Place in the data, see data::Loader.
  double first_loss = 0, last_loss = 0;
  std::optional<double> best_eval;   ///< Value of best_metric.
  std::string best_metric = "loss";  ///< See eval.metric.
  std::int64_t evaluations_without_gain = 0;
  std::vector<double> recent_norms;  ///< Norms of gradients, oldest first; only with train.spike.
  std::int64_t skipped_steps = 0;    ///< By train.spike.

  /// Reads what write() wrote. Throws ConfigError, naming `checkpoint`, for the state of a version
  /// that this program does not know, or one that lacks an entry.
  static LoopState read(const nlohmann::ordered_json& state, const std::string& checkpoint);
  /// Adds its entries to the state of a checkpoint.
  void write(nlohmann::ordered_json& state) const;
};

}  // namespace heddle::train
