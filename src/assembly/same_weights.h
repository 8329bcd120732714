#pragma once

#include <vector>

#include "ckpt/adapter_directory.h"
#include "ckpt/model_directory.h"
#include "comm/agreement.h"

/// Contents of files that the ranks of a job compare (comm::require_agreement): with other files on
/// one host they would compute something that nobody asked for, and say nothing.
namespace heddle::assembly {

/// config.json, and the names, shapes and some of the values of the weights; reads a few hundred
/// KB.
std::vector<comm::Fact> facts_of(const ckpt::ModelDirectory& model);
/// adapter_config.json, and the names, shapes and some of the values of the adapter's tensors.
std::vector<comm::Fact> facts_of(const ckpt::AdapterDirectory& adapter);

}  // namespace heddle::assembly
