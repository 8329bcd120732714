#pragma once

#include <cstdint>

#include "ckpt/model_directory.h"

namespace heddle::ckpt {

struct GgufReport {
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;
};

/// Writes a model directory as one GGUF file in the layout that llama.cpp reads, for the types that
/// have a models::gguf_form, with the tokenizer. Matrices keep their type
/// (float64 becomes float32), vectors and convolutions are float32. Vision tower and MTP head are
/// left out. Throws ModelError for another architecture and for what is missing.
GgufReport write_gguf(const ModelDirectory& source, const Path& output);

}  // namespace heddle::ckpt
