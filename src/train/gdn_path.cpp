#include "train/gdn_path.h"

#include "base/errors.h"
#include "base/log.h"
#include "device/device.h"
#include "device/npu_chip.h"
#include "ops/gated_delta_net/npu/path.h"

namespace heddle::train {

void choose_gdn_path(const models::Config& model, const runtime::Context& context,
                     std::int64_t head_ranks, bool is_training, ops::KernelPolicy& policy) {
  constexpr const char* kOperator = "gated_delta_rule";
  const nn::GatedDeltaNetDims* dims = model.gated_delta_net();
  if (context.device.type() != c10::DeviceType::PrivateUse1 || dims == nullptr) return;
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

}  // namespace heddle::train
