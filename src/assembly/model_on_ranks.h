#pragma once

#include <memory>
#include <vector>

#include "adapters/lora.h"
#include "assembly/recipe.h"
#include "ckpt/hf_model.h"
#include "parallel/pipeline.h"
#include "parallel/sharding.h"
#include "runtime/context.h"

namespace heddle::assembly {

/// One rank's part of a model, ready for what its recipe names.
struct ModelOnRanks {
  runtime::Context context;
  std::shared_ptr<const ckpt::ModelDirectory> source;  ///< Null: there are no files.
  std::unique_ptr<Model> model;
  std::vector<std::string> label_names;         ///< Names of classes, those of the recipe.
  std::unique_ptr<adapters::LoraSet> adapters;  ///< Null without adapters.
  AdapterFiles start;  ///< Values that adapters in training began with; null: they changed nothing.
  std::unique_ptr<parallel::Sharding> sharding;  ///< Null for one rank.
  parallel::StagePlan stages;
  /// Null where nothing runs: Purpose::kStore, Weights::kNone.
  std::unique_ptr<parallel::Pipeline> pipeline;
  std::vector<nn::Parameter*> trainable;    ///< Held by this rank, in the order of the model.
  std::vector<nn::Parameter*> saved_whole;  ///< Trained beside adapters, held here or elsewhere.
  ckpt::ModelLoadReport load_report;
};

/// Builds the model: chooses kernels, divides the parameters over the ranks, fills them, puts
/// adapters on, decides what is trained and connects the stages of the pipeline. All ranks of
/// context.mesh call it together. Throws ConfigError for a layout that does not fit the model, for
/// ranks whose files differ, and for names in `freeze`, `saved_whole` or adapter targets that match
/// nothing; ModelError for tensors that do not fit; DeviceError for a kernel that the device lacks.
ModelOnRanks place(const ModelRecipe& recipe, const runtime::Context& context);

}  // namespace heddle::assembly
