#include "bench/operator_cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "base/errors.h"
#include "base/rng.h"
#include "bench/operator_case_parts.h"
#include "ops/attention/attention.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe/frozen_experts.h"
#include "ops/moe/moe.h"

namespace heddle::bench {

ops::KernelTable table_of(const OperatorPlace& place, const std::vector<ops::OpRequest>& requests) {
  return ops::KernelTable::choose(ops::builtin_registry(), ops::target_of(place.device),
                                  place.dtype, requests, place.policy);
}

at::Tensor random(const OperatorPlace& place, at::IntArrayRef sizes) {
  return at::randn(sizes, at::TensorOptions().device(place.device).dtype(place.dtype));
}

using models::Config;

std::vector<std::int32_t> OperatorTokens::boundaries(std::uint64_t draw) const {
  std::vector<std::int32_t> ends = {0};
  const CounterRng rng(draw, "bench/lengths");
  const auto last = static_cast<std::int32_t>(total());
  for (std::uint64_t i = 0; ends.back() < last; ++i) {
    double wanted = as_double(length);
    if (median > 0) wanted = as_double(median) * std::exp(rng.normal(i));
    const auto n = static_cast<std::int32_t>(std::clamp(wanted, 16.0, as_double(last)));
    ends.push_back(std::min(last, ends.back() + n));
  }
  return ends;
}

std::string OperatorTokens::describe() const {
  if (median == 0) return fmt::format("{} x {}", batch, length);
  const std::vector<std::int32_t> ends = boundaries();
  std::int32_t longest = 0;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i)
    longest = std::max(longest, ends[i + 1] - ends[i]);
  return fmt::format("{} tokens in {} sequences of median {} and up to {}", total(),
                     ends.size() - 1, median, longest);
}

std::vector<CaseMaker> attention_cases(const OperatorPlace& place, const Config& config,
                                       const OperatorTokens& tokens) {
  if (config.attention() == nullptr)
    throw_error<ConfigError>("bench attention: the preset has no attention");
  return {[=, attention = *config.attention()] {
    const std::int64_t heads = attention.num_attention_heads, dim = attention.head_dim;
    const ops::KernelTable kernels = table_of(
        place,
        {ops::OpRequest::of<ops::Attention>(
            {.num_heads = heads, .num_kv_heads = attention.num_key_value_heads, .head_dim = dim})});
    const ops::Attention::Functions functions = kernels.get<ops::Attention>();
    const std::vector<std::int32_t> ends = tokens.boundaries();
    const auto sequences = ops::Sequences::from_host(ends, place.device);
    const auto in = std::make_shared<ops::Attention::Inputs>(ops::Attention::Inputs{
        random(place, {tokens.total(), heads, dim}),
        random(place, {tokens.total(), attention.num_key_value_heads, dim}),
        random(place, {tokens.total(), attention.num_key_value_heads, dim}), sequences, sequences});
    const auto saved = std::make_shared<ops::Attention::Forward>(functions.forward(*in, true));
    const at::Tensor d_o = random(place, in->q.sizes());
    double pairs = 0;  // causal: half of the square
    for (std::size_t i = 0; i + 1 < ends.size(); ++i)
      pairs += 0.5 * std::pow(as_double(ends[i + 1] - ends[i]), 2);
    const double flops = 4 * pairs * as_double(heads * dim),
                 bytes = as_double(in->q.element_size() * (2 * in->q.numel() + 2 * in->k.numel()));
    OperatorCase one;
    one.name = fmt::format("{}/{} heads of {}, {}", heads, attention.num_key_value_heads, dim,
                           tokens.describe());
    one.kernel = kernels.choices()[0].kernel;
    one.calls = {
        {"forward", [=] { functions.forward(*in, true); }, flops, bytes},
        {"backward", [=] { functions.backward(*in, *saved, d_o); }, 2.5 * flops, 2 * bytes}};
    return one;
  }};
}

std::vector<CaseMaker> head_cases(const OperatorPlace& place, const Config& config,
                                  const OperatorTokens& tokens) {
  return {[=] {
    const std::int64_t width = config.hidden_size, vocabulary = config.vocab_size,
                       count = tokens.total();
    const ops::KernelTable kernels =
        table_of(place, {ops::OpRequest::of<ops::LinearCrossEntropy>(
                            {.hidden_size = width, .vocab_size = vocabulary})});
    const ops::LinearCrossEntropy::Functions functions = kernels.get<ops::LinearCrossEntropy>();
    const auto in = std::make_shared<ops::LinearCrossEntropy::Inputs>();
    in->hidden = random(place, {count, width});
    in->weight = random(place, {vocabulary, width}) * 0.02;
    in->labels =
        at::randint(vocabulary, {count}, at::TensorOptions().device(place.device).dtype(at::kLong));
    in->all_rows_labelled = true;
    const at::Tensor gradient = at::zeros(in->weight.sizes(), in->weight.options());
    const double product = 2 * as_double(count * width) * as_double(vocabulary);
    const double bytes =
        as_double(in->hidden.element_size() * (2 * in->hidden.numel() + 2 * in->weight.numel()));
    const auto run = [=](bool with_gradients) {
      at::Tensor buffer = gradient;
      functions.forward(*in, with_gradients, with_gradients, buffer);
    };
    OperatorCase one;
    one.name = fmt::format("{} rows of {}, vocabulary {}", count, width, vocabulary);
    one.kernel = kernels.choices()[0].kernel;
    one.calls = {{"loss", [=] { run(false); }, product, bytes / 2},
                 {"loss and gradients", [=] { run(true); }, 3 * product, bytes}};
    return one;
  }};
}

std::vector<CaseMaker> expert_cases(const OperatorPlace& place, const Config& config,
                                    const OperatorTokens& tokens) {
  if (!config.is_moe()) throw_error<ConfigError>("bench experts: the preset has no experts");
  return {[=, moe = *config.moe()] {
    const std::int64_t width = moe.hidden_size, inner = moe.moe_intermediate_size,
                       experts = moe.num_experts, k = moe.num_experts_per_tok;
    const ops::MoeExperts::Dims dims = {
        .num_experts = experts, .top_k = k, .hidden_size = width, .intermediate_size = inner};
    const ops::KernelTable kernels = table_of(
        place,
        {ops::OpRequest::of<ops::MoeExperts>(dims), ops::OpRequest::of<ops::FrozenExperts>(dims)});
    const ops::MoeExperts::Functions functions = kernels.get<ops::MoeExperts>();
    const auto lay = kernels.get<ops::FrozenExperts>().lay;
    const ops::MoeRouting routing =
        ops::moe_route(random(place, {tokens.total(), experts}), k, /*normalize=*/true);
    const auto in = std::make_shared<ops::MoeExperts::Inputs>();
    in->x = random(place, {tokens.total(), width});
    in->weights = routing.weights;
    in->experts = routing.experts;
    in->gate_up = random(place, {experts, 2 * inner, width}) * 0.02;
    in->down = random(place, {experts, width, inner}) * 0.02;
    double weights = 0;
    for (const at::Tensor& weight : {in->gate_up, in->down}) {
      if (lay != nullptr) lay(weight);
      weights += as_double(lay != nullptr ? ops::bytes_beside(weight)
                                          : static_cast<std::int64_t>(weight.nbytes()));
    }
    const auto saved = std::make_shared<ops::MoeExperts::Forward>(functions.forward(*in, true));
    const at::Tensor dy = random(place, in->x.sizes());
    const double products = 6 * as_double(tokens.total() * k) * as_double(width * inner);
    const double bytes = 2 * static_cast<double>(in->x.nbytes()) + weights;
    OperatorCase one;
    one.name = fmt::format("{} tokens, {} of {} experts of {} x {}", tokens.total(), k, experts,
                           width, inner);
    one.kernel = kernels.choices()[0].kernel;
    one.calls = {{"forward", [=] { functions.forward(*in, true); }, products, bytes},
                 {"backward, frozen experts",
                  [=] { functions.backward(*in, *saved, dy, false, {}); }, products, bytes}};
    if (lay != nullptr) {
      one.kernel = fmt::format("{}, {}", one.kernel, kernels.choices()[1].kernel);
    } else {
      one.calls.push_back({"backward", [=] { functions.backward(*in, *saved, dy, true, {}); },
                           2 * products, 2 * bytes});
    }
    return one;
  }};
}

}  // namespace heddle::bench
