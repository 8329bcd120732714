#pragma once

#include <string>
#include <vector>

#include "adapters/lora.h"
#include "assembly/recipe.h"
#include "comm/mesh.h"

namespace heddle::assembly {

/// A parameter that a rank has whole between passes where it generates with adapters added to their
/// matrices (rollout.merge_adapter): such a matrix, or a factor of experts.
struct MergedParameter {
  std::string name;
  bool is_expert;
};
std::vector<MergedParameter> merged_parameters(Model& model, const adapters::LoraSet& adapters);

/// Throws ConfigError with the first of them that the ranks of `mesh` divide. Engines and plans
/// ask, so that both refuse in the same words.
void require_whole(const std::vector<MergedParameter>& merged, const comm::Mesh& mesh);

}  // namespace heddle::assembly
