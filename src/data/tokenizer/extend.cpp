#include "data/tokenizer/extend.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "base/errors.h"
#include "base/files.h"
#include "base/json.h"
#include "data/tokenizer/tokenizer_file.h"

namespace heddle::data {
namespace {

using Json = nlohmann::ordered_json;

struct Range {
  std::size_t begin = 0, end = 0;
};

/// Where the string that begins at `at` ends (after the closing quote).
std::size_t string_end(std::string_view json, std::size_t at) {
  for (++at; at < json.size() && json[at] != '"'; ++at) {
    if (json[at] == '\\') ++at;
  }
  return at + 1;
}

/// The value of a key of the outermost object. The text must be valid JSON: it is searched, not
/// parsed, so that a file of many megabytes can be changed in one place and nowhere else.
std::optional<Range> value_of(std::string_view json, std::string_view key) {
  const std::string quoted = Json(key).dump();
  int depth = 0;
  std::optional<std::size_t> begin;
  for (std::size_t at = 0; at < json.size();) {
    const char c = json[at];
    if (c == '"') {
      const std::size_t end = string_end(json, at);
      std::size_t next = json.find_first_not_of(" \t\r\n", end);
      const bool is_key = depth == 1 && next < json.size() && json[next] == ':';
      if (is_key && json.substr(at, end - at) == quoted) {
        begin = json.find_first_not_of(" \t\r\n", next + 1);
      }
      at = end;
      continue;
    }
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    const bool is_value_over = depth == 1 && (c == '}' || c == ']' || c == ',');
    if (begin && at >= *begin && (is_value_over || depth == 0)) {
      return Range{*begin, c == ',' || depth == 0 ? at : at + 1};
    }
    ++at;
  }
  return std::nullopt;
}

Json entry_of(const std::string& token) {
  return {{"content", token}, {"single_word", false}, {"lstrip", false},
          {"rstrip", false},  {"normalized", false},  {"special", true}};
}

/// tokenizer.json with further entries in added_tokens.
std::string with_added_tokens(const std::string& json,
                              const std::vector<std::pair<std::string, std::int32_t>>& tokens) {
  std::string entries;
  for (const auto& [token, id] : tokens) {
    Json entry = {{"id", id}};
    entry.update(entry_of(token));
    if (!entries.empty()) entries += ",";
    entries += "\n    ";
    for (const char c : entry.dump(2)) entries += c == '\n' ? "\n    " : std::string(1, c);
  }
  const auto list = value_of(json, "added_tokens");
  if (list && json[list->begin] == '[') {
    // Behind the last entry, before the white space that closes the list.
    std::size_t at = list->end - 1;
    while (std::isspace(static_cast<unsigned char>(json[at - 1]))) --at;
    const bool is_empty = json[at - 1] == '[';
    return json.substr(0, at) + (is_empty ? "" : ",") + entries + (is_empty ? "\n  " : "") +
           json.substr(at);
  }
  const std::string whole = "[" + entries + "\n  ]";
  if (list) return json.substr(0, list->begin) + whole + json.substr(list->end);
  const std::size_t open = json.find('{') + 1;
  return json.substr(0, open) + "\n  \"added_tokens\": " + whole + "," + json.substr(open);
}

/// Appends to a list of special tokens under whichever name a version of transformers gave it.
void append_special(Json& config, const std::string& token) {
  for (const char* key : {"additional_special_tokens", "extra_special_tokens"}) {
    if (config.contains(key) && config[key].is_array()) {
      config[key].push_back(token);
      return;
    }
  }
  config["additional_special_tokens"] = Json::array({token});
}

void extend_config(Json& config, const std::string& token, std::int32_t id) {
  if (config.contains("added_tokens_decoder") && config["added_tokens_decoder"].is_object()) {
    config["added_tokens_decoder"][std::to_string(id)] = entry_of(token);
  }
  append_special(config, token);
}

}  // namespace

ExtendedTokenizer extend_tokenizer(const std::filesystem::path& directory,
                                   const std::vector<std::string>& tokens) {
  std::set<std::string> seen;
  for (const std::string& token : tokens) {
    if (token.empty()) throw DataError("an added token is empty");
    if (!seen.insert(token).second) throw_error<DataError>("added token '{}' stands twice", token);
  }
  ExtendedTokenizer result;
  result.tokenizer = Tokenizer::load(directory);
  const std::string json =
      files::read(directory / "tokenizer.json", files::kTokenizerLimit, directory);
  const auto text_of = [&](const char* name) {
    return std::filesystem::exists(directory / name)
               ? files::read(directory / name, files::kTokenizerLimit, directory)
               : "";
  };
  const std::string config_text = text_of("tokenizer_config.json");
  const TokenizerFile file = read_tokenizer_file(json, config_text, "", directory.string());

  std::vector<std::pair<std::string, std::int32_t>> entries;
  auto next = static_cast<std::int32_t>(result.tokenizer->vocab_size());
  for (const std::string& token : tokens) {
    const bool is_added =
        std::any_of(file.added_tokens.begin(), file.added_tokens.end(),
                    [&](const AddedToken& known) { return known.content == token; });
    if (is_added) continue;
    const auto known = result.tokenizer->id_of(token);
    entries.emplace_back(token, known ? *known : next);
    if (!known) result.added.emplace_back(token, next++);
  }
  if (entries.empty()) return result;

  result.changed.emplace_back("tokenizer.json", with_added_tokens(json, entries));
  Json config = config_text.empty()
                    ? Json::object()
                    : json::parse_as<DataError>(config_text, "tokenizer_config.json");
  for (const auto& [token, id] : entries) extend_config(config, token, id);
  result.changed.emplace_back("tokenizer_config.json", config.dump(2) + "\n");
  if (const std::string text = text_of("special_tokens_map.json"); !text.empty()) {
    Json map = json::parse_as<DataError>(text, "special_tokens_map.json");
    for (const auto& [token, id] : entries) append_special(map, token);
    result.changed.emplace_back("special_tokens_map.json", map.dump(2) + "\n");
  }
  if (const std::string text = text_of("added_tokens.json"); !text.empty()) {
    Json map = json::parse_as<DataError>(text, "added_tokens.json");
    for (const auto& [token, id] : entries) map[token] = id;
    result.changed.emplace_back("added_tokens.json", map.dump(2) + "\n");
  }
  result.tokenizer = Tokenizer::load(directory, result.changed);
  return result;
}

}  // namespace heddle::data
