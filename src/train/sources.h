#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "ckpt/adapter_directory.h"
#include "ckpt/model_directory.h"

namespace heddle::train {

/// Hashes of the files that a run is made from, for its checkpoints: config.json, some of the
/// values of the weights and of the adapter that it goes on from, tokenizer and templates under
/// "trained"; under "carried" the files that only go along to the result.
nlohmann::ordered_json contents_of(const ckpt::ModelDirectory& model,
                                   const ckpt::TokenizerSource& tokenizer,
                                   const ckpt::AdapterDirectory* start = nullptr);

/// Compares what the run of a checkpoint was made from with what is there `now`. Throws ConfigError
/// that names the files of "trained" that differ, and warns of those of "carried". `state` is the
/// checkpoint's, which has no "sources" where an older version wrote it: then nothing is compared.
void require_same_sources(const nlohmann::ordered_json& state, const nlohmann::ordered_json& now,
                          const std::string& checkpoint);

}  // namespace heddle::train
