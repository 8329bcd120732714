#pragma once

#include <string>

#include "rl/group_source.h"

namespace heddle::rl {

/// A batch as bytes (CBOR) that another process of the same build reads.
std::string to_bytes(const Batch& batch);
/// Throws CommError for bytes that to_bytes() did not write.
Batch batch_from_bytes(const std::string& bytes);

/// Counts in a checkpoint's state. One that another version wrote, with other numbers, has none.
nlohmann::json to_json(const GenerationCounts& counts);
GenerationCounts counts_from_json(const nlohmann::json& value);

/// A message between trainer and rollouts as bytes (CBOR), and bytes within it.
std::string packed(const nlohmann::json& message);
/// Throws CommError for bytes that packed() did not write.
nlohmann::json unpacked(const std::string& bytes);
nlohmann::json as_binary(const std::string& bytes);
std::string from_binary(const nlohmann::json& value);

}  // namespace heddle::rl
