#pragma once

#include <memory>

#include "assembly/model_on_ranks.h"
#include "ckpt/companions.h"
#include "config/run_config.h"
#include "data/loader/dataset.h"
#include "data/tokenizer/tokenizer.h"
#include "train/observer.h"

namespace heddle::train {

/// The model of a run with its tokenizer and rows.
struct Setup {
  assembly::ModelOnRanks placed;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  ckpt::TokenizerSource tokenizer_source;  ///< Files for final/
  nlohmann::ordered_json sources;          ///< contents_of() model and tokenizer
  /// Null for train.objective policy, which generates its rows; eval also without data.eval.
  std::shared_ptr<const data::Dataset> train, eval;
};

/// Throws ConfigError, DataError, ModelError, DeviceError; writes nothing but the token cache.
Setup make_setup(const config::RunConfig& config, Observer& observer,
                 std::shared_ptr<comm::World> world = nullptr);

enum class DataPart { kTrain, kEval };

/// The rows of data.train or data.eval, and how they become tokens.
data::DatasetOptions dataset_options(const config::RunConfig& config, DataPart part);

}  // namespace heddle::train
