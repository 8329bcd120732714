#pragma once

#include <cstdint>
#include <filesystem>

#include "config/run_config.h"
#include "train/setup.h"

namespace heddle::train {

struct ResultOptions {
  bool overwrite = false;  ///< Replaces a result that stands there.
  std::uint64_t max_shard_bytes = 5'000'000'000;
};

/// Writes what a run has learned: a PEFT adapter directory of train.method lora, else a Hugging
/// Face model directory. `read` gives every parameter of setup.placed.model and
/// setup.placed.adapters whole. Throws FileError; ConfigError where `output` may not be replaced.
void write_result(const config::RunConfig& config, const Setup& setup,
                  const std::filesystem::path& output, const ResultOptions& options,
                  const ckpt::ReadWhole& read);

/// Writes what final/ of the run would hold had it ended at a training checkpoint; takes the memory
/// of one tensor, on the host, whatever layout and device the run had. `base`, unless empty,
/// replaces the model.path of the run. Returns the run's configuration. Throws ModelError for a
/// damaged checkpoint, ConfigError where the run's model is not found, else as write_result().
config::RunConfig export_checkpoint(const std::filesystem::path& checkpoint,
                                    const std::filesystem::path& base,
                                    const std::filesystem::path& output,
                                    const ResultOptions& options);

}  // namespace heddle::train
