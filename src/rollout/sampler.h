#pragma once

#include <cstdint>
#include <vector>

#include "ops/sampling/sampling.h"

namespace heddle::rollout {

struct SamplingOptions {
  double temperature = 1;  ///< 0: the most likely token (ties: the lowest id).
  double top_p = 1;        ///< Smallest set of tokens with at least this probability.
  double min_p = 0;        ///< Tokens of at least this share of the most likely one's probability.
  std::int64_t top_k = 0;  ///< 0: all.
  std::uint64_t seed = 0;  ///< The random stream of one request.
};

struct SampledToken {
  std::int32_t id = 0;
  double logprob = 0;  ///< Under the model's own distribution: temperature and cuts do not enter.
};

/// How one token is drawn: its request's options, and its position in the output.
struct Draw {
  SamplingOptions options;
  std::uint64_t position = 0;
};

/// Draws as tables that one copy each brings to a device.
struct DrawTables {
  at::Tensor whole;  ///< [3,n] int64: top_k, seeds, positions.
  at::Tensor real;   ///< [3,n] float64: temperature, top_p, min_p.

  static DrawTables of(const std::vector<Draw>& draws);  ///< On the host.
  /// Tables and logits [n,V] on one device.
  ops::SampleTokens::Inputs with(const at::Tensor& logits) const;
};

/// One token for each row of logits [n,V], drawn on their device. A token depends on its logits,
/// its seed and its position only. Its log-probability is not finite where the logits are not: the
/// token then means nothing.
std::vector<SampledToken> sample(const ops::KernelTable& kernels, const at::Tensor& logits,
                                 const std::vector<Draw>& draws);

/// Drawn tokens as one table [n,2] float64 on their device, and read from it on the host.
at::Tensor as_table(const ops::SampleTokens::Tokens& tokens);
std::vector<SampledToken> from_table(const at::Tensor& table, std::size_t count);

/// The stream of row `row` (from 0) of a file that has one seed for all.
std::uint64_t seed_of_row(std::uint64_t seed, std::uint64_t row);

}  // namespace heddle::rollout
