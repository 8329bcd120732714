#include "models/qwen3/family.h"

namespace heddle::models::qwen3 {

WeightNames weight_names(const Config& config) {
  WeightNames names;
  const bool is_moe = config.model_type == "qwen3_moe";
  names.classification_class =
      is_moe ? "Qwen3MoeForSequenceClassification" : "Qwen3ForSequenceClassification";
  if (is_moe) {
    // PEFT reads gate_proj, up_proj and down_proj of this model type as its routed experts,
    // whatever stands before them, so an adapter on a dense MLP could not be loaded there.
    for (const LayerShape& layer : config.layers) {
      if (!layer.moe) names.not_adapted = {"*.mlp.*_proj"};
    }
    names.why_not_adapted = "the dense MLPs of Qwen3-MoE, which PEFT cannot load";
  }
  return names;
}

}  // namespace heddle::models::qwen3
