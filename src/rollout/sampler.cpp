#include "rollout/sampler.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <fmt/format.h>

#include "base/hash.h"
#include "device/upload.h"

namespace heddle::rollout {

DrawTables DrawTables::of(const std::vector<Draw>& draws) {
  const auto n = static_cast<std::int64_t>(draws.size());
  DrawTables tables{at::empty({3, n}, at::kLong), at::empty({3, n}, at::kDouble)};
  std::int64_t* const whole = tables.whole.mutable_data_ptr<std::int64_t>();
  double* const real = tables.real.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < n; ++i) {
    const auto& [options, position] = draws[static_cast<std::size_t>(i)];
    whole[i] = options.top_k;
    whole[n + i] = static_cast<std::int64_t>(options.seed);
    whole[2 * n + i] = static_cast<std::int64_t>(position);
    real[i] = options.temperature;
    real[n + i] = options.top_p;
    real[2 * n + i] = options.min_p;
  }
  return tables;
}

ops::SampleTokens::Inputs DrawTables::with(const at::Tensor& logits) const {
  return {logits,
          real.select(0, 0).to(at::kFloat),
          real.select(0, 1),
          real.select(0, 2),
          whole.select(0, 0),
          whole.select(0, 1),
          whole.select(0, 2)};
}

at::Tensor as_table(const ops::SampleTokens::Tokens& tokens) {
  return at::stack({tokens.ids.to(at::kDouble), tokens.logprobs}, 1);
}

std::vector<SampledToken> from_table(const at::Tensor& table, std::size_t count) {
  const at::Tensor host = table.cpu();
  const double* const entries = host.const_data_ptr<double>();
  std::vector<SampledToken> tokens(count);
  for (std::size_t i = 0; i < count; ++i)
    tokens[i] = {static_cast<std::int32_t>(entries[2 * i]), entries[2 * i + 1]};
  return tokens;
}

std::vector<SampledToken> sample(const ops::KernelTable& kernels, const at::Tensor& logits,
                                 const std::vector<Draw>& draws) {
  const DrawTables host = DrawTables::of(draws);
  const DrawTables tables{device::upload(host.whole, logits.device()),
                          device::upload(host.real, logits.device())};
  return from_table(as_table(ops::sample_tokens(kernels, tables.with(logits))), draws.size());
}

std::uint64_t seed_of_row(std::uint64_t seed, std::uint64_t row) {
  return hash::of(fmt::format("row/{}", row), seed);
}

}  // namespace heddle::rollout
