#pragma once

#include <cstdint>
#include <vector>

#include "config/run_config.h"
#include "data/loader/loader.h"
#include "objective/policy.h"
#include "rl/group.h"
#include "rl/prompts.h"
#include "train/scorer.h"

namespace heddle::rl {

/// Rows of an optimizer step: prompt and completion of every trajectory of its groups, in their
/// order.
class Experience {
 public:
  /// `expert_width`: experts that a token of the trajectories names, see rollout::expert_width; 0:
  /// the trainer's routers choose. Throws InternalError for a trajectory that lacks some.
  Experience(const config::RunConfig& config, const Prompts& prompts,
             const std::vector<Group>& groups, std::int64_t expert_width = 0);

  /// [rows][tokens] log-probabilities by the reference of each token given those before it; entry 0
  /// of a row is not read.
  void set_reference(const std::vector<train::RowScore>& scores);
  /// Prompt and completion [rows][tokens].
  const std::vector<std::vector<std::int32_t>>& tokens() const { return tokens_; }

  /// Rows for the objective, once the reference is set if there is one.
  std::vector<objective::PolicyRow> policy_rows() const;
  /// Micro-batches of one data rank: rows packed into at most micro_batch_tokens, as many on every
  /// rank. `step` counts from 0.
  data::Step step(std::int64_t step, std::int64_t rank, std::int64_t ranks) const;

  /// Rewards [rows] that advantages are made of: with penalties, and permuted if asked for.
  std::vector<double> rewards() const;

 private:
  struct Row {
    const Trajectory* trajectory;
    std::size_t group;
    std::int64_t prompt;  ///< Its tokens.
  };
  void require_experts(const Group& group, std::int64_t prompt) const;
  /// Those of the rows of a micro-batch, see data::Batch.
  at::Tensor experts_of(const std::vector<std::size_t>& rows) const;
  std::int64_t length(std::size_t row) const { return std::ssize(tokens_[row]); }
  bool is_masked(const Trajectory& trajectory) const;
  double penalty_of(const Trajectory& trajectory) const;
  /// k1 of completion token t against the reference.
  double k1(std::size_t row, std::size_t t) const;
  bool puts_kl_in_reward() const;
  /// [rows][completion tokens].
  std::vector<std::vector<double>> advantages() const;
  std::vector<std::vector<double>> returns(const std::vector<double>& rewards) const;

  const config::RunConfig& config_;
  std::int64_t first_cursor_, expert_width_;
  std::vector<Row> rows_;
  std::vector<std::vector<std::int32_t>> tokens_, labels_;
  std::vector<std::vector<float>> weights_;
  std::vector<std::vector<double>> reference_;
};

}  // namespace heddle::rl
