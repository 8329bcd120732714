#pragma once

#include <filesystem>
#include <string>

#include "config/run_config.h"
#include "hub/find.h"

/// Models and data by name for the commands: hub::find_model() and hub::find_data(), with what is
/// downloaded shown.
namespace heddle::cli {

std::filesystem::path find_model(const std::string& name, hub::Need need = hub::Need::kAll);

/// Puts folders and files into the configuration in the place of names: model.path,
/// model.tokenizer, adapter.path, data.train, data.eval.
void resolve_names(config::RunConfig& config, hub::Need need = hub::Need::kAll);

}  // namespace heddle::cli
