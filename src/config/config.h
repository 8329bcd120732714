#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/run_config.h"

namespace heddle::config {

/// Whether keys without a default (model.path, data.train) must be there and the keys must fit
/// together.
enum class Completeness { kComplete, kPartial };

/// Reads the YAML file, then the overrides ("optim.lr=3e-4", the value being YAML), fills in the
/// defaults that depend on other keys and checks everything. An empty `file` means overrides only.
/// `usual`: the device where none is named.
/// Throws ConfigError that starts with "run.yaml:12: " or "command line: " and names the key;
/// FileError if the file cannot be read.
RunConfig load(const std::filesystem::path& file, std::span<const std::string> overrides = {},
               Completeness completeness = Completeness::kComplete, const DeviceName& usual = {});

/// Parses text; `name` stands for the file in messages.
RunConfig parse(std::string_view yaml, const std::string& name,
                std::span<const std::string> overrides = {},
                Completeness completeness = Completeness::kComplete, const DeviceName& usual = {});

/// Every key with its value, as YAML that load() reads back to the same configuration. Tokens and
/// passwords are text::kHidden there, as in all that is printed below.
std::string dump_yaml(const RunConfig& config);
/// Writes one JSON object, for the metadata of checkpoints and reports.
std::string dump_json(const RunConfig& config);

/// An argument "key=value" of a command line as it may be shown and stored; others as they are.
std::string without_secret(const std::string& argument);

/// (key, value as YAML) of every key, in the order of the reference; for tables and reports.
std::vector<std::pair<std::string, std::string>> entries(const RunConfig& config);

/// Every key with its default, type and meaning, as commented YAML.
std::string reference_yaml();
/// Writes one Markdown table per section.
std::string reference_markdown();
/// All dotted keys, for completion.
std::vector<std::string> all_keys();

/// "optim.lr: 1e-05 -> 3e-04" for each key whose value differs.
std::vector<std::string> differences(const RunConfig& before, const RunConfig& after);

/// One sentence for each key the user gave that the rest of the configuration leaves without
/// effect.
std::vector<std::string> unused_keys(const RunConfig& config);

/// "run.yaml:12: optim.lr" for a key the user gave, else "optim.lr": the start of a message about
/// it.
std::string where(const RunConfig& config, const std::string& key);

}  // namespace heddle::config
