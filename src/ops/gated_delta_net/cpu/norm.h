#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/gated_delta_net/gated_delta_net.h"

/// "cpu.vector" of gated_rms_norm, parallel over blocks of rows. The weight's gradient is summed
/// over the blocks in their order: the same bits for any number of threads.
namespace heddle::ops::gdn_cpu {

std::optional<std::string> refuse_norm(const GatedRmsNorm::Dims& dims);
std::pair<at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& z,
                                               const at::Tensor& weight, double eps);
GatedRmsNorm::Gradients norm_backward(const GatedRmsNorm::Backward& in);

}  // namespace heddle::ops::gdn_cpu
