#pragma once

#include "ckpt/gguf_file.h"
#include "ckpt/model_directory.h"

namespace heddle::ckpt {

/// Adds tokens, merges, special tokens and chat template of a model's folder. Rows of the embedding
/// beyond the tokenizer's tokens are called [PAD<id>]. Throws ModelError, and as
/// read_json_object().
void add_gguf_vocabulary(GgufFile& file, const ModelDirectory& source, std::int64_t vocab_size);

}  // namespace heddle::ckpt
