// Files by which sentence-transformers loads an embedding model: modules.json and a folder for each
// module.
#pragma once

#include <cstdint>

#include "ckpt/companions.h"

namespace heddle::ckpt {

/// Transformer, pooling by the last token and, if `normalize`, scaling to length 1. Texts are cut
/// at `max_length` tokens. In the form that versions from 2.3 on read.
Files sentence_transformers_files(std::int64_t hidden_size, bool normalize,
                                  std::int64_t max_length);

/// For a directory that sentence-transformers wrote: throws ModelError if its embeddings are not
/// those of the last token, or pass through a further layer; warns of prompts, which nothing puts
/// before the texts here. Other directories pass.
void require_last_token_embeddings(const Path& directory);

}  // namespace heddle::ckpt
