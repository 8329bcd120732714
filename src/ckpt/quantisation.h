#pragma once

#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

/// Throws ModelError for weights that mean nothing without the scales of a quantised format: names
/// the format (as config.json or the tensors tell it), the tensors, and how to get plain weights
/// from that format. Warns if config.json names a format and the weights are plain all the same.
void check_not_quantised(const Path& path, const nlohmann::ordered_json& config,
                         const std::vector<StoredTensor>& tensors);

}  // namespace heddle::ckpt
