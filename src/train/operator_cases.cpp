#include "train/operator_cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
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
#include "ops/attention/attention.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe/moe.h"
#include "train/operator_case_parts.h"

namespace heddle::train {

ops::KernelTable table_of(const OperatorPlace& place, const std::string& op,
                          const ops::Dims& dims) {
  return ops::KernelTable::choose(ops::builtin_registry(), place.device.type(), place.dtype,
                                  {{op, {dims}}}, place.policy);
}

at::Tensor random(const OperatorPlace& place, at::IntArrayRef sizes) {
  return at::randn(sizes, at::TensorOptions().device(place.device).dtype(place.dtype));
}

namespace {

using models::qwen3_5::Config;

/// Layers that read one input: their output widths.
struct ProductGroup {
  std::string name;
  std::int64_t depth;
  std::vector<std::int64_t> widths;
};

std::vector<ProductGroup> product_groups(const Config& config) {
  std::vector<ProductGroup> groups;
  const std::int64_t hidden = config.hidden_size;
  const auto has = [](const std::vector<bool>& flags, bool value) {
    return std::find(flags.begin(), flags.end(), value) != flags.end();
  };
  if (has(config.full_attention, false)) {
    const std::int64_t keys = config.linear_num_key_heads * config.linear_key_head_dim,
                       values = config.linear_num_value_heads * config.linear_value_head_dim,
                       heads = config.linear_num_value_heads;
    groups.push_back({"delta net in", hidden, {2 * keys + values, values, heads, heads}});
    groups.push_back({"delta net out", values, {hidden}});
  }
  if (has(config.full_attention, true)) {
    const std::int64_t q = config.num_attention_heads * config.head_dim,
                       kv = config.num_key_value_heads * config.head_dim;
    groups.push_back({"attention q, k, v", hidden, {2 * q, kv, kv}});
    groups.push_back({"attention out", q, {hidden}});
  }
  const std::int64_t inner = has(config.sparse_mlp, true) ? config.shared_expert_intermediate_size
                                                          : config.intermediate_size;
  groups.push_back({"MLP gate, up", hidden, {inner, inner}});
  groups.push_back({"MLP down", inner, {hidden}});
  return groups;
}

OperatorCase product_case(const OperatorPlace& place, const ProductGroup& group,
                          std::int64_t tokens) {
  const ops::KernelTable kernels = table_of(place, "linear", {});
  const ops::Linear::Functions functions = kernels.get<ops::Linear>();
  const at::Tensor x = random(place, {tokens, group.depth});
  std::vector<ops::Products> sums;
  ops::Products terms;
  std::int64_t columns = 0;
  for (const std::int64_t width : group.widths) {
    const at::Tensor weight = random(place, {width, group.depth});
    sums.push_back({{x, weight}});
    terms.push_back({random(place, {tokens, width}), weight});
    columns += width;
  }
  const double flops = 2 * as_double(tokens) * as_double(columns * group.depth),
               bytes = as_double(x.element_size()) *
                       as_double(tokens * (columns + group.depth) + columns * group.depth);
  OperatorCase one;
  one.name = fmt::format("{}: {} -> {}", group.name, group.depth, fmt::join(group.widths, " + "));
  one.kernel = kernels.choices()[0].kernel;
  const auto each = [terms](const auto& run) {
    return [terms, run] {
      for (const ops::Product& term : terms) run(term);
    };
  };
  one.calls = {
      {"forward, library", each([x](const ops::Product& p) { at::mm(x, p.b.t()); }), flops, bytes},
      {"forward", [=] { functions.forward(sums); }, flops, bytes},
      {"input gradient, library", each([](const ops::Product& p) { at::mm(p.a, p.b); }), flops,
       bytes},
      {"input gradient", [=] { functions.backward(terms); }, flops, bytes},
      {"weight gradient, library", each([x](const ops::Product& p) { at::mm(p.a.t(), x); }), flops,
       bytes},
  };
  return one;
}

}  // namespace

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

std::vector<CaseMaker> product_cases(const OperatorPlace& place, const Config& config,
                                     const OperatorTokens& tokens) {
  std::vector<CaseMaker> cases;
  for (const ProductGroup& group : product_groups(config))
    cases.push_back([=] { return product_case(place, group, tokens.total()); });
  return cases;
}

std::vector<CaseMaker> attention_cases(const OperatorPlace& place, const Config& config,
                                       const OperatorTokens& tokens) {
  return {[=] {
    const std::int64_t heads = config.num_attention_heads, dim = config.head_dim;
    const ops::KernelTable kernels = table_of(place, "attention", {{"head_dim", dim}});
    const ops::Attention::Functions functions = kernels.get<ops::Attention>();
    const std::vector<std::int32_t> ends = tokens.boundaries();
    const auto sequences = ops::Sequences::from_host(ends, place.device);
    const auto in = std::make_shared<ops::Attention::Inputs>(ops::Attention::Inputs{
        random(place, {tokens.total(), heads, dim}),
        random(place, {tokens.total(), config.num_key_value_heads, dim}),
        random(place, {tokens.total(), config.num_key_value_heads, dim}), sequences, sequences});
    const auto saved = std::make_shared<ops::Attention::Forward>(functions.forward(*in, true));
    const at::Tensor d_o = random(place, in->q.sizes());
    double pairs = 0;  // causal: half of the square
    for (std::size_t i = 0; i + 1 < ends.size(); ++i)
      pairs += 0.5 * std::pow(as_double(ends[i + 1] - ends[i]), 2);
    const double flops = 4 * pairs * as_double(heads * dim),
                 bytes = as_double(in->q.element_size() * (2 * in->q.numel() + 2 * in->k.numel()));
    OperatorCase one;
    one.name = fmt::format("{}/{} heads of {}, {}", heads, config.num_key_value_heads, dim,
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
    const ops::KernelTable kernels = table_of(place, "linear_cross_entropy",
                                              {{"hidden_size", width}, {"vocab_size", vocabulary}});
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
  return {[=] {
    const std::int64_t width = config.hidden_size, inner = config.moe_intermediate_size,
                       experts = config.num_experts, k = config.num_experts_per_tok;
    const ops::KernelTable kernels = table_of(place, "moe_experts",
                                              {{"num_experts", experts},
                                               {"top_k", k},
                                               {"hidden_size", width},
                                               {"intermediate_size", inner}});
    const ops::MoeExperts::Functions functions = kernels.get<ops::MoeExperts>();
    const ops::MoeRouting routing =
        ops::moe_route(random(place, {tokens.total(), experts}), k, /*normalize=*/true);
    const auto in = std::make_shared<ops::MoeExperts::Inputs>();
    in->x = random(place, {tokens.total(), width});
    in->weights = routing.weights;
    in->experts = routing.experts;
    in->gate_up = random(place, {experts, 2 * inner, width}) * 0.02;
    in->down = random(place, {experts, width, inner}) * 0.02;
    const auto saved = std::make_shared<ops::MoeExperts::Forward>(functions.forward(*in, true));
    const at::Tensor dy = random(place, in->x.sizes());
    const double products = 6 * as_double(tokens.total() * k) * as_double(width * inner);
    const double bytes = as_double(in->x.element_size()) *
                         as_double(2 * in->x.numel() + in->gate_up.numel() + in->down.numel());
    OperatorCase one;
    one.name = fmt::format("{} tokens, {} of {} experts of {} x {}", tokens.total(), k, experts,
                           width, inner);
    one.kernel = kernels.choices()[0].kernel;
    one.calls = {
        {"forward", [=] { functions.forward(*in, true); }, products, bytes},
        {"backward, frozen experts", [=] { functions.backward(*in, *saved, dy, false); }, products,
         bytes},
        {"backward", [=] { functions.backward(*in, *saved, dy, true); }, 2 * products, 2 * bytes}};
    return one;
  }};
}

}  // namespace heddle::train
