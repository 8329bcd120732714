#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "config/run_config.h"
#include "data/loader/loader.h"
#include "objective/advantages.h"
#include "objective/policy.h"
#include "objective/support_table.h"
#include "objective/value.h"
#include "rl/group.h"
#include "rl/prompts.h"
#include "rl/turns.h"
#include "train/scorer.h"

namespace heddle::rl {

/// Rows of a batch: prompt and completion of every trajectory of its groups, in their order. A
/// trajectory that forked has a row for each of its strands, all with its reward; a completion
/// below is what a row has of it.
class Experience {
 public:
  /// `expert_width`: experts that a token of the trajectories names, see rollout::expert_width; 0:
  /// the trainer's routers choose. Throws InternalError for a trajectory that lacks some.
  Experience(const config::RunConfig& config, const Prompts& prompts,
             const std::vector<Group>& groups, std::int64_t expert_width = 0);

  /// [rows][tokens] log-probabilities by the reference of each token given those before it; entry 0
  /// of a row is not read.
  void set_reference(const std::vector<train::RowScore>& scores);
  /// [rows][tokens] log-probabilities by the weights before the batch's first step, as the
  /// reference's: the anchor of the ratio in place of the weights before each step.
  void set_anchor(const std::vector<train::RowScore>& scores);
  /// [rows] experts [tokens, expert width] int16 that the weights before the batch's first step
  /// chose; updates take them.
  void set_experts(std::vector<at::Tensor> experts) { experts_ = std::move(experts); }
  /// By row the experts that updates take, as above; empty if the trainer's routers choose.
  std::vector<at::Tensor> experts() const;
  /// By row the supports of its labels, the token after each; empty without cuts.
  std::vector<objective::Supports> supports() const;
  /// Finds, once the anchor is set, what options.rejection leaves out and the mean of the
  /// importance weights. What is left out takes part in no step from now on.
  void correct(const objective::PolicyOptions& options);
  /// Mean over the batch of the importance weights of tokens, or of sequences with one, rejected or
  /// not; 1 before correct().
  double mean_weight() const { return mean_weight_; }
  /// Tokens of the rows of a part that correct() left out.
  std::int64_t dropped_tokens(std::int64_t part) const;
  /// Tokens of the rows of a part whose experts generation did not tell.
  std::int64_t unread_tokens(std::int64_t part) const;
  /// [rows][tokens] values by the critic at each token with a label, of what follows it; advantage
  /// gae needs them.
  void set_values(std::vector<std::vector<double>> values) { values_ = std::move(values); }
  /// Prompt and completion [rows][tokens].
  const std::vector<std::vector<std::int32_t>>& tokens() const { return tokens_; }

  /// Rows for the objective, once reference and values are set if there are any. They train the
  /// weights of `version`, which tells how old tokens are (mode async).
  std::vector<objective::PolicyRow> policy_rows(std::int64_t version) const;
  /// Rows for the critic, once values are set.
  std::vector<objective::ValueRow> value_rows() const;
  /// 1 - Var(R - V) / Var(R) over the tokens with a label, of returns R and values V; 0 where all
  /// returns are equal.
  double explained_variance() const;
  /// Optimizer steps of one pass over the batch: rl.sync_every, fewer where groups_per_step fills
  /// fewer.
  std::int64_t parts() const;
  /// The groups [first, last) of a part, which are as many as in any other or one more.
  std::pair<std::int64_t, std::int64_t> groups_of(std::int64_t part) const;
  /// Micro-batches of one data rank of the rows of a part, without one of all: rows packed into at
  /// most micro_batch_tokens, as many on every rank. `step` counts from 0.
  data::Step step(std::int64_t step, std::int64_t rank, std::int64_t ranks,
                  std::optional<std::int64_t> part = {}) const;

  /// Rewards [rows] that advantages are made of: with penalties, and permuted if asked for.
  std::vector<double> rewards() const;

 private:
  struct Row {
    const Trajectory* trajectory;
    std::size_t group;
    Strand strand;
    std::int64_t prompt;  ///< Its tokens.
    /// Column of the trajectory's tokens, as far as the row has them.
    template <class Entry>
    std::span<const Entry> of(const std::vector<Entry>& column) const {
      if (column.empty()) return {};
      return std::span(column).subspan(static_cast<std::size_t>(strand.first),
                                       static_cast<std::size_t>(size()));
    }
    std::int64_t size() const { return strand.last - strand.first; }
    bool is_sampled(std::size_t token) const {
      return trajectory->is_sampled(static_cast<std::size_t>(strand.first) + token);
    }
    bool begins() const { return strand.first == 0; }
  };
  /// Sum over the rows of a part.
  std::int64_t sum_of_rows(std::int64_t part,
                           const std::function<std::int64_t(std::size_t)>& of) const;
  bool has_experts() const { return expert_width_ > 0 || !experts_.empty(); }
  at::Tensor experts_of(std::size_t row) const;
  void add_row(const Row& row);
  void require_experts(const std::vector<Group>& groups) const;
  std::int64_t length(std::size_t row) const { return std::ssize(tokens_[row]); }
  bool is_masked(const Trajectory& trajectory) const;
  double penalty_of(const Trajectory& trajectory) const;
  /// k1 of completion token t against the reference.
  double k1(std::size_t row, std::size_t t) const;
  bool puts_kl_in_reward() const;
  /// Numbers of trajectories, given to each of their rows.
  std::vector<double> of_rows(const std::vector<double>& of_trajectories) const;
  /// [trajectories] by the rewards of their groups.
  std::vector<double> trajectory_advantages(objective::Advantage kind) const;
  /// [rows][completion tokens].
  std::vector<std::vector<double>> advantages() const;
  /// Rewards of each token: its share of the KL, and the reward at the last.
  std::vector<std::vector<double>> token_rewards() const;
  /// [completion tokens] whether the policy drew it.
  std::vector<float> mask(std::size_t row) const;
  /// By advantage gae, before whitening.
  objective::TokenEstimates estimates(std::size_t row, const std::vector<double>& rewards) const;
  /// Scores [completion tokens] of the completion among a row's [tokens].
  std::vector<double> of_completion(std::size_t row, const std::vector<double>& scores) const;
  /// Numbers [completion tokens] at the tokens [tokens] whose labels those are, 0 elsewhere.
  template <class Entry>
  std::vector<Entry> at_labels(std::size_t row, std::span<const Entry> of_completion) const;

  const config::RunConfig& config_;
  std::int64_t first_cursor_, groups_, expert_width_;
  std::vector<Row> rows_;
  std::vector<std::vector<std::int32_t>> tokens_, labels_;
  std::vector<std::vector<float>> weights_;
  std::vector<std::vector<double>> reference_, anchor_, values_;
  std::vector<at::Tensor> experts_;    ///< [rows], see set_experts().
  std::vector<std::int64_t> dropped_;  ///< [rows] tokens that correct() left out; empty: none.
  double mean_weight_ = 1;
};

}  // namespace heddle::rl
