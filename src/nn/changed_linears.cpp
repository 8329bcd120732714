// The products of layers with low-rank changes.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "nn/changed_rows.h"
#include "nn/grouped_changes.h"
#include "ops/autograd.h"
#include "ops/linear/few_row_lows.h"

namespace heddle::nn {

using ops::Tensors;
using LowRankGradients = ops::Linear::Functions::LowRankGradients;

namespace {

bool changes_any(const std::vector<ChangedLinear>& layers) {
  return std::any_of(layers.begin(), layers.end(),
                     [](const ChangedLinear& layer) { return layer.change != nullptr; });
}

bool drops(const std::vector<ChangedLinear>& layers) {
  return std::any_of(layers.begin(), layers.end(),
                     [](const ChangedLinear& layer) { return layer.mask.has_value(); });
}

/// The part of dimension `dim` of `stacked` that belongs to each layer; undefined without a
/// change.
Tensors split(const at::Tensor& stacked, std::int64_t dim,
              const std::vector<ChangedLinear>& layers) {
  Tensors parts;
  std::int64_t first = 0;
  for (const ChangedLinear& layer : layers) {
    if (layer.change == nullptr) {
      parts.emplace_back();
      continue;
    }
    parts.push_back(stacked.narrow(dim, first, layer.change->rank()));
    first += layer.change->rank();
  }
  return parts;
}

/// The one scale of all changes, if they have one.
std::optional<double> common_scale(const std::vector<ChangedLinear>& layers) {
  std::set<double> scales;
  for (const ChangedLinear& layer : layers) {
    if (layer.change != nullptr) scales.insert(layer.change->scaling());
  }
  return scales.size() == 1 ? std::optional(*scales.begin()) : std::nullopt;
}

/// Multiplies the rows of each change [sum of ranks, ...] by its scale.
void scale(const at::Tensor& stacked, const std::vector<ChangedLinear>& layers) {
  if (const auto common = common_scale(layers)) {
    at::Tensor(stacked).mul_(*common);
    return;
  }
  const Tensors parts = split(stacked, 0, layers);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].change != nullptr) at::Tensor(parts[i]).mul_(layers[i].change->scaling());
  }
}

/// The changes' A, each with its scale, one below the other [sum of ranks, in]: the input is read
/// once for all of them.
at::Tensor scaled_a(const std::vector<ChangedLinear>& layers) {
  Tensors rows;
  for (const ChangedLinear& layer : layers) {
    if (layer.change != nullptr) rows.push_back(layer.change->a().data());
  }
  if (rows.size() == 1) return rows[0] * *common_scale(layers);
  at::Tensor stacked = at::cat(rows);
  scale(stacked, layers);
  return stacked;
}

/// Rows that have the same changes, as the backward of their product needs them.
struct Segment {
  std::int64_t first, rows;
  std::vector<ChangedLinear> layers;
  at::Tensor a;    ///< scaled_a; undefined without a change.
  at::Tensor low;  ///< x a^T, of what each change sees of x; [rows, sum of ranks]

  bool has_change() const { return a.defined(); }
  at::Tensor own(const at::Tensor& all) const { return all.narrow(0, first, rows); }
};

/// A product of layers that share their input, as its backward needs it.
struct Product {
  std::vector<Parameter*> weights;
  /// One for all rows or, where rows differ, those whose changes are not grouped.
  std::vector<Segment> segments;
  GroupedChanges grouped;                    ///< The other changes where rows differ.
  bool is_one;                               ///< All rows have the same changes.
  std::function<at::Tensor()> input;         ///< x
  std::shared_ptr<PostponedWork> postponed;  ///< See LinearInput.
  bool wants_input_gradient;
  const ops::Linear::Functions* products;

  at::Tensor backward(const Tensors& grads) const;

 private:
  void add_gradients(const std::vector<LowRankGradients>& low_rank,
                     const Tensors& trained_dy) const;
};

/// For layers whose changes drop elements.
ops::DroppedFactors dropped(const Segment& segment) {
  ops::DroppedFactors factors{segment.a, {}, {}};
  for (const ChangedLinear& layer : segment.layers) {
    if (layer.change == nullptr) continue;
    TORCH_CHECK(layer.mask.has_value(), layer.change->a().name(), ": all changes of layers that ",
                "share an input drop elements of it, or none");
    factors.ranks.push_back(layer.change->rank());
    factors.masks.push_back(*layer.mask);
  }
  return factors;
}

/// x a^T. One product where all changes see the whole of x.
at::Tensor low_of(const ops::Linear::Functions& products, const Segment& segment,
                  const at::Tensor& x) {
  return drops(segment.layers) ? products.dropped_low(x, dropped(segment))
                               : products.forward({{{x, segment.a}}})[0];
}

/// Part of x that each change sees, scaled, undefined without a change; nothing where the kernels
/// have no way of their own for so few rows.
Tensors lows_of_few(const ops::Linear::Functions& products, const at::Tensor& x,
                    const std::vector<ChangedLinear>& layers) {
  if (drops(layers)) return {};
  Tensors as;
  std::vector<double> scales;
  for (const ChangedLinear& layer : layers) {
    if (layer.change == nullptr) continue;
    as.push_back(layer.change->a().data());
    scales.push_back(layer.change->scaling());
  }
  const Tensors found = ops::few_row_lows(products, x, as, scales);
  if (found.empty()) return {};
  Tensors lows;
  std::size_t next = 0;
  for (const ChangedLinear& layer : layers)
    lows.push_back(layer.change == nullptr ? at::Tensor() : found[next++]);
  return lows;
}

/// d_low^T x, scaled: the gradients of the changes' A one below the other.
at::Tensor gradient_of_a(const ops::Linear::Functions& products, const Segment& segment,
                         const at::Tensor& d_low, const at::Tensor& x) {
  const auto common = common_scale(segment.layers);
  if (common && !drops(segment.layers)) return ops::wide_product(d_low, x, *common);
  const at::Tensor d_a = drops(segment.layers)
                             ? products.dropped_gradient(x, d_low, dropped(segment))
                             : ops::wide_product(d_low, x);
  scale(d_a, segment.layers);
  return d_a;
}

/// Accumulates the gradients of weights and changes; returns that of the input, if it is wanted.
at::Tensor Product::backward(const Tensors& grads) const {
  const auto defined = std::find_if(grads.begin(), grads.end(),
                                    [](const at::Tensor& grad) { return grad.defined(); });
  ops::Products terms;
  Tensors all_dy, trained_dy;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    all_dy.push_back(
        grads[i].defined()
            ? grads[i]
            : at::zeros({defined->size(0), weights[i]->local_shape()[0]}, defined->options()));
    trained_dy.push_back(weights[i]->trainable() ? all_dy[i] : at::Tensor());
    terms.push_back({all_dy[i], weights[i]->data(), weights[i]->linear_place()});
  }
  std::vector<LowRankGradients> low_rank;
  for (const Segment& segment : segments) {
    low_rank.emplace_back();
    if (!segment.has_change()) continue;
    const Tensors lows = split(segment.low, 1, segment.layers);
    std::vector<ops::LowRankChange> changes;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (LowRank* const change = segment.layers[i].change)
        changes.push_back({segment.own(all_dy[i]), change->b().data(), lows[i]});
    }
    low_rank.back() = products->low_rank_backward(changes);
  }
  const at::Tensor d_lows = grouped.backward(all_dy);
  Product rest = *this;
  rest.postponed.reset();  // which is to hold it
  run_or_postpone(postponed, [rest = std::move(rest), trained_dy, low_rank, d_lows] {
    rest.add_gradients(low_rank, trained_dy);
    if (!rest.grouped.is_empty()) rest.grouped.add_gradients_of_a(rest.input(), d_lows);
  });
  if (!wants_input_gradient) return {};
  // The change of a single segment is one more term of the same product.
  const bool is_term = is_one && !drops(segments[0].layers);
  if (is_term) terms.push_back({low_rank[0].d_low, segments[0].a});
  at::Tensor dx = grouped.input_gradient(*products, terms, d_lows);
  for (std::size_t s = 0; s < segments.size() && !is_term; ++s) {
    if (!segments[s].has_change()) continue;
    at::Tensor own = segments[s].own(dx);
    if (drops(segments[s].layers)) {
      products->add_dropped(own, low_rank[s].d_low, dropped(segments[s]));
    } else {
      own.addmm_(low_rank[s].d_low, segments[s].a);
    }
  }
  return dx;
}

/// Adds the gradients of changes and weights.
void Product::add_gradients(const std::vector<LowRankGradients>& low_rank,
                            const Tensors& trained_dy) const {
  const at::Tensor x = input();
  for (std::size_t i = 0; i < weights.size(); ++i)
    if (trained_dy[i].defined()) accumulate_product(*weights[i], trained_dy[i], x);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const Segment& segment = segments[s];
    if (!segment.has_change()) continue;
    const Tensors d_a = split(gradient_of_a(*products, segment, low_rank[s].d_low, segment.own(x)),
                              0, segment.layers);
    std::size_t next = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      LowRank* const change = segment.layers[i].change;
      if (change == nullptr) continue;
      const at::Tensor& d_b = low_rank[s].d_b[next++];
      if (change->b().trainable()) change->b().add_gradient(d_b);
      if (change->a().trainable()) change->a().add_gradient(d_a[i]);
    }
  }
}

/// The lows of a segment's changes, undefined without one; leaves in the segment what its backward
/// reads.
Tensors lows_of(const ops::Linear::Functions& products, Segment& segment, const at::Tensor& x,
                bool has_gradient) {
  Tensors lows = has_gradient ? Tensors() : lows_of_few(products, x, segment.layers);
  if (!lows.empty()) return lows;
  segment.a = scaled_a(segment.layers);
  segment.low = low_of(products, segment, x);
  return split(segment.low, 1, segment.layers);
}

/// The outputs; where rows differ, their changes are added to the shared products.
Tensors outputs_of(const LinearInput& given, Product& product, bool has_gradient) {
  const at::Tensor input = ops::detached(given.value);
  std::vector<ops::Products> sums;
  for (const Parameter* weight : product.weights)
    sums.push_back({{input, weight->data(), weight->linear_place()}});
  std::vector<Tensors> lows(product.segments.size());
  for (std::size_t s = 0; s < product.segments.size(); ++s) {
    Segment& segment = product.segments[s];
    if (changes_any(segment.layers))
      lows[s] = lows_of(*product.products, segment, segment.own(input), has_gradient);
  }
  const auto each_change = [&](std::size_t s, const auto& use) {
    for (std::size_t i = 0; i < lows[s].size(); ++i) {
      if (LowRank* const change = product.segments[s].layers[i].change)
        use(i, lows[s][i], change->b().data());
    }
  };
  if (product.is_one) {
    each_change(0, [&](std::size_t i, const at::Tensor& low, const at::Tensor& b) {
      sums[i].push_back({low, b});
    });
  }
  product.grouped.forward(input);
  Tensors outputs;
  if (!given.outputs_unused)
    outputs = product.grouped.outputs(*product.products, sums, ops::detached(given.residual));
  if (outputs.empty()) {
    outputs = nn::products(*product.products, given, sums);
    if (!given.outputs_unused) product.grouped.add_to(outputs);
  }
  for (std::size_t s = 0; s < lows.size() && !product.is_one && !given.outputs_unused; ++s) {
    each_change(s, [&](std::size_t i, const at::Tensor& low, const at::Tensor& b) {
      product.segments[s].own(outputs[i]).addmm_(low, b.t());
    });
  }
  return outputs;
}

}  // namespace

bool ChangedRows::has_change() const { return changes_any(layers); }

Tensors changed_linears(const ops::KernelTable& kernels, const LinearInput& x,
                        const std::vector<ChangedLinear>& layers) {
  return changed_linears(kernels, x, {ChangedRows{x.value.size(0), layers}});
}

Tensors changed_linears(const ops::KernelTable& kernels, const LinearInput& given,
                        std::vector<ChangedRows> segments) {
  const at::Tensor& x = given.value;
  const bool wants_input = x.requires_grad();
  Product product{.weights = {},
                  .segments = {},
                  .grouped = {},
                  .is_one = segments.size() == 1,
                  .input = given.again,
                  .postponed = wants_input ? given.postponed : nullptr,
                  .wants_input_gradient = wants_input,
                  .products = &kernels.get<ops::Linear>()};
  bool has_groups = false;
  if (!product.is_one) {
    const auto& functions = kernels.get<ops::GroupedLowRank>();
    product.grouped = GroupedChanges(functions);
    has_groups = functions.lows != nullptr;
  }
  if (!product.input) product.input = [saved = ops::detached(x)] { return saved; };
  Tensors inputs = {x};
  for (const ChangedLinear& layer : segments.at(0).layers) {
    product.weights.push_back(layer.weight);
    inputs.push_back(layer.weight->anchor());
  }
  std::int64_t first = 0;
  for (ChangedRows& part : segments) {
    for (const ChangedLinear& layer : part.layers) {
      // An input that asks for a gradient is reason enough to visit the operator.
      if (layer.change == nullptr || wants_input) continue;
      inputs.push_back(layer.change->a().anchor());
      inputs.push_back(layer.change->b().anchor());
    }
    const std::int64_t rows = part.rows;
    if (has_groups && part.has_change() && !drops(part.layers)) {
      product.grouped.add(first, rows, part.layers);
    } else if (product.is_one || part.has_change()) {
      product.segments.push_back({first, rows, std::move(part.layers), {}, {}});
    }
    first += rows;
  }
  inputs.push_back(given.residual);
  const bool has_gradient = at::GradMode::is_enabled();
  const Tensors outputs =
      ops::run_without_gradient([&] { return outputs_of(given, product, has_gradient); });
  return ops::with_gradient(
      "low_rank_linear", inputs, outputs,
      [product = std::move(product), count = inputs.size(),
       has_residual = given.residual.defined()](const Tensors& grads) -> Tensors {
        Tensors result(count);
        if (has_residual) result.back() = grads[0];
        result[0] = product.backward(grads);
        return result;
      });
}

}  // namespace heddle::nn
