#include "train/gdn_path.h"

#include <algorithm>

#include "base/errors.h"
#include "base/log.h"
#include "device/device.h"
#include "device/npu_chip.h"
#include "ops/gated_delta_net/npu/path.h"

namespace heddle::train {

void choose_gdn_path(const models::qwen3_5::Config& model, const runtime::Context& context,
                     std::int64_t head_ranks, bool is_training, ops::KernelPolicy& policy) {
  constexpr const char* kOperator = "gated_delta_rule";
  const bool has_rule = std::find(model.full_attention.begin(), model.full_attention.end(),
                                  false) != model.full_attention.end();
  if (context.device.type() != c10::DeviceType::PrivateUse1 || !has_rule) return;
  const std::string soc = device::properties(context.device, 16).name;
  const auto path = ops::gated_delta_rule_npu::choose_path(
      {.soc = soc,
       .is_training = is_training,
       .dtype = context.dtype,
       .num_k_heads = model.linear_num_key_heads / head_ranks,
       .num_v_heads = model.linear_num_value_heads / head_ranks,
       .head_k_dim = model.linear_key_head_dim,
       .head_v_dim = model.linear_value_head_dim});
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
