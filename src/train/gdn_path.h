#pragma once

#include "models/config.h"
#include "ops/registry.h"
#include "runtime/context.h"

namespace heddle::train {

/// On an NPU, chooses the kernel of the gated delta rule by its table (ops/gated_delta_net/npu),
/// prints it with the reason, and notes it in the policy unless the user has chosen one. Throws
/// DeviceError where the table refuses. Nothing to do on other devices. `head_ranks`: over how many
/// ranks the heads are divided.
void choose_gdn_path(const models::Config& model, const runtime::Context& context,
                     std::int64_t head_ranks, bool is_training, ops::KernelPolicy& policy);

}  // namespace heddle::train
