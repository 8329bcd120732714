#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/normalizer.h"

namespace heddle::data {

/// Contents of a tokenizer's files, checked but not yet built.
struct TokenizerFile {
  struct PreTokenizer {
    enum class Kind { kSplit, kByteLevel };
    Kind kind = Kind::kSplit;
    std::string pattern;            // of a split
    std::string where;              // for messages
    bool add_prefix_space = false;  // of a byte level
  };

  std::vector<std::pair<std::string, std::int32_t>> vocab;  // spelled as in the file
  std::vector<std::pair<std::string, std::string>> merges;
  std::optional<std::string> unk_token;
  bool fuse_unk = false;
  bool ignore_merges = false;
  std::vector<NormalForm> normalizers;
  std::vector<PreTokenizer> pre_tokenizers;
  std::vector<AddedToken> added_tokens;
  std::vector<std::int32_t> template_before;  // ids a post-processor puts around a single sequence
  std::vector<std::int32_t> template_after;

  /// Texts of special tokens by the names that templates read: eos_token, unk_token, image_token...
  std::map<std::string, std::string> special_tokens;
  bool split_special_tokens = false;  ///< special tokens that stand in a text are text
  /// By name; that of a file with only one is "default".
  std::map<std::string, std::string> chat_templates;
};

/// Throws DataError that starts with `name` and the file's name, and names the key.
TokenizerFile read_tokenizer_file(std::string_view tokenizer_json,
                                  std::string_view tokenizer_config,
                                  std::string_view special_tokens_map, const std::string& name);

}  // namespace heddle::data
