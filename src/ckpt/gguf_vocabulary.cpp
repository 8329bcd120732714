#include "ckpt/gguf_vocabulary.h"

#include <limits>
#include <optional>

#include "base/errors.h"
#include "base/files.h"
#include "base/json.h"

namespace heddle::ckpt {
namespace {

using Json = nlohmann::ordered_json;

// Kinds of tokens as llama.cpp numbers them.
constexpr std::int32_t kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5;

/// The splitting rule, by llama.cpp's names: "qwen35" counts marks (\p{M}) as letters.
std::string rule_of(const Json& tokenizer) {
  const std::string rule = tokenizer.value("pre_tokenizer", Json()).dump();
  return rule.find("\\\\p{M}") != std::string::npos ? "qwen35" : "qwen2";
}

std::optional<std::uint32_t> token_id(const Json& value) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  if (value.is_number_unsigned() && value.get<std::uint64_t>() <= kMost)
    return value.get<std::uint32_t>();
  if (value.is_array() && !value.empty()) return token_id(value.front());
  return std::nullopt;
}

}  // namespace

void add_gguf_vocabulary(GgufFile& file, const ModelDirectory& source, std::int64_t vocab_size) {
  const Path path = source.path() / "tokenizer.json";
  if (!std::filesystem::exists(path))
    throw_error<ModelError>("{}: there is no tokenizer.json, which a GGUF file needs",
                            source.path().string());
  const Json tokenizer = json::parse_as<ModelError>(
      files::read(path, files::kTokenizerLimit, source.path()), path.string());
  const Json& model = tokenizer.at("model");
  if (model.value("type", "BPE") != "BPE")
    throw_error<ModelError>("{}: only BPE tokenizers have a place in this GGUF layout",
                            path.string());
  std::vector<std::string> tokens(static_cast<std::size_t>(vocab_size));
  std::vector<std::int32_t> kinds(tokens.size(), kUnused);
  const auto set = [&](const Json& id, const std::string& text, std::int32_t kind) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size)
      throw_error<ModelError>("{}: token {} is beyond the model's {} rows", path.string(),
                              json::shown(id), vocab_size);
    tokens[id.get<std::size_t>()] = text;
    kinds[id.get<std::size_t>()] = kind;
  };
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = fmt::format("[PAD{}]", i);
  for (const auto& [text, id] : model.at("vocab").items()) set(id, text, kNormal);
  for (const Json& added : tokenizer.value("added_tokens", Json::array())) {
    set(added.at("id"), added.at("content"),
        added.value("special", false) ? kControl : kUserDefined);
  }
  std::vector<std::string> merges;
  for (const Json& merge : model.at("merges")) {
    merges.push_back(merge.is_string()
                         ? merge.get<std::string>()
                         : merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>());
  }
  file.add("tokenizer.ggml.model", std::string("gpt2"));
  file.add("tokenizer.ggml.pre", rule_of(tokenizer));
  file.add("tokenizer.ggml.tokens", tokens);
  file.add("tokenizer.ggml.token_type", kinds);
  file.add("tokenizer.ggml.merges", merges);
  const auto add_id = [&](const char* name, const char* key) {
    for (const Json* config : {&source.generation_config(), &source.config()}) {
      if (!config->is_object() || !config->contains(key)) continue;
      if (const auto id = token_id((*config)[key])) {
        file.add(fmt::format("tokenizer.ggml.{}_token_id", name), *id);
        return;
      }
    }
  };
  add_id("bos", "bos_token_id");
  add_id("eos", "eos_token_id");
  add_id("padding", "pad_token_id");
  if (const Path template_file = source.path() / "chat_template.jinja";
      std::filesystem::exists(template_file)) {
    file.add("tokenizer.chat_template",
             files::read(template_file, files::kTemplateLimit, source.path()));
    return;
  }
  const Path settings = source.path() / "tokenizer_config.json";
  if (!std::filesystem::exists(settings)) return;
  const Json config = read_json_object(settings);
  if (config.contains("chat_template") && config["chat_template"].is_string())
    file.add("tokenizer.chat_template", config["chat_template"].get<std::string>());
}

}  // namespace heddle::ckpt
