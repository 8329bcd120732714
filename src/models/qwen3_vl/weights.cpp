#include "models/qwen3_vl/family.h"

namespace heddle::models::qwen3_vl {

WeightNames weight_names() {
  WeightNames names;
  names.prefixes = {"model.language_model.", "language_model.", "model.", ""};
  names.may_be_unused = {"model.visual.*", "visual.*"};
  // transformers has no class with a classification head for it: none is built.
  return names;
}

}  // namespace heddle::models::qwen3_vl
