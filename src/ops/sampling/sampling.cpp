#include "ops/sampling/sampling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "base/errors.h"
#include "base/hash.h"
#include "base/philox.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/sampling/kernels.h"
#include "ops/sampling/mass.h"

namespace heddle::ops {

std::uint64_t sampling_stream() { return hash::of("sample"); }

namespace {

struct Cuts {
  float temperature;
  double top_p, min_p;
  std::int64_t top_k;

  bool any() const { return top_p < 1 || min_p > 0 || top_k > 0; }
};

/// Ids that the cuts keep, in the order of ids.
std::vector<std::int32_t> kept_ids(std::span<const float> logits, float highest, const Cuts& cuts,
                                   const auto& mass_of) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto more_likely = [&](std::int32_t a, std::int32_t b) {
    const std::uint32_t x = sampling::rank_of(std::bit_cast<std::uint32_t>(logits[a])),
                        y = sampling::rank_of(std::bit_cast<std::uint32_t>(logits[b]));
    return x != y ? x > y : a < b;
  };
  if (cuts.top_k > 0 && cuts.top_k < static_cast<std::int64_t>(ids.size())) {
    std::nth_element(ids.begin(), ids.begin() + cuts.top_k - 1, ids.end(), more_likely);
    ids.resize(static_cast<std::size_t>(cuts.top_k));
  }
  if (cuts.top_p < 1) {
    std::sort(ids.begin(), ids.end(), more_likely);
    std::uint64_t total = 0, sum = 0;
    for (const std::int32_t id : ids) total += mass_of(id);
    const std::uint64_t wanted = sampling::part_of(total, cuts.top_p);
    std::size_t count = 0;
    while (count < ids.size() && sum < wanted) sum += mass_of(ids[count++]);
    ids.resize(count);
  }
  if (cuts.min_p > 0) {
    const std::uint64_t least =
        sampling::part_of(std::uint64_t{1} << sampling::kMassBits, cuts.min_p);
    std::erase_if(ids, [&](std::int32_t id) { return mass_of(id) < least; });
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

struct Drawn {
  std::int32_t id = 0;
  double logprob = 0, sampled_logprob = 0;
  std::vector<std::int32_t> support;  ///< Tokens that cuts keep; empty without cuts.
};

/// Draws a token; of a row whose masses are all 0 it stays the most likely one.
void draw(std::span<const float> logits, float highest, const Cuts& cuts, double uniform,
          Drawn& drawn) {
  const float rate = sampling::log2_rate(cuts.temperature);
  const auto mass_of = [&](std::int32_t id) {
    return sampling::mass_of(logits[static_cast<std::size_t>(id)], highest, rate);
  };
  std::vector<std::int32_t> ids;
  if (cuts.any()) {
    ids = kept_ids(logits, highest, cuts, mass_of);
    std::erase_if(ids, [&](std::int32_t id) { return mass_of(id) == 0; });
    drawn.support = ids;
  } else {
    ids.resize(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
  }
  std::uint64_t total = 0;
  for (const std::int32_t id : ids) total += mass_of(id);
  if (total == 0) return;
  std::uint64_t place = sampling::place_of(total, uniform);
  for (const std::int32_t id : ids) {
    const std::uint64_t mass = mass_of(id);
    if (place < mass) {
      drawn.id = id;
      drawn.sampled_logprob = std::log(static_cast<double>(mass) / static_cast<double>(total));
      return;
    }
    place -= mass;
  }
}

Drawn sample_row(std::span<const float> logits, const Cuts& cuts, double uniform) {
  const auto best = std::max_element(logits.begin(), logits.end());
  const float highest = *best;
  Drawn drawn;
  drawn.id = static_cast<std::int32_t>(best - logits.begin());
  if (cuts.temperature > 0) {
    draw(logits, highest, cuts, uniform, drawn);
  } else {
    drawn.support = {drawn.id};
  }
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - highest));
  drawn.logprob =
      static_cast<double>(logits[static_cast<std::size_t>(drawn.id)] - highest) - std::log(sum);
  if (cuts.temperature == 1 && !cuts.any()) drawn.sampled_logprob = drawn.logprob;
  return drawn;
}

/// On the host, whatever the device.
SampleTokens::Tokens on_host(const SampleTokens::Inputs& in) {
  const c10::Device device = in.logits.device();
  const at::Tensor logits = in.logits.to(at::kFloat).cpu().contiguous();
  const at::Tensor temperature = in.temperature.cpu(), top_p = in.top_p.cpu(),
                   min_p = in.min_p.cpu(), top_k = in.top_k.cpu(), seeds = in.seeds.cpu(),
                   positions = in.positions.cpu();
  const std::int64_t B = logits.size(0), V = logits.size(1);
  at::Tensor ids = at::empty({B}, at::kLong), logprobs = at::empty({B}, at::kDouble),
             sampled = at::empty({B}, at::kDouble);
  at::Tensor supports;
  if (in.support > 0) supports = at::full({B, in.support}, -1, at::kLong);
  const float* const values = logits.const_data_ptr<float>();
  at::parallel_for(0, B, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t b = first; b < last; ++b) {
      const Cuts cuts{temperature.const_data_ptr<float>()[b], top_p.const_data_ptr<double>()[b],
                      min_p.const_data_ptr<double>()[b], top_k.const_data_ptr<std::int64_t>()[b]};
      const auto number = [b](const at::Tensor& x) {
        return static_cast<std::uint64_t>(x.const_data_ptr<std::int64_t>()[b]);
      };
      const double uniform =
          philox::uniform(philox::words(number(seeds), number(positions), sampling_stream()));
      const Drawn drawn = sample_row({values + b * V, static_cast<std::size_t>(V)}, cuts, uniform);
      ids.mutable_data_ptr<std::int64_t>()[b] = drawn.id;
      logprobs.mutable_data_ptr<double>()[b] = drawn.logprob;
      sampled.mutable_data_ptr<double>()[b] = drawn.sampled_logprob;
      const auto told = std::min(drawn.support.size(), static_cast<std::size_t>(in.support));
      std::copy_n(drawn.support.begin(), told,
                  told > 0 ? supports.mutable_data_ptr<std::int64_t>() + b * in.support : nullptr);
    }
  });
  if (supports.defined()) supports = supports.to(device);
  return {ids.to(device), logprobs.to(device), sampled.to(device), supports};
}

void check(const SampleTokens::Inputs& in) {
  TORCH_CHECK(in.logits.dim() == 2 && in.logits.size(1) > 0 && in.logits.size(1) <= 1 << 19,
              "sample_tokens: logits ", in.logits.sizes(), " must be [B,V] with V up to 2^19");
  const auto row = [&](const char* name, const at::Tensor& x, c10::ScalarType type) {
    TORCH_CHECK(x.dim() == 1 && x.size(0) == in.logits.size(0) && x.scalar_type() == type &&
                    x.device() == in.logits.device() && x.is_contiguous(),
                "sample_tokens: ", name, " ", x.sizes(), " ", x.scalar_type(), " on ", x.device(),
                " must be [B] ", type, " beside the logits ", in.logits.sizes(), " on ",
                in.logits.device());
  };
  row("temperature", in.temperature, at::kFloat);
  row("top_p", in.top_p, at::kDouble);
  row("min_p", in.min_p, at::kDouble);
  row("top_k", in.top_k, at::kLong);
  row("seeds", in.seeds, at::kLong);
  row("positions", in.positions, at::kLong);
}

}  // namespace

SampleTokens::Tokens sample_tokens(const KernelTable& kernels, const SampleTokens::Inputs& inputs) {
  check(inputs);
  const NoGradient guard;
  return kernels.get<SampleTokens>().forward(inputs);
}

void sample_and_go_on(const KernelTable& kernels, const SampleTokens::Inputs& inputs,
                      const SampleTokens::Next& next) {
  check(inputs);
  const NoGradient guard;
  const auto& functions = kernels.get<SampleTokens>();
  if (functions.go_on == nullptr)
    throw InternalError("sample_tokens: the kernel does not go on by itself");
  functions.go_on(inputs, next);
}

void register_sampling(Registry& registry) {
  KernelInfo host = KernelInfo::cpu("cpu");
  host.dtypes = reference_dtypes();
  registry.add<SampleTokens>(host, {on_host});
  registry.add<SampleTokens>(KernelInfo::reference(), {on_host},
                             {.warnings = [](const AnyDims&) -> std::vector<std::string> {
                               return {"the host draws from a copy of all logits"};
                             }});
}

}  // namespace heddle::ops
