#include "models/qwen3_5/family.h"

namespace heddle::models::qwen3_5 {

WeightNames weight_names(const std::string& model_type, bool nested) {
  WeightNames names;
  names.prefixes = {"model.language_model.", "model.", "language_model.", ""};
  names.may_be_unused = {"model.visual.*", "visual.*", "mtp.*", "model.mtp.*"};
  names.classification_class = model_type == "qwen3_next" ? "Qwen3NextForSequenceClassification"
                               : nested && model_type == "qwen3_5_text"
                                   ? "Qwen3_5ForSequenceClassification"
                                   : "Qwen3_5TextForSequenceClassification";
  if (model_type == "qwen3_next") {
    // PEFT reads gate_proj, up_proj and down_proj of this model type as its routed experts,
    // whatever stands before them, so an adapter on the shared expert could not be loaded there.
    names.not_adapted = {"*.mlp.shared_expert.*_proj"};
    names.why_not_adapted = "mlp.shared_expert of Qwen3-Next, which PEFT cannot load";
  }
  return names;
}

}  // namespace heddle::models::qwen3_5
