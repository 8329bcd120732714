#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "config/run_config.h"

namespace heddle::config {

/// One of several adapters that a run trains at once.
struct AdapterRun {
  std::string name;
  /// Of the run that would train it alone: the file's settings, then those of its entry.
  RunConfig config;
};

/// As load(), of a file with a list `adapters:`, whose entries have a name and settings of their
/// own (data, rank, lr, ...: see docs/lora.md); load() itself refuses the list. Empty if there is
/// none. All runs have train.method lora and one train.output_dir.
std::vector<AdapterRun> load_adapters(const std::filesystem::path& file,
                                      std::span<const std::string> overrides = {},
                                      const DeviceName& usual = {});

}  // namespace heddle::config
