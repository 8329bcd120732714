#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ckpt/adapter_directory.h"
#include "ckpt/model_directory.h"
#include "comm/agreement.h"
#include "comm/world.h"
#include "config/run_config.h"
#include "data/loader/dataset.h"

/// What the ranks of a job compare before they work together (comm::require_agreement): with other
/// files or settings on one host they would compute something that nobody asked for, and say
/// nothing.
namespace heddle::train {

/// Every key of the configuration but those that may differ by host (config::shared_entries), and
/// the command.
std::vector<comm::Fact> settings_of(const std::string& command, const config::RunConfig& config);

/// config.json, and the names, shapes and some of the values of the weights; reads a few hundred
/// KB.
std::vector<comm::Fact> facts_of(const ckpt::ModelDirectory& model);
/// The same of an adapter.
std::vector<comm::Fact> facts_of(const ckpt::AdapterDirectory& adapter);
/// The rows as tokens: content, tokenizer, template and options. `key`: "data.train".
std::vector<comm::Fact> facts_of(const std::string& key, const data::Dataset& data);

/// As join_world(config) (setup.h), for a command with settings of its own.
std::shared_ptr<comm::World> join_world(const config::RunConfig& config, const std::string& command,
                                        const std::vector<comm::Fact>& more);

}  // namespace heddle::train
