#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "data/tokenizer/tokenizer.h"

namespace heddle::data {

/// A tokenizer with tokens that its folder does not know.
struct ExtendedTokenizer {
  std::shared_ptr<const Tokenizer> tokenizer;
  TextFiles changed;  ///< Files that a folder with this tokenizer holds instead of the old ones.
  std::vector<std::pair<std::string, std::int32_t>> added;  ///< New tokens with their ids.
};

/// Adds special tokens to the tokenizer of a folder, as `add_special_tokens` of transformers does:
/// a token that is new gets the next id after the present ones, a word of the vocabulary becomes a
/// special token under its own id, one that is an added token already stays as it is. Everything
/// else in tokenizer.json stays as it was, byte for byte; tokenizer_config.json and, where present,
/// special_tokens_map.json and added_tokens.json are kept in step. Throws DataError for an empty
/// token and for one that is given twice.
ExtendedTokenizer extend_tokenizer(const std::filesystem::path& directory,
                                   const std::vector<std::string>& tokens);

}  // namespace heddle::data
