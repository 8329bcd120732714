#include "assembly/rank_memory.h"

#include <algorithm>
#include <set>

#include "assembly/model_units.h"
#include "ops/moe/frozen_experts.h"

namespace heddle::assembly {
namespace {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

/// Adds a parameter; returns the bytes of its value if that is gathered when its unit runs, else 0.
std::int64_t add(RankMemory& memory, const nn::Parameter& parameter, const comm::Mesh& mesh) {
  if (!parameter.is_held()) {
    memory.resident += ops::bytes_beside(parameter.value());
    return 0;
  }
  ++memory.parameters;
  memory.owned += bytes_of(parameter.owned());
  if (parameter.trainable()) {
    memory.gradients += parameter.value().numel() *
                        static_cast<std::int64_t>(c10::elementSize(parameter.gradient_dtype()));
  }
  if (parameter.has_memory()) {
    memory.resident += bytes_of(parameter.value());
    const bool has_owned_besides = parameter.owned().numel() != parameter.value().numel();
    if (has_owned_besides) memory.resident += bytes_of(parameter.owned());
    return 0;
  }
  // Beside its own rows a rank keeps those of its replicas, to gather them from fewer ranks.
  const comm::Dim replicas = parameter.is_expert() ? comm::Dim::kEdp : comm::Dim::kDp;
  memory.resident += bytes_of(parameter.owned()) * mesh.size(replicas);
  return bytes_of(parameter.value());
}

}  // namespace

RankMemory rank_memory(models::Model& model, adapters::LoraSet* adapters) {
  const comm::Mesh& mesh = model.context().mesh;
  RankMemory memory;
  std::int64_t widest = 0, widest_around = 0;
  std::set<const nn::Parameter*> in_blocks;
  for (const parallel::BlockEntry& entry : block_entries(model, adapters)) {
    std::int64_t block = 0;
    for (const nn::Parameter* parameter : entry.parameters) {
      in_blocks.insert(parameter);
      block += add(memory, *parameter, mesh);
    }
    widest = std::max(widest, block);
  }
  const auto around = [&](const nn::Parameter& parameter) {
    if (!in_blocks.contains(&parameter))
      widest_around = std::max(widest_around, add(memory, parameter, mesh));
  };
  model.visit_parameters(around);
  if (adapters != nullptr) adapters->visit_parameters(around);
  // A block, and the next one or what stands before or after the blocks.
  memory.gathered = widest + std::max(widest, widest_around);
  return memory;
}

}  // namespace heddle::assembly
