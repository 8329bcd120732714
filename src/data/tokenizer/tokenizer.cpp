#include "data/tokenizer/tokenizer.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "base/errors.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/threads.h"
#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/normalizer.h"
#include "data/tokenizer/split.h"
#include "data/tokenizer/tokenizer_file.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data {
namespace {

constexpr std::size_t kLongestText = std::size_t{1} << 30;  // ICU counts bytes in 32 bits

struct TokenInfo {
  std::string spelling;
  std::string bytes;
  bool special = false;
};

struct Stage {
  std::unique_ptr<Split> split;  // null: byte level
  bool add_prefix_space = false;
};

/// Working space of one thread while it encodes one text.
struct Workspace {
  Bpe::Scratch bpe;
  std::vector<AddedTokenFinder::Piece> outer;
  std::vector<AddedTokenFinder::Piece> inner;
  std::string normalized;
  SplitBudget split;  ///< For the text being encoded.
};

}  // namespace

struct Tokenizer::Parts {
  std::vector<TokenInfo> tokens;
  std::unordered_map<std::string, std::int32_t> ids;
  std::unique_ptr<Bpe> bpe;
  std::vector<NormalForm> normalizers;
  std::vector<Stage> stages;
  std::unique_ptr<AddedTokenFinder> raw_added;         // looked for in the text as it is
  std::unique_ptr<AddedTokenFinder> normalized_added;  // looked for after normalisation
  std::vector<std::int32_t> before, after;
  std::optional<std::int32_t> eos, pad;
  std::map<std::string, std::string> special_tokens;
  std::map<std::string, std::string> chat_templates;
  bool split_special_tokens = false;
  std::string content_hash;
  std::string absent_from;  // the folder without a tokenizer; "": there is one

  // Workspaces that no thread uses at the moment.
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Workspace>> free;

  void build(const TokenizerFile& file, const std::string& name);
  void add_tokens(const TokenizerFile& file, const std::string& name);
  void words(std::string_view text, std::size_t stage, Workspace& work,
             std::vector<std::int32_t>& out) const;
  void encode(std::string_view text, const EncodeOptions& options, Workspace& work,
              std::vector<std::int32_t>& out) const;
};

void Tokenizer::Parts::add_tokens(const TokenizerFile& file, const std::string& name) {
  // Ids as the library gives them: a known spelling keeps its id, others are counted on after the
  // vocabulary.
  auto next = static_cast<std::int32_t>(file.vocab.size());
  std::vector<AddedToken> raw, normalized;
  std::unordered_map<std::int32_t, AddedToken> by_id;
  std::vector<std::int32_t> order;
  for (AddedToken token : file.added_tokens) {
    if (token.content.empty()) continue;
    const auto known = ids.find(token.content);
    const std::int32_t id = known != ids.end() ? known->second : next++;
    if (id != token.id) {
      throw_error<DataError>(
          "{}: added token '{}' has id {}, but its place in the vocabulary is {}", name,
          token.content, token.id, id);
    }
    if (static_cast<std::size_t>(id) >= tokens.size()) tokens.resize(id + 1);
    ids[token.content] = id;
    if (!by_id.count(id)) order.push_back(id);
    by_id[id] = std::move(token);
  }
  for (const std::int32_t id : order) {
    AddedToken& token = by_id[id];
    std::string decoded = token.content;
    if (token.normalized) {
      std::string changed;
      if (normalize(normalizers, token.content, changed)) token.content = decoded = changed;
    }
    tokens[id] = {token.content, byte_level::to_bytes_or_self(decoded), token.special};
    (token.normalized ? normalized : raw).push_back(token);
  }
  raw_added = std::make_unique<AddedTokenFinder>(std::move(raw));
  normalized_added = std::make_unique<AddedTokenFinder>(std::move(normalized));
}

void Tokenizer::Parts::build(const TokenizerFile& file, const std::string& name) {
  const std::string where = name + "/tokenizer.json";
  ids.reserve(file.vocab.size() + file.added_tokens.size());
  for (const auto& [token, id] : file.vocab) {
    if (static_cast<std::size_t>(id) >= tokens.size()) tokens.resize(id + 1);
    if (!tokens[id].spelling.empty()) {
      throw_error<DataError>("{}: model.vocab: '{}' and '{}' have the same id {}", where,
                             tokens[id].spelling, token, id);
    }
    tokens[id] = {token, byte_level::to_bytes_or_self(token), false};
    ids.emplace(token, id);
  }
  const auto id_of = [&](const std::string& token, const char* key) {
    const auto found = ids.find(token);
    if (found == ids.end())
      throw_error<DataError>("{}: {}: token '{}' is not in the vocabulary", where, key, token);
    return found->second;
  };
  std::vector<Bpe::Merge> merges;
  merges.reserve(file.merges.size());
  for (const auto& [left, right] : file.merges) {
    merges.push_back({id_of(left, "model.merges"), id_of(right, "model.merges"),
                      id_of(left + right, "model.merges")});
  }
  Bpe::Options options;
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = ids.find(byte_level::spelling(static_cast<unsigned char>(byte)));
    options.byte_ids[byte] = found == ids.end() ? -1 : found->second;
  }
  if (file.unk_token) {
    // An unk_token that is an added token only is never used by a vocabulary that has all bytes.
    const bool has_all_bytes =
        std::find(options.byte_ids.begin(), options.byte_ids.end(), -1) == options.byte_ids.end();
    if (ids.contains(*file.unk_token) || !has_all_bytes)
      options.unk_id = id_of(*file.unk_token, "model.unk_token");
  }
  options.fuse_unk = file.fuse_unk;
  options.ignore_merges = file.ignore_merges;
  std::unordered_map<std::string, std::int32_t> whole_words;
  if (file.ignore_merges) {
    for (const auto& [token, id] : file.vocab) {
      if (std::string bytes; byte_level::to_bytes(token, bytes))
        whole_words.emplace(std::move(bytes), id);
    }
  }
  bpe = std::make_unique<Bpe>(options, merges, std::move(whole_words));
  normalizers = file.normalizers;
  for (const TokenizerFile::PreTokenizer& stage : file.pre_tokenizers) {
    Stage built;
    built.add_prefix_space = stage.add_prefix_space;
    if (stage.kind == TokenizerFile::PreTokenizer::Kind::kSplit) {
      built.split = make_known_split(stage.pattern);
      if (!built.split) {
        built.split = make_regex_split(stage.pattern, stage.where);
        log::warning(
            "{}: not a split pattern of the Qwen family; PCRE2 matches it, and may cut characters "
            "that are newer than its Unicode version elsewhere than the tokenizers library does",
            stage.where);
      }
    }
    stages.push_back(std::move(built));
  }
  add_tokens(file, where);
  before = file.template_before;
  after = file.template_after;
  for (const std::vector<std::int32_t>* around : {&before, &after}) {
    for (const std::int32_t id : *around) {
      if (static_cast<std::size_t>(id) >= tokens.size()) {
        throw_error<DataError>("{}: post_processor: id {} is not in the vocabulary", where, id);
      }
    }
  }
  chat_templates = file.chat_templates;
  special_tokens = file.special_tokens;
  split_special_tokens = file.split_special_tokens;
  const auto named = [&](const char* key) -> std::optional<std::int32_t> {
    const auto token = special_tokens.find(key);
    if (token == special_tokens.end()) return std::nullopt;
    const auto found = ids.find(token->second);
    if (found == ids.end()) {
      throw_error<DataError>("{}/tokenizer_config.json: {}: token '{}' is not in the vocabulary",
                             name, key, token->second);
    }
    return found->second;
  };
  eos = named("eos_token");
  pad = named("pad_token");
  named("bos_token");  // checked only: no row begins with it unless its template says so
}

void Tokenizer::Parts::words(std::string_view text, std::size_t stage, Workspace& work,
                             std::vector<std::int32_t>& out) const {
  const Stage& current = stages[stage];
  std::string prefixed;
  if (current.add_prefix_space && !text.starts_with(' ')) {
    prefixed.reserve(text.size() + 1);
    prefixed += ' ';
    prefixed += text;
    text = prefixed;
  }
  if (!current.split) {
    bpe->encode(text, work.bpe, out);
    return;
  }
  const bool last = stage + 2 == stages.size() && !stages[stage + 1].add_prefix_space;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = current.split->next(text, at, work.split);
    const std::string_view word = text.substr(at, end - at);
    if (last) {
      bpe->encode(word, work.bpe, out);
    } else {
      words(word, stage + 1, work, out);
    }
    at = end;
  }
}

void Tokenizer::Parts::encode(std::string_view text, const EncodeOptions& options, Workspace& work,
                              std::vector<std::int32_t>& out) const {
  const bool special_as_text = options.special_tokens_as_text || split_special_tokens;
  work.split = SplitBudget(text.size());
  work.outer.clear();
  raw_added->split(text, special_as_text, work.outer);
  for (const AddedTokenFinder::Piece& piece : work.outer) {
    if (piece.id >= 0) {
      out.push_back(piece.id);
      continue;
    }
    std::string_view part = text.substr(piece.begin, piece.end - piece.begin);
    if (normalize(normalizers, part, work.normalized)) part = work.normalized;
    if (normalized_added->empty()) {
      if (!part.empty()) words(part, 0, work, out);
      continue;
    }
    work.inner.clear();
    normalized_added->split(part, special_as_text, work.inner);
    for (const AddedTokenFinder::Piece& inner : work.inner) {
      if (inner.id >= 0) {
        out.push_back(inner.id);
      } else {
        words(part.substr(inner.begin, inner.end - inner.begin), 0, work, out);
      }
    }
  }
}

Tokenizer::Tokenizer() : parts_(std::make_unique<Parts>()) {}
Tokenizer::~Tokenizer() = default;

std::shared_ptr<const Tokenizer> Tokenizer::parse(std::string_view tokenizer_json,
                                                  std::string_view tokenizer_config,
                                                  std::string_view special_tokens_map,
                                                  const std::string& name) {
  const TokenizerFile file =
      read_tokenizer_file(tokenizer_json, tokenizer_config, special_tokens_map, name);
  std::shared_ptr<Tokenizer> tokenizer(new Tokenizer());
  tokenizer->parts_->build(file, name);
  hash::Hasher hasher;
  hasher.add(tokenizer_json);
  for (const AddedToken& token : file.added_tokens) {
    hasher.add(fmt::format("\n{} {} {}{}{}{}{}", token.id, token.content, token.single_word,
                           token.lstrip, token.rstrip, token.normalized, token.special));
  }
  if (file.split_special_tokens) hasher.add("\nsplit_special_tokens");
  tokenizer->parts_->content_hash = hasher.hex();
  return tokenizer;
}

std::shared_ptr<const Tokenizer> Tokenizer::load(const std::filesystem::path& directory,
                                                 const TextFiles& changed) {
  const auto file = [&](const char* name) -> std::string {
    for (const auto& [changed_name, content] : changed) {
      if (changed_name == name) return content;
    }
    const std::filesystem::path path = directory / name;
    if (!std::filesystem::exists(path)) return "";
    const bool is_template = path.extension() == ".jinja";
    return files::read(path, is_template ? files::kTemplateLimit : files::kTokenizerLimit,
                       directory);
  };
  if (!std::filesystem::exists(directory / "tokenizer.json")) {
    throw_error<DataError>(
        "{}: has no tokenizer.json (for older models, save the tokenizer once with transformers, "
        "which writes it)",
        directory.string());
  }
  auto tokenizer = std::const_pointer_cast<Tokenizer>(
      parse(file("tokenizer.json"), file("tokenizer_config.json"), file("special_tokens_map.json"),
            directory.string()));
  auto& templates = tokenizer->parts_->chat_templates;
  if (std::filesystem::exists(directory / "chat_template.jinja")) {
    // Files take the place of what the configuration says.
    templates.clear();
    templates["default"] = file("chat_template.jinja");
  }
  if (const auto more = directory / "additional_chat_templates"; std::filesystem::exists(more)) {
    for (const auto& entry : std::filesystem::directory_iterator(more)) {
      if (entry.path().extension() != ".jinja") continue;
      templates[entry.path().stem().string()] =
          files::read(entry.path(), files::kTemplateLimit, directory);
    }
  }
  return tokenizer;
}

std::shared_ptr<const Tokenizer> Tokenizer::absent(const std::filesystem::path& directory,
                                                   std::int64_t ids) {
  std::shared_ptr<Tokenizer> tokenizer(new Tokenizer());
  tokenizer->parts_->tokens.resize(static_cast<std::size_t>(ids));
  tokenizer->parts_->absent_from = directory.string();
  tokenizer->parts_->content_hash = fmt::format("none, {} ids", ids);
  return tokenizer;
}

std::shared_ptr<const Tokenizer> Tokenizer::load_if_there(const std::filesystem::path& directory,
                                                          std::int64_t ids) {
  if (ids > 0 && !std::filesystem::exists(directory / "tokenizer.json"))
    return absent(directory, ids);
  return load(directory);
}

bool Tokenizer::has_texts() const { return parts_->absent_from.empty(); }

void Tokenizer::require_texts() const {
  if (has_texts()) return;
  throw_error<ConfigError>(
      "{} has no tokenizer.json: without one rows must be token ids (input_ids; prompt_ids, "
      "chosen_ids, rejected_ids); for texts put it there, or name a folder that has one with "
      "model.tokenizer",
      parts_->absent_from);
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view utf8,
                                            const EncodeOptions& options) const {
  require_texts();
  if (utf8.size() > kLongestText) {
    throw_error<DataError>("a text of {} bytes is longer than a tokenizer takes at once ({})",
                           utf8.size(), kLongestText);
  }
  std::unique_ptr<Workspace> work;
  {
    const std::lock_guard lock(parts_->mutex);
    if (!parts_->free.empty()) {
      work = std::move(parts_->free.back());
      parts_->free.pop_back();
    }
  }
  if (!work) work = std::make_unique<Workspace>();
  std::vector<std::int32_t> out;
  out.reserve(utf8.size() / 3 + 8);
  if (options.add_special_tokens) out = parts_->before;
  if (utf8::valid_prefix(utf8) == utf8.size()) {
    parts_->encode(utf8, options, *work, out);
  } else {
    parts_->encode(utf8::replace_invalid(utf8), options, *work, out);
  }
  if (options.add_special_tokens) out.insert(out.end(), parts_->after.begin(), parts_->after.end());
  const std::lock_guard lock(parts_->mutex);
  parts_->free.push_back(std::move(work));
  return out;
}

std::vector<std::vector<std::int32_t>> Tokenizer::encode_batch(std::span<const std::string> texts,
                                                               int threads,
                                                               const EncodeOptions& options) const {
  std::vector<std::vector<std::int32_t>> out(texts.size());
  parallel_items(static_cast<std::int64_t>(texts.size()), threads,
                 [&](std::int64_t i) { out[i] = encode(texts[i], options); });
  return out;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special_tokens) const {
  std::string bytes;
  for (const std::int32_t id : ids) {
    if (skip_special_tokens && is_special(id)) continue;
    bytes += bytes_of(id);
  }
  return utf8::valid_prefix(bytes) == bytes.size() ? bytes : utf8::replace_invalid(bytes);
}

std::int64_t Tokenizer::vocab_size() const {
  return static_cast<std::int64_t>(parts_->tokens.size());
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto found = parts_->ids.find(std::string(token));
  if (found == parts_->ids.end()) return std::nullopt;
  return found->second;
}

std::string Tokenizer::token_of(std::int32_t id) const {
  return id < 0 || id >= vocab_size() ? std::string() : parts_->tokens[id].spelling;
}

std::string_view Tokenizer::bytes_of(std::int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw_error<DataError>("token id {} is outside the vocabulary of {} tokens", id, vocab_size());
  }
  return parts_->tokens[id].bytes;
}

bool Tokenizer::is_special(std::int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->tokens[id].special;
}

std::optional<std::int32_t> Tokenizer::eos_id() const { return parts_->eos; }
std::optional<std::int32_t> Tokenizer::pad_id() const { return parts_->pad; }
const std::string& Tokenizer::content_hash() const { return parts_->content_hash; }
const std::map<std::string, std::string>& Tokenizer::special_tokens() const {
  return parts_->special_tokens;
}

std::optional<std::string> Tokenizer::chat_template(const std::string& name) const {
  const auto found = parts_->chat_templates.find(name);
  if (found == parts_->chat_templates.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> Tokenizer::chat_template_names() const {
  std::vector<std::string> names;
  for (const auto& [name, source] : parts_->chat_templates) names.push_back(name);
  return names;
}

}  // namespace heddle::data
