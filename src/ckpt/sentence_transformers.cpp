#include "ckpt/sentence_transformers.h"

#include <array>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/log.h"
#include "base/quote.h"

namespace heddle::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kModules = "modules.json";
constexpr const char* kPrompts = "config_sentence_transformers.json";

// Keys of 1_Pooling/config.json up to version 5, which later ones read too, and the names that
// later ones write as pooling_mode.
constexpr std::array<std::pair<const char*, const char*>, 6> kPoolings = {
    {{"pooling_mode_cls_token", "cls"},
     {"pooling_mode_mean_tokens", "mean"},
     {"pooling_mode_max_tokens", "max"},
     {"pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"},
     {"pooling_mode_weightedmean_tokens", "weightedmean"},
     {"pooling_mode_lasttoken", "lasttoken"}}};
constexpr std::string_view kLastToken = "lasttoken";

std::string text_of(const Json& json) { return json.dump(2) + "\n"; }

bool is_there(const Path& file) {
  std::error_code ignored;
  return std::filesystem::exists(file, ignored);
}

/// Names of the poolings that are on, joined with "and".
std::string poolings_of(const Json& config) {
  if (const auto mode = config.find("pooling_mode"); mode != config.end())
    return mode->is_string() ? mode->get<std::string>() : json::shown(*mode);
  std::string names;
  for (const auto& [key, name] : kPoolings) {
    const auto value = config.find(key);
    if (value == config.end() || *value != true) continue;
    names += (names.empty() ? "" : " and ") + std::string(name);
  }
  return names.empty() ? "mean" : names;
}

void require_last_token(const Path& file, const Path& directory) {
  if (!is_there(file)) {
    log::warning("{}: is missing; embeddings are taken as those of the last token", file.string());
    return;
  }
  const std::string pooling =
      poolings_of(json::read_object<ModelError>(file, files::kJsonLimit, directory));
  if (pooling == kLastToken) return;
  throw_error<ModelError>(
      "{}: the model's embeddings are pooled by {}, and Heddle embeds a text by its last token; "
      "take a model of that pooling, or remove modules.json to train this one anew",
      file.string(), text::shown(pooling));
}

void warn_of_prompts(const Path& file) {
  const Json config = json::read_object<ModelError>(file, files::kJsonLimit, file.parent_path());
  const auto prompts = config.find("prompts");
  if (prompts == config.end() || !prompts->is_object()) return;
  for (const auto& [name, prompt] : prompts->items()) {
    if (!prompt.is_string() || prompt.get<std::string>().empty()) continue;
    log::warning(
        "{}: the prompt '{}' ({}) is not put before texts here: write it into the rows that "
        "need it",
        file.string(), text::shown(name), json::shown(prompt));
  }
}

}  // namespace

Files sentence_transformers_files(std::int64_t hidden_size, bool normalize,
                                  std::int64_t max_length) {
  const auto module = [](int index, const char* path, const char* type) {
    return Json{{"idx", index},
                {"name", std::to_string(index)},
                {"path", path},
                {"type", std::string("sentence_transformers.models.") + type}};
  };
  Json modules = {module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling")};
  if (normalize) modules.push_back(module(2, "2_Normalize", "Normalize"));
  Json pooling = {{"word_embedding_dimension", hidden_size}};
  for (const auto& [key, name] : kPoolings) pooling[key] = name == kLastToken;
  pooling["include_prompt"] = true;
  Files files = {{kModules, text_of(modules)},
                 {"sentence_bert_config.json",
                  text_of({{"max_seq_length", max_length}, {"do_lower_case", false}})},
                 {"1_Pooling/config.json", text_of(pooling)}};
  // Older versions ask for the folder of each module.
  if (normalize) files.emplace_back("2_Normalize/config.json", "{}\n");
  return files;
}

void require_last_token_embeddings(const Path& directory) {
  const Path file = directory / kModules;
  if (!is_there(file)) return;
  const Json modules =
      json::parse_as<ModelError>(files::read(file, files::kJsonLimit, directory), file.string());
  if (!modules.is_array()) throw_error<ModelError>("{}: must hold a list", file.string());
  for (const Json& module : modules) {
    if (!module.is_object() || !module.value("type", Json()).is_string() ||
        !module.value("path", Json()).is_string()) {
      throw_error<ModelError>("{}: each module needs the texts 'type' and 'path'", file.string());
    }
    const std::string type = module["type"], path = module["path"];
    const std::string kind = type.substr(type.rfind('.') + 1);
    if (kind == "Pooling") {
      require_last_token(directory / path / "config.json", directory);
    } else if (kind != "Transformer" && kind != "Normalize") {
      throw_error<ModelError>(
          "{}: the model's embeddings pass through '{}' ({}), which is not built: its vectors "
          "would "
          "be others here",
          file.string(), text::shown(kind), text::shown(path));
    }
  }
  if (is_there(directory / kPrompts)) warn_of_prompts(directory / kPrompts);
}

}  // namespace heddle::ckpt
