#include "nn/linear.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <utility>

#include "nn/adapters.h"
#include "nn/changed_rows.h"
#include "nn/pass.h"
#include "nn/row_adapters.h"
#include "ops/autograd.h"
#include "ops/embedding/embedding.h"
#include "ops/linear/few_row_layers.h"
#include "ops/rms_norm/rms_norm.h"

namespace heddle::nn {

Linear::Linear(std::string name, std::int64_t out_features, std::int64_t in_features,
               Placement placement)
    : module_(module_of(name)),
      own_(std::make_unique<Parameter>(std::move(name),
                                       std::vector<std::int64_t>{out_features, in_features},
                                       std::move(placement))),
      weight_(own_.get()) {}

std::string module_of(const std::string& parameter) {
  return parameter.ends_with(".weight") ? parameter.substr(0, parameter.size() - 7) : parameter;
}

void PostponedWork::run() {
  for (const auto& work : std::exchange(work_, {})) work();
}

void run_or_postpone(const std::shared_ptr<PostponedWork>& postponed, std::function<void()> work) {
  if (postponed) {
    postponed->add(std::move(work));
  } else {
    work();
  }
}

LinearInput LinearInput::made_again(
    const std::function<at::Tensor(const ops::OutputAgain&)>& make) {
  const auto value = std::make_shared<at::Tensor>();
  const auto postponed = std::make_shared<PostponedWork>();
  LinearInput input(make([value, postponed](const at::Tensor& output) {
    *value = output;
    postponed->run();
    *value = at::Tensor();
  }));
  // Without a gradient no backward will make it.
  if (!input.value.requires_grad()) return input;
  input.again = [value] { return *value; };
  input.postponed = postponed;
  return input;
}

void accumulate_product(Parameter& weight, const at::Tensor& dy, const at::Tensor& x) {
  if (!weight.accumulates_in_place() && x.is_cuda()) {
    // cuBLAS sums half precision in fp32: keep those sums, add to them in the product.
    if (weight.gradient().defined()) {
      at::Tensor& sum = weight.gradient_buffer();
      at::addmm_out(sum, sum, dy.t(), x, sum.scalar_type());
    } else {
      weight.add_gradient(ops::wide_product(dy, x));
    }
  } else if (weight.accumulates_in_place() && weight.gradient().defined()) {
    weight.gradient_buffer().addmm_(dy.t(), x);
  } else {
    weight.add_gradient(at::mm(dy.t(), x));
  }
}

ops::Tensors products(const ops::Linear::Functions& functions, const LinearInput& x,
                      const std::vector<ops::Products>& sums) {
  TORCH_CHECK(!x.residual.defined() || sums.size() == 1, "a residual is that of one layer, not of ",
              sums.size());
  if (!x.outputs_unused && x.residual.defined())
    return {functions.forward_onto(ops::detached(x.residual), sums[0])};
  if (!x.outputs_unused) return functions.forward(sums);
  ops::Tensors outputs;
  for (const ops::Products& terms : sums) {
    const ops::Product& first = terms.at(0);
    outputs.push_back(at::empty({first.a.size(0), first.b.size(0)}, first.a.options()));
  }
  return outputs;
}

std::vector<at::Tensor> linears(const ops::KernelTable& kernels, const LinearInput& input,
                                const std::vector<Parameter*>& weights) {
  const at::Tensor& x = input.value;
  const ops::Linear::Functions& functions = kernels.get<ops::Linear>();
  const ops::Tensors outputs = ops::run_without_gradient([&] {
    std::vector<ops::Products> sums;
    for (const Parameter* weight : weights)
      sums.push_back({{ops::detached(x), weight->data(), weight->linear_place()}});
    return products(functions, input, sums);
  });
  // A frozen weight needs no input kept; an input without gradient needs no product.
  const bool any_trained = std::any_of(weights.begin(), weights.end(),
                                       [](const Parameter* weight) { return weight->trainable(); });
  const auto again = any_trained ? input.again : std::function<at::Tensor()>();
  const at::Tensor saved = any_trained && !again ? ops::detached(x) : at::Tensor();
  const bool want_input = x.requires_grad(), has_residual = input.residual.defined();
  ops::Tensors inputs = {x};
  for (const Parameter* weight : weights) inputs.push_back(weight->anchor());
  inputs.push_back(input.residual);
  return ops::with_gradient(
      "linear", inputs, outputs,
      [saved, again, postponed = want_input ? input.postponed : nullptr, want_input, has_residual,
       weights, &functions](const ops::Tensors& grads) -> ops::Tensors {
        const auto accumulate = [saved, again, weights, grads] {
          const at::Tensor x = again ? again() : saved;
          for (std::size_t i = 0; i < weights.size(); ++i) {
            if (grads[i].defined() && weights[i]->trainable())
              accumulate_product(*weights[i], grads[i], x);
          }
        };
        run_or_postpone(postponed, accumulate);
        ops::Tensors result(weights.size() + 2);
        if (has_residual) result.back() = grads[0];
        ops::Products terms;
        for (std::size_t i = 0; i < weights.size(); ++i) {
          if (grads[i].defined())
            terms.push_back({grads[i], weights[i]->data(), weights[i]->linear_place()});
        }
        if (want_input && !terms.empty()) result[0] = functions.backward(terms);
        return result;
      });
}

namespace {

/// Rows [first, first + count) of an input.
LinearInput rows_of(const LinearInput& x, at::Tensor value, std::int64_t first) {
  LinearInput part(std::move(value));
  const std::int64_t count = part.value.size(0);
  if (x.again)
    part.again = [again = x.again, first, count] { return again().narrow(0, first, count); };
  part.postponed = x.postponed;
  part.outputs_unused = x.outputs_unused;
  return part;
}

/// The layers in one launch, in a pass without gradient whose rows have the same adapters; nothing
/// where the chosen kernels have none.
ops::Tensors in_one_launch(const Pass& pass, const LinearInput& x,
                           const std::vector<Linear*>& layers, bool is_gated) {
  if (at::GradMode::is_enabled() || x.outputs_unused) return {};
  const std::vector<AdaptedRows> segments = adapters_of(pass, x.value.size(0));
  if (segments.size() > 1 || (segments.size() == 1 && segments[0].draws.defined())) return {};
  ops::FewRowLayers call;
  call.x = x.value;
  call.residual = x.residual;
  call.is_gated = is_gated;
  if (x.norm) {
    call.norm = x.norm->weight;
    call.eps = x.norm->eps;
  }
  const AdapterSet* const set = segments.empty() ? nullptr : segments[0].set;
  if (pass.row_adapters != nullptr) call.slots = pass.row_adapters->of(layers);
  for (Linear* layer : layers) {
    call.layers.push_back({layer->weight().data(), {}, {}});
    LowRank* const change = set != nullptr ? set->of(*layer) : nullptr;
    if (change == nullptr) continue;
    call.layers.back().a = change->a().data();
    call.layers.back().b = change->b().data();
    call.layers.back().scaling = change->scaling();
  }
  return ops::few_row_layers(*pass.kernels, call);
}

/// The layers of a pass whose rows' adapters stand in tables; nothing where these change none of
/// them. `is_gated`: one output, silu of the first times the second.
ops::Tensors with_row_adapters(const Pass& pass, const LinearInput& x,
                               const std::vector<Linear*>& layers, bool is_gated) {
  if (pass.row_adapters == nullptr) return {};
  const ops::KernelTable& kernels = *pass.kernels;
  const std::optional<ops::LowRankSlots> slots = pass.row_adapters->of(layers);
  if (!slots) return {};
  const ops::GroupedLowRank::Functions& functions = kernels.get<ops::GroupedLowRank>();
  const at::Tensor lows = functions.slot_lows(x.value, *slots);
  std::vector<Parameter*> weights;
  for (Linear* layer : layers) weights.push_back(&layer->weight());
  ops::Tensors outputs = linears(kernels, x, weights);
  if (is_gated) return {functions.gated_slot_outputs(outputs[0], outputs[1], lows, *slots)};
  functions.add_slot_outputs(outputs, lows, *slots);
  return outputs;
}

LinearInput with_norm_applied(const ops::KernelTable& kernels, LinearInput x) {
  if (x.norm) x.value = ops::rms_norm(kernels, x.value, x.norm->weight, x.norm->eps);
  x.norm.reset();
  return x;
}

/// The changes of layers in these of the rows of x.
ChangedRows changes_of(const at::Tensor& x, const std::vector<Linear*>& layers,
                       const AdaptedRows& rows) {
  ChangedRows changed{rows.rows, {}};
  for (Linear* layer : layers) {
    LowRank* const change = rows.set != nullptr ? rows.set->of(*layer) : nullptr;
    changed.layers.push_back({change, &layer->weight(), {}});
    if (change != nullptr) changed.layers.back().mask = change->mask_of(x, rows.draws);
  }
  return changed;
}

/// `segments`: of all rows of x.
std::vector<at::Tensor> with_adapters(const ops::KernelTable& kernels, const LinearInput& x,
                                      const std::vector<Linear*>& layers,
                                      const std::vector<AdaptedRows>& segments) {
  std::vector<ChangedRows> changed;
  bool is_changed = false;
  for (const AdaptedRows& segment : segments) {
    changed.push_back(changes_of(x.value, layers, segment));
    is_changed = is_changed || changed.back().has_change();
  }
  if (is_changed) return changed_linears(kernels, x, std::move(changed));
  std::vector<Parameter*> weights;
  for (Linear* layer : layers) weights.push_back(&layer->weight());
  return linears(kernels, x, weights);
}

}  // namespace

at::Tensor gated_in_one(const Pass& pass, const LinearInput& x, Linear& gate, Linear& up) {
  ops::Tensors found = in_one_launch(pass, x, {&gate, &up}, /*is_gated=*/true);
  if (found.empty() && pass.row_adapters != nullptr) {
    found = with_row_adapters(pass, with_norm_applied(*pass.kernels, x), {&gate, &up},
                              /*is_gated=*/true);
  }
  return found.empty() ? at::Tensor() : found[0];
}

std::vector<at::Tensor> forward_all(const Pass& pass, const LinearInput& given,
                                    const std::vector<Linear*>& layers) {
  std::vector<at::Tensor> found = in_one_launch(pass, given, layers, /*is_gated=*/false);
  if (!found.empty()) return found;
  const LinearInput x = with_norm_applied(*pass.kernels, given);
  found = with_row_adapters(pass, x, layers, /*is_gated=*/false);
  if (!found.empty()) return found;
  const std::vector<AdaptedRows> segments = adapters_of(pass, x.value.size(0));
  if (segments.size() < 2 || !at::globalContext().deterministicAlgorithms())
    return with_adapters(*pass.kernels, x, layers, segments);
  // Segment by segment: a row's bits do not depend on what other sets do in the same pass.
  std::vector<std::int64_t> sizes;
  for (const AdaptedRows& segment : segments) sizes.push_back(segment.rows);
  const std::vector<at::Tensor> values = x.value.split_with_sizes(sizes, 0);
  std::vector<at::Tensor> residuals(segments.size());
  if (x.residual.defined()) residuals = x.residual.split_with_sizes(sizes, 0);
  std::vector<std::vector<at::Tensor>> outputs(layers.size());
  std::int64_t first = 0;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    LinearInput part = rows_of(x, values[s], first);
    part.residual = residuals[s];
    const std::vector<at::Tensor> y = with_adapters(*pass.kernels, part, layers, {segments[s]});
    for (std::size_t i = 0; i < layers.size(); ++i) outputs[i].push_back(y[i]);
    first += segments[s].rows;
  }
  std::vector<at::Tensor> joined;
  for (const std::vector<at::Tensor>& parts : outputs) joined.push_back(at::cat(parts));
  return joined;
}

at::Tensor embedding(const ops::KernelTable& kernels, const at::Tensor& tokens, Parameter& table) {
  at::Tensor y = ops::run_without_gradient([&] { return table.value().index_select(0, tokens); });
  const ops::Embedding::Functions& gradient = kernels.get<ops::Embedding>();
  return ops::with_gradient("embedding", {table.anchor()}, {y},
                            [tokens, &table, &gradient](const ops::Tensors& grads) -> ops::Tensors {
                              if (grads[0].defined() && tokens.numel() > 0)
                                gradient.backward(tokens, grads[0], table.gradient_buffer());
                              return {{}};
                            })[0];
}

}  // namespace heddle::nn
