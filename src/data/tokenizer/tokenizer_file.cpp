#include "data/tokenizer/tokenizer_file.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/errors.h"
#include "base/json.h"
#include "base/quote.h"

namespace heddle::data {
namespace {

// Not ordered_json: that looks a key up by a scan, and a vocabulary has 250,000.
using Json = nlohmann::json;

// No real vocabulary comes near these; they keep a small file from asking for gigabytes, for a deep
// stack or for work that each text then takes again.
constexpr std::int64_t kHighestId = 1 << 24;
constexpr std::int64_t kSpareIds = 1 << 20;  // that name no token, besides three for each that does
constexpr std::size_t kMostStages = 64;      // splits; normalizers
constexpr std::size_t kMostTemplateIds = 1024;
constexpr std::size_t kLongestAddedToken = 512;
constexpr std::size_t kAddedTokenBytes = std::size_t{4} << 20;  // of all of them

/// A value and the path to it, so that every message can say where.
class Node {
 public:
  Node(const Json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  const Json& json() const { return *value_; }
  const std::string& path() const { return path_; }
  bool is_null() const { return value_->is_null(); }

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<DataError>("{}: {}", path_,
                           text::shown(fmt::format(format, std::forward<Args>(args)...), 400));
  }

  bool has(const char* key) const {
    return value_->is_object() && value_->contains(key) && !value_->at(key).is_null();
  }
  Node at(const char* key) const {
    if (!value_->is_object()) fail("expected an object, found {}", value_->type_name());
    const auto found = value_->find(key);
    if (found == value_->end()) fail("key '{}' is missing", key);
    return Node(*found, path_ + "." + key);
  }
  Node at(std::size_t index) const {
    return Node((*value_)[index], fmt::format("{}[{}]", path_, index));
  }
  std::size_t size() const {
    if (!value_->is_array()) fail("expected a list, found {}", value_->type_name());
    return value_->size();
  }
  std::string string() const {
    if (!value_->is_string()) fail("expected a string, found {}", value_->type_name());
    return value_->get<std::string>();
  }
  bool boolean() const {
    if (!value_->is_boolean()) fail("expected true or false, found {}", value_->type_name());
    return value_->get<bool>();
  }
  bool boolean(const char* key, bool otherwise) const {
    return has(key) ? at(key).boolean() : otherwise;
  }
  std::int32_t id() const {
    if (!value_->is_number_integer()) fail("expected a token id, found {}", value_->type_name());
    if (value_->is_number_unsigned() && value_->get<std::uint64_t>() > kHighestId) {
      fail("token id {} is above {}", value_->get<std::uint64_t>(), kHighestId);
    }
    const auto id = value_->get<std::int64_t>();
    if (id < 0) fail("token id {} is negative", id);
    return static_cast<std::int32_t>(id);
  }
  std::string type() const { return at("type").string(); }

 private:
  const Json* value_;
  std::string path_;
};

Json parse(std::string_view text, const std::string& file) {
  return json::parse_as<DataError, Json>(text, file);
}

void read_model(const Node& model, TokenizerFile& out) {
  if (model.has("type") && model.type() != "BPE")
    model.at("type").fail("model '{}' is not supported, only BPE", model.type());
  if (model.has("dropout") && model.at("dropout").json() != 0)
    model.at("dropout").fail("BPE dropout is not supported");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.has(key) && !model.at(key).string().empty())
      model.at(key).fail("is not supported in a byte-level BPE");
  }
  if (model.boolean("byte_fallback", false))
    model.at("byte_fallback").fail("is not supported, only byte-level BPE");
  if (model.has("unk_token")) out.unk_token = model.at("unk_token").string();
  out.fuse_unk = model.boolean("fuse_unk", false);
  out.ignore_merges = model.boolean("ignore_merges", false);

  const Node vocab = model.at("vocab");
  if (!vocab.json().is_object())
    vocab.fail("expected an object, found {}", vocab.json().type_name());
  out.vocab.reserve(vocab.json().size());
  for (const auto& [token, id] : vocab.json().items()) {
    out.vocab.emplace_back(token, id.is_number_unsigned() && id.get<std::uint64_t>() <= kHighestId
                                      ? id.get<std::int32_t>()
                                      : Node(id, vocab.path() + "." + token).id());
  }
  const Node merges = model.at("merges");
  out.merges.reserve(merges.size());
  for (std::size_t i = 0; i < merges.json().size(); ++i) {
    const Json& merge = merges.json()[i];
    if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      const std::size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        merges.at(i).fail("expected two tokens with one space between them, found '{}'", text);
      }
      out.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      out.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
    } else {
      merges.at(i).fail("expected \"left right\" or [\"left\", \"right\"]");
    }
  }
}

void read_normalizer(const Node& node, TokenizerFile& out) {
  const std::string type = node.type();
  NormalForm form;
  if (parse_normal_form(type, form)) {
    out.normalizers.push_back(form);
    if (out.normalizers.size() > kMostStages) node.fail("more than {} normalizers", kMostStages);
  } else if (type == "Sequence") {
    const Node parts = node.at("normalizers");
    for (std::size_t i = 0; i < parts.size(); ++i) read_normalizer(parts.at(i), out);
  } else {
    node.fail("normalizer '{}' is not supported (NFC, NFD, NFKC, NFKD, Sequence are)", type);
  }
}

void read_pre_tokenizer(const Node& node, TokenizerFile& out) {
  using Kind = TokenizerFile::PreTokenizer::Kind;
  const std::string type = node.type();
  if (type == "Sequence") {
    const Node parts = node.at("pretokenizers");
    for (std::size_t i = 0; i < parts.size(); ++i) read_pre_tokenizer(parts.at(i), out);
    return;
  }
  if (out.pre_tokenizers.size() >= kMostStages)
    node.fail("more than {} pre-tokenizers", kMostStages);
  if (!out.pre_tokenizers.empty() && out.pre_tokenizers.back().kind == Kind::kByteLevel) {
    node.fail("a pre-tokenizer after ByteLevel is not supported");
  }
  if (type == "Split") {
    const std::string behavior = node.at("behavior").string();
    if (behavior != "Isolated")
      node.at("behavior").fail("'{}' is not supported, only Isolated", behavior);
    // Inverting swaps match and gap, which "isolated" treats alike.
    const Node pattern = node.at("pattern");
    std::string source;
    if (pattern.has("Regex")) {
      source = pattern.at("Regex").string();
    } else {
      for (const char c : pattern.at("String").string()) {
        if (static_cast<unsigned char>(c) < 0x80 && !std::isalnum(static_cast<unsigned char>(c)))
          source += '\\';
        source += c;
      }
    }
    out.pre_tokenizers.push_back({Kind::kSplit, source, pattern.path(), false});
  } else if (type == "ByteLevel") {
    if (node.boolean("use_regex", true)) {
      out.pre_tokenizers.push_back(
          {Kind::kSplit,
           R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
           node.path(), node.at("add_prefix_space").boolean()});
      out.pre_tokenizers.push_back({Kind::kByteLevel, "", node.path(), false});
    } else {
      out.pre_tokenizers.push_back(
          {Kind::kByteLevel, "", node.path(), node.at("add_prefix_space").boolean()});
    }
  } else {
    node.fail("pre-tokenizer '{}' is not supported (Split, ByteLevel, Sequence are)", type);
  }
}

void read_post_processor(const Node& node, TokenizerFile& out) {
  const std::string type = node.type();
  if (type == "ByteLevel") return;  // concerns offsets only
  if (type == "Sequence") {
    const Node parts = node.at("processors");
    for (std::size_t i = 0; i < parts.size(); ++i) read_post_processor(parts.at(i), out);
    return;
  }
  if (type != "TemplateProcessing") {
    node.fail("post-processor '{}' is not supported (ByteLevel, TemplateProcessing, Sequence are)",
              type);
  }
  if (!out.template_before.empty() || !out.template_after.empty())
    node.fail("a second template is not supported");
  const Node single = node.at("single");
  bool seen = false;
  for (std::size_t i = 0; i < single.size(); ++i) {
    const Node piece = single.at(i);
    if (piece.has("Sequence")) {
      if (seen) piece.fail("the sequence stands twice");
      seen = true;
      continue;
    }
    const std::string token = piece.at("SpecialToken").at("id").string();
    const Node ids = node.at("special_tokens").at(token.c_str()).at("ids");
    for (std::size_t j = 0; j < ids.size(); ++j) {
      (seen ? out.template_after : out.template_before).push_back(ids.at(j).id());
      if (out.template_before.size() + out.template_after.size() > kMostTemplateIds)
        node.fail("a template of more than {} tokens", kMostTemplateIds);
    }
  }
}

AddedToken read_added_token(const Node& node) {
  AddedToken token;
  token.content = node.at("content").string();
  if (token.content.size() > kLongestAddedToken)
    node.fail("an added token has {} bytes, at most {} are supported", token.content.size(),
              kLongestAddedToken);
  token.special = node.boolean("special", false);
  token.single_word = node.boolean("single_word", false);
  token.lstrip = node.boolean("lstrip", false);
  token.rstrip = node.boolean("rstrip", false);
  token.normalized = node.boolean("normalized", !token.special);
  return token;
}

/// A token of a configuration: its spelling, or an object with the spelling inside.
std::optional<std::string> named_token(const Node& config, const char* key) {
  if (!config.has(key)) return std::nullopt;
  const Node token = config.at(key);
  return token.json().is_object() ? token.at("content").string() : token.string();
}

/// Every key that names a token, also those of single models (image_token); a name that is known
/// already stays.
void read_special_tokens(const Node& config, TokenizerFile& out) {
  if (!config.json().is_object()) {
    config.fail("expected an object, found {}", config.json().type_name());
  }
  for (const auto& [key, value] : config.json().items()) {
    const bool is_token = value.is_string() || (value.is_object() && value.contains("content"));
    if (!key.ends_with("_token") || !is_token) continue;
    out.special_tokens.emplace(key, *named_token(config, key.c_str()));
  }
  for (const char* named : {"extra_special_tokens", "model_specific_special_tokens"}) {
    if (!config.has(named) || !config.at(named).json().is_object()) continue;
    const Node tokens = config.at(named);
    for (const auto& [key, unused] : tokens.json().items()) {
      if (const auto token = named_token(tokens, key.c_str()))
        out.special_tokens.emplace(key, *token);
    }
  }
}

void read_config(const Node& config, TokenizerFile& out) {
  out.split_special_tokens = config.boolean("split_special_tokens", false);
  if (config.has("added_tokens_decoder")) {
    const Node added = config.at("added_tokens_decoder");
    std::vector<AddedToken> more;
    std::unordered_set<std::string> known;
    for (const AddedToken& token : out.added_tokens) known.insert(token.content);
    if (!added.json().is_object())
      added.fail("expected an object, found {}", added.json().type_name());
    for (const auto& [key, value] : added.json().items()) {
      const Node node(value, added.path() + "." + key);
      AddedToken token = read_added_token(node);
      std::int64_t id = 0;
      for (const char c : key) {
        if (c < '0' || c > '9' || id > kHighestId) node.fail("'{}' is not a token id", key);
        id = id * 10 + (c - '0');
      }
      if (id > kHighestId) node.fail("token id {} is above {}", key, kHighestId);
      token.id = static_cast<std::int32_t>(id);
      if (!known.contains(token.content)) more.push_back(std::move(token));
    }
    // By number, not by spelling: ids that are not in the vocabulary are given out in this order.
    std::sort(more.begin(), more.end(),
              [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
    out.added_tokens.insert(out.added_tokens.end(), std::make_move_iterator(more.begin()),
                            std::make_move_iterator(more.end()));
  }
  if (!config.has("chat_template")) return;
  const Node chat = config.at("chat_template");
  if (chat.json().is_string()) {
    out.chat_templates["default"] = chat.string();
    return;
  }
  if (chat.json().is_object()) {
    for (const auto& [name, unused] : chat.json().items())
      out.chat_templates[name] = chat.at(name.c_str()).string();
    return;
  }
  for (std::size_t i = 0; i < chat.size(); ++i) {
    out.chat_templates[chat.at(i).at("name").string()] = chat.at(i).at("template").string();
  }
}

/// Memory goes with the highest id and with the bytes of added tokens.
void check_sizes(const Node& root, const TokenizerFile& file) {
  const auto tokens = static_cast<std::int64_t>(file.vocab.size() + file.added_tokens.size());
  for (const auto& [token, id] : file.vocab) {
    if (id >= kSpareIds + 4 * tokens)
      root.fail("model.vocab: '{}' has id {} in a vocabulary of {} tokens", token, id, tokens);
  }
  std::size_t bytes = 0;
  for (const AddedToken& token : file.added_tokens) bytes += token.content.size();
  if (bytes > kAddedTokenBytes) {
    root.fail("added_tokens: they have {} bytes, at most {} are supported", bytes,
              kAddedTokenBytes);
  }
}

}  // namespace

TokenizerFile read_tokenizer_file(std::string_view tokenizer_json,
                                  std::string_view tokenizer_config,
                                  std::string_view special_tokens_map, const std::string& name) {
  TokenizerFile out;
  const std::string file = name + "/tokenizer.json";
  const Json document = parse(tokenizer_json, file);
  const Node root(document, file);
  read_model(root.at("model"), out);
  if (root.has("normalizer")) read_normalizer(root.at("normalizer"), out);
  if (!root.has("pre_tokenizer"))
    root.fail("has no pre_tokenizer: only byte-level BPE is supported");
  read_pre_tokenizer(root.at("pre_tokenizer"), out);
  if (out.pre_tokenizers.empty() ||
      out.pre_tokenizers.back().kind != TokenizerFile::PreTokenizer::Kind::kByteLevel) {
    root.at("pre_tokenizer").fail("does not end with ByteLevel: only byte-level BPE is supported");
  }
  if (root.has("decoder") && root.at("decoder").type() != "ByteLevel") {
    root.at("decoder").fail("decoder '{}' is not supported, only ByteLevel",
                            root.at("decoder").type());
  }
  if (root.has("post_processor")) read_post_processor(root.at("post_processor"), out);
  if (root.has("added_tokens")) {
    const Node added = root.at("added_tokens");
    for (std::size_t i = 0; i < added.size(); ++i) {
      AddedToken token = read_added_token(added.at(i));
      token.id = added.at(i).at("id").id();
      out.added_tokens.push_back(std::move(token));
    }
  }
  if (!tokenizer_config.empty()) {
    const std::string config_file = name + "/tokenizer_config.json";
    const Json config = parse(tokenizer_config, config_file);
    read_config(Node(config, config_file), out);
    read_special_tokens(Node(config, config_file), out);
  }
  if (!special_tokens_map.empty()) {
    const std::string map_file = name + "/special_tokens_map.json";
    const Json map = parse(special_tokens_map, map_file);
    read_special_tokens(Node(map, map_file), out);
  }
  check_sizes(root, out);
  return out;
}

}  // namespace heddle::data
