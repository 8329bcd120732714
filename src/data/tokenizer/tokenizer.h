#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heddle::data {

struct EncodeOptions {
  /// Adds what the file's post-processor template adds around a single sequence (nothing for Qwen).
  bool add_special_tokens = false;
  /// Treats added tokens that are marked special as plain text: for text of a user who must not
  /// forge a turn.
  bool special_tokens_as_text = false;
};

/// The text of files by their names.
using TextFiles = std::vector<std::pair<std::string, std::string>>;

/// Byte-level BPE as `tokenizer.json` of the `tokenizers` library describes it: the same ids for
/// the same text. Immutable after load; every function may be called from several threads.
class Tokenizer {
 public:
  /// Reads tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json and
  /// chat_template.jinja of the folder; `changed` takes the place of files of those names. Throws
  /// DataError that names file and key, also for a component that is not supported.
  static std::shared_ptr<const Tokenizer> load(const std::filesystem::path& directory,
                                               const TextFiles& changed = {});
  /// Makes a tokenizer from the text of the files; "" means absent. `name` stands for the folder in
  /// messages.
  static std::shared_ptr<const Tokenizer> parse(std::string_view tokenizer_json,
                                                std::string_view tokenizer_config = {},
                                                std::string_view special_tokens_map = {},
                                                const std::string& name = "tokenizer");
  /// Stands for the tokenizer that a model's folder lacks: `ids` ids without texts, for rows of
  /// token ids. encode() throws ConfigError that names the folder.
  static std::shared_ptr<const Tokenizer> absent(const std::filesystem::path& directory,
                                                 std::int64_t ids);
  /// load(), or absent() where the folder has no tokenizer.json.
  static std::shared_ptr<const Tokenizer> load_if_there(const std::filesystem::path& directory,
                                                        std::int64_t ids);
  ~Tokenizer();

  /// False for absent().
  bool has_texts() const;
  /// Throws ConfigError unless has_texts().
  void require_texts() const;

  /// Token ids of a text. Bytes that are not UTF-8 are read as U+FFFD, as Python's errors="replace"
  /// does. Added tokens that stand in the text are recognised.
  std::vector<std::int32_t> encode(std::string_view utf8, const EncodeOptions& options = {}) const;
  /// encode() of each text, on up to `threads` threads.
  std::vector<std::vector<std::int32_t>> encode_batch(std::span<const std::string> texts,
                                                      int threads,
                                                      const EncodeOptions& options = {}) const;
  /// The text of the ids, always valid UTF-8: an incomplete or invalid sequence becomes U+FFFD.
  /// Throws DataError for an id outside [0, vocab_size()); an id inside that names no token gives
  /// no text.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special_tokens = false) const;

  /// Highest id + 1, with added tokens. A model's embedding may have more rows than this.
  std::int64_t vocab_size() const;
  /// The id of a token spelled as in the file (byte-level alphabet) or of an added token.
  std::optional<std::int32_t> id_of(std::string_view token) const;
  /// The spelling in the file; "" for an id that names no token.
  std::string token_of(std::int32_t id) const;
  /// The bytes that a token stands for; may be a part of a UTF-8 sequence. "" for an id that names
  /// no token.
  std::string_view bytes_of(std::int32_t id) const;
  bool is_special(std::int32_t id) const;

  /// From tokenizer_config.json, else special_tokens_map.json.
  std::optional<std::int32_t> eos_id() const;
  std::optional<std::int32_t> pad_id() const;
  /// Hash of all that decides on the ids of a text; keys the tokenised cache.
  const std::string& content_hash() const;
  /// Texts of the special tokens by the names under which templates read them: "eos_token",
  /// "image_token", ...
  const std::map<std::string, std::string>& special_tokens() const;
  /// chat_template.jinja, else "chat_template" of tokenizer_config.json; of several named ones (in
  /// additional_chat_templates/ or the configuration) that of the name.
  std::optional<std::string> chat_template(const std::string& name = "default") const;
  /// The names of all of them.
  std::vector<std::string> chat_template_names() const;

 private:
  Tokenizer();
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// Turns ids that arrive one by one into text; a UTF-8 sequence that is not complete yet is held
/// back.
class StreamDecoder {
 public:
  explicit StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer,
                         bool skip_special_tokens = false);
  /// The text that this id completes, possibly "". The pieces joined, with finish(), equal
  /// Tokenizer::decode.
  std::string push(std::int32_t id);
  /// Held-back bytes, as U+FFFD.
  std::string finish();

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_tokens_;
  std::string pending_;
};

}  // namespace heddle::data
