#include "rl/experience.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <span>

#include "base/errors.h"
#include "base/rng.h"
#include "objective/advantages.h"
#include "objective/correction.h"
#include "objective/sequence_sums.h"

namespace heddle::rl {
namespace {

/// Rows laid into micro-batches of at most `most` tokens, the longest rows first, each where it
/// fits first; their number is a multiple of `ranks`.
std::vector<std::vector<std::size_t>> pack(const std::vector<std::int64_t>& lengths,
                                           std::int64_t most, std::int64_t ranks) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>{}, [&](std::size_t row) { return lengths[row]; });
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  // Ranks get equally many; among the fewest bins that hold all, rows go to the emptiest.
  auto bins = static_cast<std::size_t>((total + most - 1) / most);
  while (true) {
    bins = (bins + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks) *
           static_cast<std::size_t>(ranks);
    std::vector<std::vector<std::size_t>> packed(bins);
    std::vector<std::int64_t> used(bins);
    bool fits = true;
    for (const std::size_t row : order) {
      const auto bin = static_cast<std::size_t>(std::ranges::min_element(used) - used.begin());
      used[bin] += lengths[row];
      packed[bin].push_back(row);
      fits = fits && (used[bin] <= most || packed[bin].size() == 1);
    }
    if (fits) return packed;
    ++bins;
  }
}

}  // namespace

Experience::Experience(const config::RunConfig& config, const Prompts& prompts,
                       const std::vector<Group>& groups, std::int64_t expert_width)
    : config_(config),
      first_cursor_(groups.front().cursor),
      groups_(std::ssize(groups)),
      expert_width_(expert_width) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const Trajectory& trajectory : groups[g].trajectories) {
      for (const Strand& strand : strands_of(trajectory, prompts.tokens_of(groups[g])))
        add_row({&trajectory, g, strand, std::ssize(*strand.prompt)});
    }
  }
  if (expert_width > 0) require_experts(groups);
}

void Experience::add_row(const Row& row) {
  const std::vector<std::int32_t>& prompt = *row.strand.prompt;
  const std::span<const std::int32_t> drawn = row.of(row.trajectory->tokens);
  std::vector<std::int32_t>& tokens = tokens_.emplace_back(prompt);
  tokens.insert(tokens.end(), drawn.begin(), drawn.end());
  std::vector<std::int32_t>& labels =
      labels_.emplace_back(tokens.size(), static_cast<std::int32_t>(data::kIgnoredLabel));
  std::vector<float>& weights = weights_.emplace_back(tokens.size());
  for (std::size_t t = prompt.size() - 1; t + 1 < tokens.size(); ++t) {
    if (is_masked(*row.trajectory) || !row.is_sampled(t + 1 - prompt.size())) continue;
    labels[t] = tokens[t + 1];
    weights[t] = 1;
  }
  rows_.push_back(row);
}

void Experience::require_experts(const std::vector<Group>& groups) const {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const std::int64_t count = std::ssize(*rows_[i].strand.experts), found = count / expert_width_,
                       expected = length(i) - 1;
    if (found == expected && count % expert_width_ == 0) continue;
    const Group& group = groups[rows_[i].group];
    throw InternalError(
        fmt::format("group {}, completion {}: experts of {} tokens are known, expected {}: those "
                    "of tokens {} to {} are missing",
                    group.cursor, rows_[i].trajectory - group.trajectories.data(), found, expected,
                    found, expected - 1));
  }
}

at::Tensor Experience::experts_of(std::size_t row) const {
  if (!experts_.empty()) return experts_.at(row);
  const std::vector<std::uint16_t>& experts = *rows_[row].strand.experts;
  at::Tensor table = at::empty({length(row), expert_width_}, at::kShort);
  auto* const numbers = table.mutable_data_ptr<std::int16_t>();
  std::copy(experts.begin(), experts.end(), numbers);
  // Nothing follows from the last token; it takes those of the one before.
  std::copy(experts.end() - expert_width_, experts.end(), numbers + experts.size());
  return table;
}

std::vector<at::Tensor> Experience::experts() const {
  std::vector<at::Tensor> all;
  for (std::size_t row = 0; has_experts() && row < rows_.size(); ++row)
    all.push_back(experts_of(row));
  return all;
}

bool Experience::is_masked(const Trajectory& trajectory) const {
  return config_.rl.overlong == config::Overlong::kMask && trajectory.is_truncated;
}

double Experience::penalty_of(const Trajectory& trajectory) const {
  if (config_.rl.overlong != config::Overlong::kPunish) return 0;
  const auto buffer = static_cast<double>(config_.rl.overlong_buffer);
  const double beyond = static_cast<double>(std::ssize(trajectory.tokens)) -
                        (static_cast<double>(config_.rollout.max_new_tokens) - buffer);
  return std::min(0.0, -beyond / buffer * config_.rl.overlong_penalty);
}

bool Experience::puts_kl_in_reward() const {
  return !reference_.empty() && config_.rl.reference.kl_where == config::KlWhere::kReward;
}

double Experience::k1(std::size_t row, std::size_t t) const {
  if (!rows_[row].is_sampled(t)) return 0;
  const double reference = reference_[row][static_cast<std::size_t>(rows_[row].prompt) + t];
  return std::clamp(rows_[row].of(rows_[row].trajectory->logprobs)[t] - reference, -20.0, 20.0);
}

std::vector<double> Experience::rewards() const {
  std::vector<double> rewards;
  for (const Row& row : rows_) {
    if (row.begins()) rewards.push_back(row.trajectory->reward + penalty_of(*row.trajectory));
  }
  if (config_.rl.reward.shuffle) {
    const CounterRng rng(config_.train.seed, "rewards/" + std::to_string(first_cursor_));
    for (std::size_t i = rewards.size(); i-- > 1;)
      std::swap(rewards[i], rewards[rng.below(i, i + 1)]);
  }
  return of_rows(rewards);
}

std::vector<double> Experience::of_rows(const std::vector<double>& of_trajectories) const {
  std::vector<double> values;
  auto next = of_trajectories.begin();
  for (const Row& row : rows_) values.push_back(row.begins() ? *next++ : values.back());
  return values;
}

void Experience::set_reference(const std::vector<train::RowScore>& scores) {
  reference_.clear();
  for (const train::RowScore& score : scores) reference_.push_back(score.logprobs);
}

void Experience::set_anchor(const std::vector<train::RowScore>& scores) {
  anchor_.clear();
  for (const train::RowScore& score : scores) anchor_.push_back(score.logprobs);
}

void Experience::correct(const objective::PolicyOptions& options) {
  double sum = 0, count = 0;
  dropped_.assign(rows_.size(), 0);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    std::vector<std::size_t> places;  // among the row's tokens, whose labels were drawn
    std::vector<double> log_rho;
    for (std::size_t t = 0; t < tokens_[i].size(); ++t) {
      if (weights_[i][t] == 0) continue;
      const std::size_t drawn = t + 1 - static_cast<std::size_t>(rows_[i].prompt);
      places.push_back(t);
      log_rho.push_back(anchor_.at(i)[t + 1] - rows_[i].of(rows_[i].trajectory->logprobs)[drawn]);
    }
    if (places.empty()) continue;
    const at::Tensor ratios =
        objective::clamp(at::tensor(log_rho, at::kDouble), objective::kLargestLogRatio);
    const auto n = std::ssize(places);
    const objective::SequenceSums one(comm::Group("row"), at::zeros({n}, at::kLong),
                                      at::ones({n}, at::kDouble), 1);
    const at::Tensor weights = objective::importance_weights(ratios, options, &one);
    const bool by_sequence = options.importance == objective::ImportanceWeight::kSequence;
    sum += by_sequence ? weights[0].item<double>() : weights.sum().item<double>();
    count += by_sequence ? 1 : static_cast<double>(n);
    const at::Tensor is_out = objective::is_rejected(
        ratios, at::full({n}, static_cast<double>(n), at::kDouble), options, &one);
    for (std::int64_t k = 0; k < n; ++k) {
      if (!is_out.const_data_ptr<bool>()[k]) continue;
      const std::size_t t = places[static_cast<std::size_t>(k)];
      labels_[i][t] = static_cast<std::int32_t>(data::kIgnoredLabel);
      weights_[i][t] = 0;
      ++dropped_[i];
    }
  }
  // Weights that are almost 0 stay as they are.
  if (sum > 1e-8 * count) mean_weight_ = sum / count;
}

std::int64_t Experience::sum_of_rows(std::int64_t part,
                                     const std::function<std::int64_t(std::size_t)>& of) const {
  const auto [first, last] = groups_of(part);
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const auto group = static_cast<std::int64_t>(rows_[i].group);
    if (group >= first && group < last) sum += of(i);
  }
  return sum;
}

std::int64_t Experience::dropped_tokens(std::int64_t part) const {
  return dropped_.empty() ? 0 : sum_of_rows(part, [&](std::size_t i) { return dropped_[i]; });
}

std::int64_t Experience::unread_tokens(std::int64_t part) const {
  if (expert_width_ == 0) return 0;
  return sum_of_rows(part, [&](std::size_t i) {
    return length(i) - std::ssize(*rows_[i].strand.experts) / expert_width_;
  });
}

std::vector<std::vector<double>> Experience::token_rewards() const {
  const std::vector<double> rewards = this->rewards();
  std::vector<std::vector<double>> all;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    std::vector<double>& of_tokens = all.emplace_back(rows_[i].size());
    if (puts_kl_in_reward()) {
      for (std::size_t t = 0; t < of_tokens.size(); ++t)
        of_tokens[t] = -config_.rl.reference.kl_coef * k1(i, t);
    }
    if (!of_tokens.empty()) of_tokens.back() += rewards[i];
  }
  return all;
}

std::vector<float> Experience::mask(std::size_t row) const {
  std::vector<float> mask;
  for (std::int64_t t = 0; t < rows_[row].size(); ++t)
    mask.push_back(rows_[row].is_sampled(static_cast<std::size_t>(t)) ? 1 : 0);
  return mask;
}

objective::TokenEstimates Experience::estimates(std::size_t row,
                                                const std::vector<double>& rewards) const {
  const auto first = values_.at(row).begin() + static_cast<std::ptrdiff_t>(rows_[row].prompt) - 1;
  return objective::gae(rewards, std::span(first, rewards.size()), mask(row),
                        config_.rl.algorithm.gamma, config_.rl.algorithm.lambda);
}

std::vector<double> Experience::of_completion(std::size_t row,
                                              const std::vector<double>& scores) const {
  return {scores.begin() + static_cast<std::ptrdiff_t>(rows_[row].prompt), scores.end()};
}

template <class Entry>
std::vector<Entry> Experience::at_labels(std::size_t row,
                                         std::span<const Entry> of_completion) const {
  // Completion token t is the label of the token before it.
  std::vector<Entry> values(tokens_[row].size());
  std::ranges::copy(of_completion,
                    values.begin() + static_cast<std::ptrdiff_t>(rows_[row].prompt) - 1);
  return values;
}

std::vector<double> Experience::trajectory_advantages(objective::Advantage kind) const {
  const std::vector<double> of_rows = rewards();
  std::vector<double> rewards, all;
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].begins()) {
      rewards.push_back(of_rows[i]);
      lengths.push_back(rows_[i].trajectory->sampled_tokens());
    }
    for (std::int64_t t = 0; puts_kl_in_reward() && t < rows_[i].size(); ++t)
      rewards.back() -= config_.rl.reference.kl_coef * k1(i, static_cast<std::size_t>(t));
    if (i + 1 < rows_.size() && rows_[i + 1].group == rows_[i].group) continue;
    const std::vector<double> of_group = objective::group_advantages(kind, rewards, lengths);
    all.insert(all.end(), of_group.begin(), of_group.end());
    rewards.clear();
    lengths.clear();
  }
  return all;
}

std::vector<std::vector<double>> Experience::advantages() const {
  const objective::Advantage kind = config_.rl.algorithm.advantage;
  std::vector<std::vector<double>> all;
  if (kind == objective::Advantage::kReinforcePlusPlus) {
    all = token_rewards();
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = objective::discounted_returns(all[i], mask(i), config_.rl.algorithm.gamma);
  } else if (kind == objective::Advantage::kGae) {
    all = token_rewards();
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = estimates(i, all[i]).advantages;
  } else {
    const std::vector<double> values = of_rows(trajectory_advantages(kind));
    for (std::size_t i = 0; i < rows_.size(); ++i) all.emplace_back(rows_[i].size(), values[i]);
    if (kind != objective::Advantage::kReinforcePlusPlusBaseline) return all;
  }
  std::vector<double> values, counts;
  for (std::size_t i = 0; i < all.size(); ++i) {
    values.insert(values.end(), all[i].begin(), all[i].end());
    for (std::size_t t = 0; t < all[i].size(); ++t)
      counts.push_back(is_masked(*rows_[i].trajectory) || !rows_[i].is_sampled(t) ? 0 : 1);
  }
  objective::whiten(values, counts);
  auto value = values.begin();
  for (std::vector<double>& row : all) {
    for (double& advantage : row) advantage = *value++;
  }
  return all;
}

std::vector<objective::Supports> Experience::supports() const {
  std::vector<objective::Supports> supports;
  if (!config_.rollout.has_cuts()) return supports;
  for (std::size_t i = 0; i < rows_.size(); ++i)
    supports.push_back(at_labels(i, rows_[i].of(rows_[i].trajectory->supports)));
  return supports;
}

std::vector<objective::PolicyRow> Experience::policy_rows(std::int64_t version) const {
  const bool is_bypass = config_.rl.old_logprobs == config::OldLogprobs::kRollout;
  const std::vector<std::vector<double>> advantages = this->advantages();
  std::vector<objective::PolicyRow> policy;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    objective::PolicyRow& row = policy.emplace_back();
    const Trajectory& trajectory = *rows_[i].trajectory;
    row.advantages = at_labels<double>(i, advantages[i]);
    if (!trajectory.supports.empty()) row.supports = at_labels(i, rows_[i].of(trajectory.supports));
    (is_bypass ? row.old : row.behaviour) = at_labels(i, rows_[i].of(trajectory.logprobs));
    if (!anchor_.empty()) row.old = at_labels<double>(i, of_completion(i, anchor_[i]));
    if (config_.rl.mode == config::RlMode::kAsync) {
      std::vector<double> age;
      for (const std::int64_t drew : rows_[i].of(trajectory.versions))
        age.push_back(static_cast<double>(version - drew));
      row.age = at_labels<double>(i, age);
    }
    // With kl_where reward it is measured alone.
    if (reference_.empty()) continue;
    row.reference = at_labels<double>(i, of_completion(i, reference_[i]));
  }
  return policy;
}

std::vector<objective::ValueRow> Experience::value_rows() const {
  const std::vector<std::vector<double>> rewards = token_rewards();
  std::vector<objective::ValueRow> rows;
  for (std::size_t i = 0; i < rows_.size(); ++i)
    rows.push_back({values_.at(i), at_labels<double>(i, estimates(i, rewards[i]).returns)});
  return rows;
}

double Experience::explained_variance() const {
  const std::vector<objective::ValueRow> rows = value_rows();
  double n = 0;
  // Sums of returns, of errors and of values, and of their squares.
  std::array<double, 3> sum = {}, squares = {};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::size_t t = 0; t < rows[i].old.size(); ++t) {
      if (weights_[i][t] == 0) continue;
      const std::array numbers = {rows[i].returns[t], rows[i].returns[t] - rows[i].old[t],
                                  rows[i].old[t]};
      ++n;
      for (std::size_t k = 0; k < numbers.size(); ++k)
        sum[k] += numbers[k], squares[k] += numbers[k] * numbers[k];
    }
  }
  if (n == 0) return 0;
  const auto variance = [&](std::size_t k) { return squares[k] / n - sum[k] / n * sum[k] / n; };
  // Rounding leaves something where all are equal: of the returns, or of the values that an
  // advantage was added to.
  const double rounding = 1e-12 * (squares[0] + squares[2]) / n;
  return variance(0) > rounding ? 1 - variance(1) / variance(0) : 0;
}

std::int64_t Experience::parts() const {
  const config::RlSection& rl = config_.rl;
  return std::min(rl.sync_every, (groups_ + rl.groups_per_step - 1) / rl.groups_per_step);
}

std::pair<std::int64_t, std::int64_t> Experience::groups_of(std::int64_t part) const {
  return {part * groups_ / parts(), (part + 1) * groups_ / parts()};
}

data::Step Experience::step(std::int64_t number, std::int64_t rank, std::int64_t ranks,
                            std::optional<std::int64_t> part) const {
  const auto [first, last] = part ? groups_of(*part) : std::pair(std::int64_t{0}, groups_);
  std::vector<std::size_t> rows;
  std::vector<std::int64_t> lengths;
  data::Step step;
  step.step = number;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const auto group = static_cast<std::int64_t>(rows_[i].group);
    if (group < first || group >= last) continue;
    rows.push_back(i);
    lengths.push_back(length(i));
    step.tokens += length(i);
    const std::int64_t chosen =
        std::ranges::count_if(weights_[i], [](float weight) { return weight != 0; });
    step.loss_rows += chosen;
    step.sequences += chosen > 0;
  }
  step.loss_weight_sum = static_cast<double>(step.loss_rows);
  step.rows = std::ssize(rows);
  auto bins = pack(lengths, config_.train.micro_batch_tokens, ranks);
  for (std::size_t b = static_cast<std::size_t>(rank); b < bins.size();
       b += static_cast<std::size_t>(ranks)) {
    std::vector<data::SequenceView> views;
    for (std::size_t& place : bins[b]) place = rows[place];
    for (const std::size_t i : bins[b])
      views.push_back({tokens_[i], labels_[i], weights_[i], static_cast<std::int64_t>(i), 0});
    data::Batch& batch = step.micro_batches.emplace_back(data::Batch::from_sequences(views));
    if (!has_experts() || views.empty()) continue;
    std::vector<at::Tensor> experts;
    for (const std::size_t i : bins[b]) experts.push_back(experts_of(i));
    batch.experts = at::cat(experts).t().contiguous();
  }
  return step;
}

}  // namespace heddle::rl
