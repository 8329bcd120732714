#include "config/objective.h"

namespace heddle::config {

using models::Head;

ObjectiveNeeds needs_of(Objective objective) {
  switch (objective) {
    case Objective::kAuto:
    case Objective::kLanguageModel:
      break;
    case Objective::kClassification:
      return {Head::kClassify, 1};
    case Objective::kContrastive:
      return {Head::kEmbed, 8};
    case Objective::kDpo:
      return {Head::kLanguageModel, 2};
    case Objective::kReward:
      return {Head::kClassify, 2};
    case Objective::kPolicy:
      return {Head::kLanguageModel, 1};
  }
  return {Head::kLanguageModel, 1};
}

Objective objective_of(const RunConfig& config) {
  if (config.train.objective != Objective::kAuto) return config.train.objective;
  switch (config.model.head) {
    case Head::kLanguageModel:
      break;
    case Head::kClassify:
      return Objective::kClassification;
    case Head::kEmbed:
      return Objective::kContrastive;
  }
  return Objective::kLanguageModel;
}

}  // namespace heddle::config
