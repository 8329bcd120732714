#pragma once

#include <memory>
#include <string>
#include <vector>

#include "adapters/lora.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/hf_model.h"
#include "ckpt/model_directory.h"
#include "comm/world.h"
#include "config/run_config.h"
#include "data/loader/dataset.h"
#include "data/tokenizer/tokenizer.h"
#include "models/qwen3_5/model.h"
#include "parallel/pipeline.h"
#include "parallel/sharding.h"
#include "runtime/context.h"
#include "train/observer.h"

namespace heddle::train {

/// Everything a run stands on, made in one order: device, model directory, tokenizer, data, model,
/// adapters.
struct Setup {
  runtime::Context context;
  std::unique_ptr<ckpt::ModelDirectory> source;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  ckpt::TokenizerSource tokenizer_source;            ///< What final/ gets
  std::shared_ptr<const data::Dataset> train, eval;  ///< eval is null without data.eval
  std::unique_ptr<models::qwen3_5::Model> model;
  std::unique_ptr<adapters::LoraSet> adapters;   ///< null for full training
  std::unique_ptr<parallel::Sharding> sharding;  ///< null for one rank
  parallel::StagePlan stages;                    ///< Of the pipeline
  std::vector<nn::Parameter*> trainable;         ///< In the order of the model; of this rank
  std::vector<nn::Parameter*> saved_whole;       ///< modules_to_save
  ckpt::ModelLoadReport load_report;
};

/// Degrees of the mesh for `world` ranks, `auto` resolved. Throws ConfigError if it cannot be.
comm::Mesh::Sizes mesh_sizes(const config::ParallelSection& parallel, std::int64_t world);
ops::ContextMethod context_method(const config::RunConfig& config);
/// Stages on each rank of the pipeline.
std::int64_t stage_chunks(const config::RunConfig& config);

/// Meets the other ranks if a launcher started several; null for one rank, which needs no launcher.
/// Throws ConfigError on all if their settings differ or parallel.* does not fit their number.
std::shared_ptr<comm::World> join_world(const config::RunConfig& config);

/// Throws ConfigError, DataError, ModelError, DeviceError; writes nothing but the token cache.
Setup make_setup(const config::RunConfig& config, Observer& observer,
                 std::shared_ptr<comm::World> world = nullptr);

// The parts of make_setup() that make the model, for what has no files. setup.context is given.
/// Fills model, stages and sharding: the parameters of this rank, without values.
void allocate_model(const config::RunConfig& config, models::qwen3_5::Config model_config,
                    const std::string& prefix, Setup& setup);
/// When the parameters have values: fills adapters and what is trained, and lets ranks that compute
/// with each other's parameters have them. `has_values` false: there is no storage to fill. Throws
/// ConfigError if nothing is trained.
void complete_model(const config::RunConfig& config, Setup& setup, bool has_values = true);

/// Where a command computes that is told no device: the first accelerator that this build can use
/// and the machine has, else the CPU.
config::DeviceName usual_device();

/// The context of one rank from the configuration; sets the CPU threads.
runtime::Context make_context(const config::RunConfig& config,
                              std::shared_ptr<comm::World> world = nullptr);

/// Which kernels the configuration allows on a device.
ops::KernelPolicy kernel_policy(const config::RunConfig& config, c10::Device device);

/// The adapters of train.method lora on a model; LoraSet::initialize() gives them their start.
std::unique_ptr<adapters::LoraSet> make_adapters(const config::RunConfig& config,
                                                 models::qwen3_5::Model& model);

enum class DataPart { kTrain, kEval };

/// The rows of data.train or data.eval, and how they become tokens.
data::DatasetOptions dataset_options(const config::RunConfig& config, DataPart part);

/// A model of a directory with its weights, for scoring, generation and export. `adapter` may be
/// empty.
struct LoadedModel {
  runtime::Context context;
  std::unique_ptr<ckpt::ModelDirectory> source;
  /// The adapter's, if it comes with a tokenizer (which may know more tokens); else the model's.
  std::filesystem::path tokenizer_directory;
  std::unique_ptr<models::qwen3_5::Model> model;
  std::unique_ptr<adapters::LoraSet> adapters;
  std::unique_ptr<parallel::Sharding> sharding;  ///< null for one rank
  parallel::StagePlan stages;                    ///< Of the pipeline
  ckpt::ModelLoadReport load_report;
};
/// On the ranks of context.mesh together; with kernels that decode if it `generates`. Throws
/// ConfigError for a layout that is not the model's.
LoadedModel load_for_inference(const std::filesystem::path& directory,
                               const std::filesystem::path& adapter,
                               const runtime::Context& context, models::qwen3_5::Head head,
                               ops::ContextMethod context_method = ops::ContextMethod::kState,
                               bool generates = false);

}  // namespace heddle::train
