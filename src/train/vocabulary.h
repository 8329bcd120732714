#pragma once

#include <filesystem>
#include <memory>

#include "ckpt/companions.h"
#include "config/run_config.h"
#include "data/tokenizer/tokenizer.h"
#include "models/model.h"

namespace heddle::train {

/// The tokenizer of a run, and where the exported directory gets it from.
struct RunTokenizer {
  std::shared_ptr<const data::Tokenizer> tokenizer;
  ckpt::TokenizerSource source;
};

/// Loads the tokenizer of model.tokenizer and puts model.added_tokens on it. Where the model's
/// folder has none, and no other is given, rows of token ids can be learned, up to `ids` of the
/// model; 0: there must be one. Throws ConfigError, DataError.
RunTokenizer load_tokenizer(const config::RunConfig& config, std::int64_t ids = 0);

/// How many rows the embedding of this run has: as many as the checkpoint, more where
/// model.added_tokens needs them or model.resize_vocab asks for them. Throws ConfigError for a size
/// that is below the checkpoint's or the tokenizer's, ModelError for a tokenizer that is larger
/// than the model without being told so.
std::int64_t vocabulary_rows(const config::RunConfig& config, const data::Tokenizer& tokenizer,
                             std::int64_t checkpoint_rows);

/// Throws ConfigError if rows of model.added_tokens would never be trained: an adapter on linear
/// layers leaves the vocabulary as it is unless adapter.modules_to_save names it.
void check_added_tokens_trained(const config::RunConfig& config, const models::Config& model);

}  // namespace heddle::train
