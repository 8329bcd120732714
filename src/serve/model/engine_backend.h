#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serve/model/backend.h"

namespace heddle::serve {

struct EngineBackendOptions {
  std::string directory;  ///< For the base model.
  std::string name;       ///< By which clients ask for it.
  /// device.*, model.dtype, kernels.*, rollout.* of rollout::CacheOptions: as key=value.
  std::vector<std::string> settings;
  std::int64_t max_sequences = 16;   ///< Answers generated at the same time.
  std::int64_t max_context = 4096;   ///< Tokens of prompt and answer.
  std::int64_t pass_tokens = 16384;  ///< In a training pass, about.
  bool deterministic = false;        ///< See tenants::TrainerOptions.
};

/// Loads the model once, for training (tenants::Trainer) and generation (rollout::Engine). Throws
/// ConfigError, ModelError, DeviceError.
std::unique_ptr<Backend> make_engine_backend(const EngineBackendOptions& options);

}  // namespace heddle::serve
