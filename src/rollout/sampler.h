#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "ops/sampling/sampling.h"

namespace heddle::rollout {

struct SamplingOptions {
  double temperature = 1;  ///< 0: the most likely token (ties: the lowest id).
  double top_p = 1;        ///< Smallest set of tokens with at least this probability.
  double min_p = 0;        ///< Tokens of at least this share of the most likely one's probability.
  std::int64_t top_k = 0;  ///< 0: all.
  std::uint64_t seed = 0;  ///< The random stream of one request.
  /// Above 1, tokens of prompt and output become less likely: a positive logit is divided, a
  /// negative one multiplied by it.
  double repetition_penalty = 1;
  double presence_penalty = 0;   ///< Taken from the logit of each token of the output.
  double frequency_penalty = 0;  ///< Taken for each time that a token is in the output.
  std::map<std::int32_t, double> logit_bias = {};  ///< Added to logits, before the penalties.
};

/// A token and its log-probability in the model's own distribution.
struct TokenLogprob {
  std::int32_t id = 0;
  double logprob = 0;
};

struct SampledToken {
  std::int32_t id = 0;
  double logprob = 0;                  ///< Under the model's own distribution: no option enters.
  double sampled_logprob = 0;          ///< Of the distribution that it was drawn from.
  std::vector<TokenLogprob> top = {};  ///< The most likely tokens of the model's own distribution.
  /// Ids that top-k, top-p and min-p left to draw from, in order, if asked for.
  std::vector<std::int32_t> support = {};
};

/// Change of the logit of one token before it is drawn.
struct LogitChange {
  std::int32_t id = 0;
  float bias = 0;     ///< Added first.
  float penalty = 1;  ///< Then a positive logit is divided, a negative one multiplied by it.
  float taken = 0;    ///< Then taken away.
};

/// How one token is drawn: its request's options, its position in the output, and what is told.
struct Draw {
  SamplingOptions options;
  std::uint64_t position = 0;
  std::vector<LogitChange> changes = {};
  std::int64_t top = 0;        ///< SampledToken::top.
  bool wants_support = false;  ///< SampledToken::support.

  /// DrawTables alone say all of it.
  bool is_plain() const { return changes.empty() && top == 0 && !wants_support; }
};

/// Draws as tables that one copy each brings to a device.
struct DrawTables {
  at::Tensor whole;  ///< [3,n] int64: top_k, seeds, positions.
  at::Tensor real;   ///< [3,n] float64: temperature, top_p, min_p.

  static DrawTables of(const std::vector<Draw>& draws);  ///< On the host.
  /// Tables and logits [n,V] on one device.
  ops::SampleTokens::Inputs with(const at::Tensor& logits) const;
};

/// Sampled tokens as one table of float64, a row for each, that ranks and devices exchange: id,
/// logprob, sampled logprob, `top` ids, as many logprobs, and `support` ids, -1 where there are
/// fewer.
struct TokenTable {
  std::int64_t top = 0, support = 0;

  std::int64_t width() const { return 3 + 2 * top + support; }
  /// Wide enough for all of them.
  static TokenTable of(const std::vector<Draw>& draws);
  /// [n,width] on the device of the logits [n,V].
  at::Tensor draw(const ops::KernelTable& kernels, const at::Tensor& logits,
                  const std::vector<Draw>& draws) const;
  /// The table of draw() for tokens [n] int64 that are given. The id is in the table too.
  at::Tensor judge(const at::Tensor& logits, const at::Tensor& ids) const;
  /// Row `row` of a table on the host. A token has as much as its draw asked for.
  SampledToken read(const at::Tensor& table, std::int64_t row, std::int64_t wanted_top,
                    bool wants_support) const;
};

/// One token for each row of logits [n,V], drawn on their device. A token depends on its logits,
/// its draw and its position only. Its log-probability is not finite where the logits are not: the
/// token then means nothing.
std::vector<SampledToken> sample(const ops::KernelTable& kernels, const at::Tensor& logits,
                                 const std::vector<Draw>& draws);

/// The stream of row `row` (from 0) of a file that has one seed for all.
std::uint64_t seed_of_row(std::uint64_t seed, std::uint64_t row);
/// The stream of one of a request's samples; the first has the request's own.
std::uint64_t seed_of_sample(std::uint64_t seed, std::uint64_t sample);

}  // namespace heddle::rollout
