#pragma once

#include <string>
#include <utility>
#include <vector>

#include "adapters/lora.h"
#include "ckpt/adapter_directory.h"

namespace heddle::ckpt {

/// A pair of factors in a file and the experts that it changes.
using ExpertPair = std::pair<const LoraPair*, nn::ExpertWeights*>;

/// The form that holds these factors in the least memory: shared where the file is compact, or
/// where the factors on the side of the hidden states have the same bits for all experts of their
/// layers. Reads no more of a file than the first difference needs.
nn::ExpertFactors expert_factors_of(const AdapterDirectory& directory,
                                    const std::vector<ExpertPair>& pairs);

}  // namespace heddle::ckpt
