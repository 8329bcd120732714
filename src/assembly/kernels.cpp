#include "assembly/kernels.h"

#include <set>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "device/device.h"
#include "device/npu_chip.h"
#include "ops/gated_delta_net/npu/path.h"
#include "ops/linear/linear.h"

namespace heddle::assembly {
namespace {

void choose_delta_rule(const ModelRecipe& recipe, const runtime::Context& context,
                       ops::KernelPolicy& policy) {
  constexpr const char* kOperator = "gated_delta_rule";
  const nn::GatedDeltaNetDims* const dims = recipe.config.gated_delta_net();
  if (context.device.type() != c10::DeviceType::PrivateUse1 || dims == nullptr) return;
  const bool is_training = trains(recipe.purpose);
  const bool is_ulysses = recipe.context_method == ops::ContextMethod::kUlysses;
  const std::int64_t head_ranks =
      context.mesh.size(comm::Dim::kTp) * (is_ulysses ? context.mesh.size(comm::Dim::kCp) : 1);
  const std::string soc = device::properties(context.device, 16).name;
  const auto path =
      ops::gated_delta_rule_npu::choose_path({.soc = soc,
                                              .is_training = is_training,
                                              .dtype = context.dtype,
                                              .num_k_heads = dims->num_key_heads / head_ranks,
                                              .num_v_heads = dims->num_value_heads / head_ranks,
                                              .head_k_dim = dims->key_head_dim,
                                              .head_v_dim = dims->value_head_dim});
  if (path.kernel.empty()) {
    // The simulated device's tests of equality lift the rule of dtypes.
    if (!device::npu_chip(soc)) return;
    throw_error<DeviceError>("{} on {}: {}", kOperator, soc, path.reason);
  }
  const auto [chosen, is_new] = policy.chosen_by_user.emplace(kOperator, path.kernel);
  log::info("{} on {}, {}: {} ({})", kOperator, soc, is_training ? "training" : "generation",
            chosen->second, is_new ? path.reason : "kernels.gated_delta_rule");
}

void warn_of_slow_rank(const ModelRecipe& recipe, const ops::Linear::Functions& linear) {
  const auto* adapters = std::get_if<NewAdapters>(&recipe.adapters);
  if (adapters == nullptr || linear.reads_once == nullptr ||
      linear.reads_once(adapters->options.rank))
    return;
  log::warning(
      "adapter.rank {}: the backward of the adapters reads each output gradient twice, where "
      "multiples of 8 up to 32 have a kernel that reads it once",
      adapters->options.rank);
}

/// Names the layers that a kernel of linear layers computes in the model's type although it
/// computes others in less.
void warn_of_wide_layers(Model& model, const ops::Linear::Functions& functions) {
  if (functions.is_narrow == nullptr) return;
  std::set<std::string> wide;
  model.visit_linears([&](nn::Linear& linear) {
    if (&linear == model.lm_head() ||
        functions.is_narrow(linear.out_features(), linear.in_features()))
      return;
    const std::string& name = linear.weight().name();
    const std::size_t layer = name.find("layers.");
    wide.insert(
        fmt::format("{} [{}, {}]",
                    layer == std::string::npos ? name : name.substr(name.find('.', layer + 7) + 1),
                    linear.out_features(), linear.in_features()));
  });
  log::warning(
      "kernels.linear: in the model's type stay the gradients of weights, the products of "
      "adapters, the language-model head, micro-batches below {} tokens, and {}",
      functions.narrow_rows,
      wide.empty() ? "no layer" : fmt::format("the layers {}", fmt::join(wide, ", ")));
}

}  // namespace

std::int64_t on_chip_limit(c10::Device device) {
  return device.is_cpu() || device.is_meta() ? 0 : device::properties(device, 16).on_chip_bytes;
}

ops::KernelPolicy kernel_policy(const ModelRecipe& recipe, const runtime::Context& context) {
  ops::KernelPolicy policy = recipe.kernels;
  policy.on_chip_limit_bytes = on_chip_limit(context.device);
  choose_delta_rule(recipe, context, policy);
  return policy;
}

void warn_of_kernels(const ModelRecipe& recipe, Model& model) {
  for (const std::string& loss : model.kernels().losses()) log::warning("{}", loss);
  if (!trains(recipe.purpose)) return;
  const ops::Linear::Functions& linear = model.kernels().get<ops::Linear>();
  warn_of_wide_layers(model, linear);
  warn_of_slow_rank(recipe, linear);
}

}  // namespace heddle::assembly
