#include "adapters/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>

#include "adapters/initialize.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/linear/linear.h"

namespace heddle::adapters {

using ops::Tensors;
using LowRankGradients = ops::Linear::Functions::LowRankGradients;

double LoraOptions::scaling() const {
  return rslora ? alpha / std::sqrt(static_cast<double>(rank)) : alpha / static_cast<double>(rank);
}

namespace {

/// The part of the weight's placement that divides one of its dimensions.
nn::Placement along(const nn::Placement& weight, std::int64_t tensor_dim) {
  nn::Placement placement;
  std::copy_if(weight.begin(), weight.end(), std::back_inserter(placement),
               [&](const nn::Shard& shard) { return shard.tensor_dim == tensor_dim; });
  return placement;
}

}  // namespace

namespace {

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

Lora::Lora(std::string module, std::int64_t in_features, std::int64_t out_features, double scaling,
           std::int64_t rank, double dropout, std::uint64_t seed,
           const nn::Placement& weight_placement)
    : module_(std::move(module)),
      a_(module_ + ".lora_A.weight", {rank, in_features}, along(weight_placement, 1)),
      b_(module_ + ".lora_B.weight", {out_features, rank}, along(weight_placement, 0)),
      scaling_(scaling),
      dropout_probability_(dropout),
      seed_(seed) {
  // Where the weight is divided, the other factor is whole and sees the work of one rank.
  if (!a_.placement().empty()) b_.set_partial_gradient();
  if (!b_.placement().empty()) a_.set_partial_gradient();
}

std::optional<ops::DropoutMask> Lora::mask_of(const at::Tensor& x) {
  if (dropout_probability_ == 0 || !dropout_.draws.defined()) return std::nullopt;
  if (!features_.defined()) {
    const std::vector<std::int64_t> features = a_.global_indices(1);
    features_in_runs_ = in_runs(features);
    features_ = device::upload(features, x.device());
  }
  const bool is_own_rows = x.size(0) < dropout_.draws.size(0);
  const at::Tensor draws =
      dropout_.draws.narrow(0, is_own_rows ? dropout_.first_row : 0, x.size(0));
  ops::DropoutMask mask{dropout_key(seed_, module_), draws, features_, dropout_probability_,
                        features_in_runs_};
  if (mask.threshold() == 0) return std::nullopt;
  return mask;
}

namespace {

/// A layer and its adapter, null if it has none.
struct Layer {
  Lora* lora;
  nn::Parameter* weight;
  std::optional<ops::DropoutMask> mask;  ///< What the adapter drops of the input.
};

bool drops(const std::vector<Layer>& layers) {
  return std::any_of(layers.begin(), layers.end(),
                     [](const Layer& layer) { return layer.mask.has_value(); });
}

/// The part of dimension `dim` of `stacked` that belongs to each layer; undefined without an
/// adapter.
Tensors split(const at::Tensor& stacked, std::int64_t dim, const std::vector<Layer>& layers) {
  Tensors parts;
  std::int64_t first = 0;
  for (const Layer& layer : layers) {
    if (layer.lora == nullptr) {
      parts.emplace_back();
      continue;
    }
    parts.push_back(stacked.narrow(dim, first, layer.lora->rank()));
    first += layer.lora->rank();
  }
  return parts;
}

/// Multiplies the rows of each adapter [sum of ranks, ...] by its scale.
void scale(const at::Tensor& stacked, const std::vector<Layer>& layers) {
  std::set<double> scales;
  for (const Layer& layer : layers) {
    if (layer.lora != nullptr) scales.insert(layer.lora->scaling());
  }
  if (scales.size() == 1) {
    at::Tensor(stacked).mul_(*scales.begin());
    return;
  }
  const Tensors parts = split(stacked, 0, layers);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].lora != nullptr) at::Tensor(parts[i]).mul_(layers[i].lora->scaling());
  }
}

/// The adapters' A, each with its scale, one below the other [sum of ranks, in]: the input is read
/// once for all of them.
at::Tensor scaled_a(const std::vector<Layer>& layers) {
  Tensors rows;
  for (const Layer& layer : layers) {
    if (layer.lora != nullptr) rows.push_back(layer.lora->a().data());
  }
  at::Tensor stacked = at::cat(rows);
  scale(stacked, layers);
  return stacked;
}

/// What a pass over layers that share their input leaves for its backward.
struct Pass {
  std::vector<Layer> layers;
  at::Tensor a;                       ///< scaled_a
  at::Tensor low;                     ///< x a^T, of what each adapter sees of x; [T, sum of ranks]
  std::function<at::Tensor()> input;  ///< x
  std::shared_ptr<nn::PostponedWork> postponed;  ///< See nn::LinearInput.
  bool wants_input_gradient;
  const ops::Linear::Functions* products;

  at::Tensor backward(const Tensors& grads) const;

 private:
  void add_gradients(const LowRankGradients& low_rank, const Tensors& trained_dy) const;
};

/// For layers of which the adapters drop elements.
ops::DroppedFactors dropped(const Pass& pass) {
  ops::DroppedFactors factors{pass.a, {}, {}};
  for (const Layer& layer : pass.layers) {
    if (layer.lora == nullptr) continue;
    TORCH_CHECK(layer.mask.has_value(), layer.lora->module(), ": all adapters of layers that ",
                "share an input drop elements of it, or none");
    factors.ranks.push_back(layer.lora->rank());
    factors.masks.push_back(*layer.mask);
  }
  return factors;
}

/// x a^T. One product where all adapters see the whole of x.
at::Tensor low_of(const Pass& pass, const at::Tensor& x) {
  return drops(pass.layers) ? pass.products->dropped_low(x, dropped(pass))
                            : pass.products->forward({{{x, pass.a}}})[0];
}

/// d_low^T x, scaled: the gradients of the adapters' A one below the other.
at::Tensor gradient_of_a(const Pass& pass, const at::Tensor& d_low, const at::Tensor& x) {
  const at::Tensor d_a = drops(pass.layers)
                             ? pass.products->dropped_gradient(x, d_low, dropped(pass))
                             : ops::wide_product(d_low, x);
  scale(d_a, pass.layers);
  return d_a;
}

/// Accumulates the gradients of weights and adapters; returns that of the input, if it is wanted.
at::Tensor Pass::backward(const Tensors& grads) const {
  const Tensors lows = split(low, 1, layers);
  std::vector<ops::LowRankChange> changes;
  ops::Products terms;
  Tensors trained_dy;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto& [lora, weight, mask] = layers[i];
    const at::Tensor dy = grads[i].defined()
                              ? grads[i]
                              : at::zeros({low.size(0), weight->local_shape()[0]}, low.options());
    if (lora != nullptr) changes.push_back({dy, lora->b().data(), lows[i]});
    trained_dy.push_back(weight->trainable() ? dy : at::Tensor());
    terms.push_back({dy, weight->data()});
  }
  const LowRankGradients low_rank = products->low_rank_backward(changes);
  Pass rest = *this;
  rest.postponed.reset();  // which is to hold it
  nn::run_or_postpone(postponed, [rest = std::move(rest), trained_dy, low_rank] {
    rest.add_gradients(low_rank, trained_dy);
  });
  if (!wants_input_gradient) return {};
  const bool is_dropped = drops(layers);
  if (!is_dropped) terms.push_back({low_rank.d_low, a});
  at::Tensor dx = products->backward(terms);
  if (is_dropped) products->add_dropped(dx, low_rank.d_low, dropped(*this));
  return dx;
}

/// Of adapters and weights.
void Pass::add_gradients(const LowRankGradients& low_rank, const Tensors& trained_dy) const {
  const at::Tensor x = input();
  const Tensors d_a = split(gradient_of_a(*this, low_rank.d_low, x), 0, layers);
  std::size_t change = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    if (trained_dy[i].defined()) nn::accumulate_product(*layer.weight, trained_dy[i], x);
    if (layer.lora == nullptr) continue;
    const at::Tensor& d_b = low_rank.d_b[change++];
    if (layer.lora->b().trainable()) layer.lora->b().add_gradient(d_b);
    if (layer.lora->a().trainable()) layer.lora->a().add_gradient(d_a[i]);
  }
}

Tensors forward_together(const ops::KernelTable& kernels, const nn::LinearInput& given,
                         const std::vector<Layer>& layers) {
  const at::Tensor& x = given.value;
  const ops::Linear::Functions& products = kernels.get<ops::Linear>();
  const bool wants_input = x.requires_grad();
  Pass pass{.layers = layers,
            .a = {},
            .low = {},
            .input = given.again,
            .postponed = wants_input ? given.postponed : nullptr,
            .wants_input_gradient = wants_input,
            .products = &products};
  if (!pass.input) pass.input = [saved = ops::detached(x)] { return saved; };
  const Tensors outputs = ops::run_without_gradient([&] {
    const at::Tensor input = ops::detached(x);
    pass.a = scaled_a(layers);
    pass.low = low_of(pass, input);
    const Tensors lows = split(pass.low, 1, layers);
    std::vector<ops::Products> sums;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const auto& [lora, weight, mask] = layers[i];
      sums.push_back({{input, weight->data()}});
      if (lora != nullptr) sums.back().push_back({lows[i], lora->b().data()});
    }
    return nn::products(products, given, sums);
  });
  Tensors inputs = {x};
  for (const auto& [lora, weight, mask] : layers) {
    inputs.push_back(weight->anchor());
    if (lora == nullptr) continue;
    inputs.push_back(lora->a().anchor());
    inputs.push_back(lora->b().anchor());
  }
  inputs.push_back(given.residual);
  return ops::with_gradient(
      "lora_linear", inputs, outputs,
      [pass = std::move(pass), count = inputs.size(),
       has_residual = given.residual.defined()](const Tensors& grads) -> Tensors {
        Tensors result(count);
        if (has_residual) result.back() = grads[0];
        result[0] = pass.backward(grads);
        return result;
      });
}

}  // namespace

std::vector<at::Tensor> Lora::forward(const ops::KernelTable& kernels, const nn::LinearInput& x,
                                      const std::vector<nn::Linear*>& layers) {
  std::vector<Layer> all;
  for (nn::Linear* layer : layers) {
    auto* lora = dynamic_cast<Lora*>(layer->adapter());
    all.push_back({lora, &layer->weight(), {}});
    if (lora != nullptr) all.back().mask = lora->mask_of(x.value);
  }
  return forward_together(kernels, x, all);
}

void Lora::visit_parameters(const std::function<void(nn::Parameter&)>& visit) {
  visit(a_);
  visit(b_);
}

void Lora::initialize() {
  fill_kaiming(a_, seed_);
  b_.owned().zero_();
}

at::Tensor Lora::delta() const {
  const ops::NoGradient guard;
  const auto wide = a_.value().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::mm(b_.value().to(wide), a_.value().to(wide)) * scaling_;
}

}  // namespace heddle::adapters
