#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "adapters/lora.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/model_directory.h"
#include "models/model.h"
#include "ops/registry.h"
#include "parallel/recompute.h"
#include "parallel/sharding.h"

namespace heddle::assembly {

using Model = models::Model;
using ModelConfig = models::Config;
using Head = models::Head;

using AdapterFiles = std::shared_ptr<const ckpt::AdapterDirectory>;

/// Adapters that are trained.
struct NewAdapters {
  std::vector<std::string> targets, target_parameters;  ///< See adapters::LoraSet.
  adapters::LoraOptions options;
  AdapterFiles start;  ///< Values that they begin with. Null: they change nothing yet.
};
using AdapterSource = std::variant<std::monostate, NewAdapters, AdapterFiles>;

enum class Purpose {
  kTrain,     ///< Forward and backward.
  kTenants,   ///< Forward and backward of sets of adapters that come and go on frozen weights.
  kScore,     ///< Forward over whole sequences.
  kGenerate,  ///< Forward token by token.
  kStore,     ///< Its parameters are read or written; nothing runs.
};

/// Whether passes have a backward.
constexpr bool trains(Purpose purpose) {
  return purpose == Purpose::kTrain || purpose == Purpose::kTenants;
}

/// Where the values of the parameters come from.
enum class Weights {
  kNone,       ///< Nowhere: names, shapes and owners are of interest, on the meta device without
               ///< storage.
  kDirectory,  ///< The recipe's `source`.
  kRandom,     ///< Model::initialize with the context's seed: the same numbers in every layout.
  kRandomOnDevice,  ///< The device's own generator: fast, other numbers in every layout.
};

/// Everything that decides how a model is put together.
struct ModelRecipe {
  ModelConfig config;
  std::string prefix = "model.";  ///< How the checkpoint names the text model.
  Head head = Head::kLanguageModel;
  std::int64_t num_labels = 0;           ///< Outputs of a classification head.
  std::vector<std::string> label_names;  ///< Names of its classes; empty: the files have none.
  Purpose purpose = Purpose::kScore;
  bool generates = false;  ///< A model that trains or scores also answers prompts.

  Weights weights = Weights::kNone;
  std::shared_ptr<const ckpt::ModelDirectory> source;  ///< Null: there are no files.
  AdapterSource adapters;
  std::vector<std::string> freeze;       ///< kTrain: globs of parameters that are not trained.
  std::vector<std::string> saved_whole;  ///< kTrain: modules trained beside the adapters.

  ops::KernelPolicy kernels;    ///< place() adds what it knows of the device.
  bool auxiliary_loss = false;  ///< Compute the routers' load-balancing loss while training.
  ops::ContextMethod context_method = ops::ContextMethod::kState;
  std::int64_t pipeline_chunks = 1;  ///< Stages on each rank of the pipeline.
  parallel::Summing summing = parallel::Summing::kStep;
  parallel::Recompute recompute = parallel::Recompute::kOff;  ///< For every layer at the start.
  bool offload_activations = false;  ///< Inputs of recomputed layers wait on the host.
};

/// Reads the config.json of a model directory. Throws ModelError.
ModelConfig read_config(const ckpt::ModelDirectory& source);

/// The model of a directory as it is, with a PEFT adapter directory on it unless `adapter` is
/// empty, for anything but training. Throws ModelError.
ModelRecipe recipe_of_directory(const std::filesystem::path& directory,
                                const std::filesystem::path& adapter, Head head, Purpose purpose);

/// Throws ConfigError for a mesh that the model cannot be divided by.
void check_layout(const ModelRecipe& recipe, const comm::Mesh& mesh);

}  // namespace heddle::assembly
