#pragma once

#include "assembly/recipe.h"
#include "runtime/context.h"

namespace heddle::assembly {

/// Bytes that the tiles of a kernel must fit into; 0 (no limit) on the CPU, and where tensors have
/// shapes alone.
std::int64_t on_chip_limit(c10::Device device);

/// The recipe's policy with the limits of the device. On an NPU it also chooses the kernel of the
/// gated delta rule by its table (ops/gated_delta_net/npu), unless the user has, and prints it with
/// the reason. Throws DeviceError where the table refuses.
ops::KernelPolicy kernel_policy(const ModelRecipe& recipe, const runtime::Context& context);

/// Says which of the chosen kernels run slower, or in a narrower type, than they could.
void warn_of_kernels(const ModelRecipe& recipe, Model& model);

}  // namespace heddle::assembly
