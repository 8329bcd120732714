// The cases of products, of adapters on them, and of the optimizer over their matrices.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "bench/operator_case_parts.h"
#include "ops/linear/linear.h"
#include "ops/optimizer_step/eight_bit.h"
#include "ops/optimizer_step/eight_bit_state.h"
#include "ops/optimizer_step/optimizer_step.h"

namespace heddle::bench {
namespace {

using models::Config;

/// Layers that read one input: their output widths.
struct ProductGroup {
  std::string name;
  std::int64_t depth;
  std::vector<std::int64_t> widths;
};

/// Routers and experts have cases of their own.
std::vector<ProductGroup> product_groups(const Config& config) {
  std::vector<ProductGroup> groups;
  std::set<std::string> known;
  for (const models::LayerShape& layer : config.layers) {
    std::set<std::string> here;
    for (const models::Product& product : layer.products()) {
      if (product.cut.along == models::Cut::Along::kNothing || known.contains(product.group))
        continue;
      if (here.insert(product.group).second) groups.push_back({product.group, product.in, {}});
      groups.back().widths.push_back(product.out);
    }
    known.merge(here);
  }
  return groups;
}

OperatorCase product_case(const OperatorPlace& place, const ProductGroup& group,
                          std::int64_t tokens) {
  const ops::KernelTable kernels = table_of(place, {ops::OpRequest::of<ops::Linear>()});
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

/// Products of layers that share an input in training, an adapter on each (adapters/lora.cpp).
OperatorCase adapter_case(const OperatorPlace& place, const ProductGroup& group,
                          std::int64_t tokens, std::int64_t rank) {
  const ops::KernelTable kernels = table_of(place, {ops::OpRequest::of<ops::Linear>()});
  const ops::Linear::Functions functions = kernels.get<ops::Linear>();
  const auto layers = static_cast<std::int64_t>(group.widths.size()), ranks = layers * rank;
  const at::Tensor x = random(place, {tokens, group.depth}),
                   a = random(place, {ranks, group.depth}), low = random(place, {tokens, ranks}),
                   d_low = random(place, {tokens, ranks});
  std::vector<ops::Products> sums;
  ops::Products terms;
  std::vector<ops::LowRankChange> changes;
  std::int64_t columns = 0;
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::int64_t width = group.widths[static_cast<std::size_t>(i)];
    const at::Tensor weight = random(place, {width, group.depth}), b = random(place, {width, rank}),
                     dy = random(place, {tokens, width}), own_low = low.narrow(1, i * rank, rank);
    sums.push_back({{x, weight}, {own_low, b}});
    terms.push_back({dy, weight});
    changes.push_back({dy, b, own_low});
    columns += width;
  }
  terms.push_back({d_low, a});
  const double weights = as_double(columns * group.depth),
               adapters = as_double(ranks * group.depth + rank * columns), rows = as_double(tokens),
               size = as_double(x.element_size()), flops = 2 * rows * (weights + adapters),
               bytes = size * (rows * as_double(columns + group.depth) + weights + adapters),
               // dy b and dy^T low, then d_low^T x.
      adapter_flops = 2 * rows * as_double(2 * rank * columns + ranks * group.depth),
               adapter_bytes = size * (rows * as_double(columns + group.depth + 2 * ranks) +
                                       as_double(rank * columns)) +
                               4 * adapters;
  OperatorCase one;
  one.name = fmt::format("{}: {} -> {}, rank {}", group.name, group.depth,
                         fmt::join(group.widths, " + "), rank);
  one.kernel = kernels.choices()[0].kernel;
  one.calls = {{"forward",
                [=] {
                  functions.forward({{{x, a}}});
                  functions.forward(sums);
                },
                flops, bytes},
               {"input gradient", [=] { functions.backward(terms); },
                2 * rows * (weights + as_double(ranks * group.depth)), bytes},
               {"adapter gradients, library",
                [=] {
                  for (const auto& [dy, b, own_low] : changes) {
                    at::mm(dy, b);
                    ops::wide_product(dy, own_low);
                  }
                  ops::wide_product(d_low, x);
                },
                adapter_flops, adapter_bytes},
               {"adapter gradients",
                [=] {
                  const auto gradients = functions.low_rank_backward(changes);
                  ops::wide_product(gradients.d_low, x);
                },
                adapter_flops, adapter_bytes}};
  return one;
}

enum class OptimizerState { kWide, kBfloat16, kEightBit };

/// Over matrices of these sizes. Wide: fp32 moments and gradients, and where the parameters are
/// bf16 an fp32 master of each; else gradients are of the parameters' type.
OperatorCase adamw_case(const OperatorPlace& place,
                        const std::vector<std::pair<std::int64_t, std::int64_t>>& sizes,
                        OptimizerState state) {
  const ops::KernelTable kernels = table_of(place, {ops::OpRequest::of<ops::AdamwStep>()});
  const auto wide = at::TensorOptions().device(place.device).dtype(at::kFloat);
  const auto narrow = wide.dtype(place.dtype);
  auto tensors = std::make_shared<std::vector<ops::AdamwTensor>>();
  double count = 0;
  for (const auto& [rows, columns] : sizes) {
    ops::AdamwTensor one;
    one.parameter = random(place, {rows, columns});
    one.rounding_key = tensors->size();
    if (state == OptimizerState::kWide) {
      one.gradient = at::zeros({rows, columns}, wide);
      one.exp_avg = at::zeros({rows, columns}, wide);
      one.exp_avg_sq = at::zeros({rows, columns}, wide);
      if (place.dtype == at::kBFloat16) one.master = one.parameter.to(at::kFloat);
    } else {
      one.gradient = at::zeros({rows, columns}, narrow);
      if (state == OptimizerState::kBfloat16) {
        one.exp_avg = at::zeros({rows, columns}, narrow);
        one.exp_avg_sq = at::zeros({rows, columns}, narrow);
      } else {
        one.exp_avg = ops::eight_bit::zero_codes(one.parameter);
        one.exp_avg_sq = ops::eight_bit::zero_codes(one.parameter);
        one.exp_avg_scale = ops::eight_bit::zero_scales(one.parameter);
        one.exp_avg_sq_scale = ops::eight_bit::zero_scales(one.parameter);
      }
    }
    count += as_double(rows * columns);
    tensors->push_back(one);
  }
  const ops::AdamwTensor& first = tensors->at(0);
  const auto element = [](const at::Tensor& x) {
    return x.defined() ? as_double(x.element_size()) : 0.0;
  };
  // The gradient is read, a rounded parameter written, everything else both.
  const bool has_master = first.master.defined();
  const double bytes = element(first.gradient) + (has_master ? 1 : 2) * element(first.parameter) +
                       2 * (element(first.master) + element(first.exp_avg) * 2) +
                       (first.exp_avg_scale.defined() ? 16.0 / ops::eight_bit::kBlock : 0.0);
  const char* const names[] = {"fp32 state and gradients", "bf16 state", "8-bit state"};
  OperatorCase one;
  one.name = fmt::format("{:.1f} million parameters, {}{}", count * 1e-6,
                         names[static_cast<int>(state)], has_master ? ", fp32 masters" : "");
  one.kernel = kernels.choices()[0].kernel;
  ops::AdamwOptions options;
  options.lr = 1e-5;
  one.calls = {{"step", [=] { ops::adamw_step(kernels, *tensors, options); }, 0, bytes * count}};
  return one;
}

}  // namespace

std::vector<CaseMaker> product_cases(const OperatorPlace& place, const Config& config,
                                     const OperatorTokens& tokens) {
  std::vector<CaseMaker> cases;
  for (const ProductGroup& group : product_groups(config))
    cases.push_back([=] { return product_case(place, group, tokens.total()); });
  return cases;
}

std::vector<CaseMaker> adapter_cases(const OperatorPlace& place, const Config& config,
                                     const OperatorTokens& tokens, std::int64_t rank) {
  std::vector<CaseMaker> cases;
  for (const ProductGroup& group : product_groups(config))
    cases.push_back([=] { return adapter_case(place, group, tokens.total(), rank); });
  return cases;
}

std::vector<CaseMaker> adamw_cases(const OperatorPlace& place, const Config& config,
                                   const OperatorTokens&) {
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes = {
      {config.vocab_size, config.hidden_size}};
  for (const ProductGroup& group : product_groups(config)) {
    for (const std::int64_t width : group.widths) sizes.emplace_back(width, group.depth);
  }
  std::vector<OptimizerState> states = {OptimizerState::kWide};
  if (place.dtype == at::kBFloat16) states.push_back(OptimizerState::kBfloat16);
  const bool whole_blocks = std::all_of(sizes.begin(), sizes.end(), [](const auto& size) {
    return size.second % ops::eight_bit::kBlock == 0;
  });
  if (place.dtype == at::kBFloat16 && whole_blocks) states.push_back(OptimizerState::kEightBit);
  std::vector<CaseMaker> cases;
  for (const OptimizerState state : states)
    cases.push_back([=] { return adamw_case(place, sizes, state); });
  return cases;
}

}  // namespace heddle::bench
