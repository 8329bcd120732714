#include "nn/low_rank.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/linear/few_row_lows.h"

namespace heddle::nn {

using ops::Tensors;
using LowRankGradients = ops::Linear::Functions::LowRankGradients;

namespace {

/// The part of the weight's placement that divides one of its dimensions.
Placement along(const Placement& weight, std::int64_t tensor_dim) {
  Placement placement;
  std::copy_if(weight.begin(), weight.end(), std::back_inserter(placement),
               [&](const Shard& shard) { return shard.tensor_dim == tensor_dim; });
  return placement;
}

/// See ops::DropoutMask.
bool in_runs(const std::vector<std::int64_t>& features) {
  constexpr std::size_t kRun = 8;
  for (std::size_t i = 0; i < features.size(); ++i) {
    const std::int64_t first = features[i / kRun * kRun];
    if (first % kRun != 0 || features[i] != first + static_cast<std::int64_t>(i % kRun))
      return false;
  }
  return features.size() % kRun == 0;
}

}  // namespace

LowRank::LowRank(const std::string& module, std::int64_t in_features, std::int64_t out_features,
                 double scaling, std::int64_t rank, LowRankDropout dropout,
                 const Placement& weight_placement)
    : a_(module + ".lora_A.weight", {rank, in_features}, along(weight_placement, 1)),
      b_(module + ".lora_B.weight", {out_features, rank}, along(weight_placement, 0)),
      scaling_(scaling),
      dropout_(dropout) {
  // Where the weight is divided, the other factor is whole and sees the work of one rank.
  if (!a_.placement().empty()) b_.set_partial_gradient();
  if (!b_.placement().empty()) a_.set_partial_gradient();
}

std::optional<ops::DropoutMask> LowRank::mask_of(const at::Tensor& x, const at::Tensor& draws) {
  if (dropout_.probability == 0 || !draws.defined()) return std::nullopt;
  if (!features_.defined()) {
    const std::vector<std::int64_t> features = a_.global_indices(1);
    features_in_runs_ = in_runs(features);
    features_ = device::upload(features, x.device());
  }
  ops::DropoutMask mask{dropout_.key, draws, features_, dropout_.probability, features_in_runs_};
  if (mask.threshold() == 0) return std::nullopt;
  return mask;
}

LowRankExperts::LowRankExperts(const std::string& parameter, ExpertWeights& weights, double scaling,
                               std::int64_t rank)
    : a_(parameter + ".lora_A.weight", {weights.experts(), rank, weights.in_features()},
         weights.weight().placement()),
      b_(parameter + ".lora_B.weight", {weights.experts(), weights.out_features(), rank},
         weights.weight().placement()),
      scaling_(scaling) {}

namespace {

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

/// Multiplies the rows of each change [sum of ranks, ...] by its scale.
void scale(const at::Tensor& stacked, const std::vector<ChangedLinear>& layers) {
  std::set<double> scales;
  for (const ChangedLinear& layer : layers) {
    if (layer.change != nullptr) scales.insert(layer.change->scaling());
  }
  if (scales.size() == 1) {
    at::Tensor(stacked).mul_(*scales.begin());
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
  at::Tensor stacked = at::cat(rows);
  scale(stacked, layers);
  return stacked;
}

/// A product of layers that share their input, as its backward needs it.
struct Product {
  std::vector<ChangedLinear> layers;
  at::Tensor a;                       ///< scaled_a
  at::Tensor low;                     ///< x a^T, of what each change sees of x; [T, sum of ranks]
  std::function<at::Tensor()> input;  ///< x
  std::shared_ptr<PostponedWork> postponed;  ///< See LinearInput.
  bool wants_input_gradient;
  const ops::Linear::Functions* products;

  at::Tensor backward(const Tensors& grads) const;

 private:
  void add_gradients(const LowRankGradients& low_rank, const Tensors& trained_dy) const;
};

/// For layers whose changes drop elements.
ops::DroppedFactors dropped(const Product& product) {
  ops::DroppedFactors factors{product.a, {}, {}};
  for (const ChangedLinear& layer : product.layers) {
    if (layer.change == nullptr) continue;
    TORCH_CHECK(layer.mask.has_value(), layer.change->a().name(), ": all changes of layers that ",
                "share an input drop elements of it, or none");
    factors.ranks.push_back(layer.change->rank());
    factors.masks.push_back(*layer.mask);
  }
  return factors;
}

/// x a^T. One product where all changes see the whole of x.
at::Tensor low_of(const Product& product, const at::Tensor& x) {
  return drops(product.layers) ? product.products->dropped_low(x, dropped(product))
                               : product.products->forward({{{x, product.a}}})[0];
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
at::Tensor gradient_of_a(const Product& product, const at::Tensor& d_low, const at::Tensor& x) {
  const at::Tensor d_a = drops(product.layers)
                             ? product.products->dropped_gradient(x, d_low, dropped(product))
                             : ops::wide_product(d_low, x);
  scale(d_a, product.layers);
  return d_a;
}

/// Accumulates the gradients of weights and changes; returns that of the input, if it is wanted.
at::Tensor Product::backward(const Tensors& grads) const {
  const Tensors lows = split(low, 1, layers);
  std::vector<ops::LowRankChange> changes;
  ops::Products terms;
  Tensors trained_dy;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto& [change, weight, mask] = layers[i];
    const at::Tensor dy = grads[i].defined()
                              ? grads[i]
                              : at::zeros({low.size(0), weight->local_shape()[0]}, low.options());
    if (change != nullptr) changes.push_back({dy, change->b().data(), lows[i]});
    trained_dy.push_back(weight->trainable() ? dy : at::Tensor());
    terms.push_back({dy, weight->data()});
  }
  const LowRankGradients low_rank = products->low_rank_backward(changes);
  Product rest = *this;
  rest.postponed.reset();  // which is to hold it
  run_or_postpone(postponed, [rest = std::move(rest), trained_dy, low_rank] {
    rest.add_gradients(low_rank, trained_dy);
  });
  if (!wants_input_gradient) return {};
  const bool is_dropped = drops(layers);
  if (!is_dropped) terms.push_back({low_rank.d_low, a});
  at::Tensor dx = products->backward(terms);
  if (is_dropped) products->add_dropped(dx, low_rank.d_low, dropped(*this));
  return dx;
}

/// Adds the gradients of changes and weights.
void Product::add_gradients(const LowRankGradients& low_rank, const Tensors& trained_dy) const {
  const at::Tensor x = input();
  const Tensors d_a = split(gradient_of_a(*this, low_rank.d_low, x), 0, layers);
  std::size_t change = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const ChangedLinear& layer = layers[i];
    if (trained_dy[i].defined()) accumulate_product(*layer.weight, trained_dy[i], x);
    if (layer.change == nullptr) continue;
    const at::Tensor& d_b = low_rank.d_b[change++];
    if (layer.change->b().trainable()) layer.change->b().add_gradient(d_b);
    if (layer.change->a().trainable()) layer.change->a().add_gradient(d_a[i]);
  }
}

}  // namespace

Tensors changed_linears(const ops::KernelTable& kernels, const LinearInput& given,
                        const std::vector<ChangedLinear>& layers) {
  const at::Tensor& x = given.value;
  const ops::Linear::Functions& products = kernels.get<ops::Linear>();
  const bool wants_input = x.requires_grad(), has_gradient = at::GradMode::is_enabled();
  Product product{.layers = layers,
                  .a = {},
                  .low = {},
                  .input = given.again,
                  .postponed = wants_input ? given.postponed : nullptr,
                  .wants_input_gradient = wants_input,
                  .products = &products};
  if (!product.input) product.input = [saved = ops::detached(x)] { return saved; };
  const Tensors outputs = ops::run_without_gradient([&] {
    const at::Tensor input = ops::detached(x);
    Tensors lows = has_gradient ? Tensors() : lows_of_few(products, input, layers);
    if (lows.empty()) {
      product.a = scaled_a(layers);
      product.low = low_of(product, input);
      lows = split(product.low, 1, layers);
    }
    std::vector<ops::Products> sums;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const auto& [change, weight, mask] = layers[i];
      sums.push_back({{input, weight->data()}});
      if (change != nullptr) sums.back().push_back({lows[i], change->b().data()});
    }
    return nn::products(products, given, sums);
  });
  Tensors inputs = {x};
  for (const auto& [change, weight, mask] : layers) {
    inputs.push_back(weight->anchor());
    if (change == nullptr) continue;
    inputs.push_back(change->a().anchor());
    inputs.push_back(change->b().anchor());
  }
  inputs.push_back(given.residual);
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
