#pragma once

#include <string>

#include "rl/group_source.h"

namespace heddle::rl {

/// A batch as bytes (CBOR) that another process of the same build reads.
std::string to_bytes(const Batch& batch);
/// Throws CommError for bytes that to_bytes() did not write.
Batch batch_from_bytes(const std::string& bytes);

}  // namespace heddle::rl
