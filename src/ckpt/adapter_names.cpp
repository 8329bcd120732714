#include "ckpt/adapter_names.h"

#include <algorithm>

namespace heddle::ckpt {
namespace {

constexpr std::string_view kModel = "model.";
constexpr std::string_view kLanguageModel = "language_model.";
constexpr std::string_view kVisual = "visual.";

bool is_bare_decoder(std::string_view name) {
  return name.starts_with("layers.") || name.starts_with("embed_tokens") || name == "norm" ||
         name.starts_with("norm.");
}

bool ends_dotted(std::string_view name, std::string_view suffix) {
  return name == suffix || (name.size() > suffix.size() && name.ends_with(suffix) &&
                            name[name.size() - suffix.size() - 1] == '.');
}

}  // namespace

AdapterSpelling spelling_for(const nlohmann::ordered_json& config, bool has_head) {
  std::string architecture;
  const auto found = config.find("architectures");
  if (found != config.end() && found->is_array() && !found->empty() && found->front().is_string()) {
    architecture = found->front().get<std::string>();
  }
  const bool is_nested = architecture.ends_with("ForConditionalGeneration") ||
                         (config.contains("text_config") && architecture.ends_with("Model") &&
                          !architecture.ends_with("TextModel"));
  if (has_head) return is_nested ? AdapterSpelling::kNested : AdapterSpelling::kText;
  return is_nested ? AdapterSpelling::kBareNested : AdapterSpelling::kBare;
}

std::string auto_class(const nlohmann::ordered_json& config, bool is_embedding,
                       bool is_classifier) {
  if (is_embedding) return "AutoModel";
  if (is_classifier) return "AutoModelForSequenceClassification";
  return spelling_for(config) == AdapterSpelling::kNested ? "AutoModelForImageTextToText"
                                                          : "AutoModelForCausalLM";
}

std::optional<AdapterSpelling> spelling_of(std::string_view name) {
  if (name.starts_with(kLanguageModel) || name.starts_with(kVisual))
    return AdapterSpelling::kBareNested;
  if (is_bare_decoder(name)) return AdapterSpelling::kBare;
  if (!name.starts_with(kModel)) return std::nullopt;
  name.remove_prefix(kModel.size());
  const bool is_nested = name.starts_with(kLanguageModel) || name.starts_with(kVisual);
  return is_nested ? AdapterSpelling::kNested : AdapterSpelling::kText;
}

std::string to_text_spelling(std::string_view name) {
  const auto spelling = spelling_of(name);
  if (!spelling) return std::string(name);
  if (name.starts_with(kModel)) name.remove_prefix(kModel.size());
  if (name.starts_with(kLanguageModel)) name.remove_prefix(kLanguageModel.size());
  return std::string(kModel) + std::string(name);
}

std::string to_spelling(std::string_view name, AdapterSpelling spelling) {
  const std::string text = to_text_spelling(name);
  if (!text.starts_with(kModel)) return text;
  const std::string rest = text.substr(kModel.size());
  const bool is_decoder = !rest.starts_with(kVisual);
  switch (spelling) {
    case AdapterSpelling::kText:
      return text;
    case AdapterSpelling::kNested:
      return std::string(kModel) + std::string(is_decoder ? kLanguageModel : "") + rest;
    case AdapterSpelling::kBare:
      return rest;
    case AdapterSpelling::kBareNested:
      return std::string(is_decoder ? kLanguageModel : "") + rest;
  }
  return text;
}

bool is_vision(std::string_view name) {
  return name.starts_with(kModel) && name.substr(kModel.size()).starts_with(kVisual);
}

bool is_saved_whole(const std::vector<std::string>& modules_to_save, std::string_view parameter) {
  for (std::size_t end = parameter.find('.'); end != std::string_view::npos;
       end = parameter.find('.', end + 1)) {
    const std::string_view module = parameter.substr(0, end);
    const bool is_named = std::any_of(
        modules_to_save.begin(), modules_to_save.end(),
        [&](const std::string& entry) { return !entry.empty() && module.ends_with(entry); });
    if (is_named) return true;
  }
  return false;
}

std::vector<std::string> targeted_parameters(const AdapterConfig& config, std::string_view module) {
  // Routed experts are one module with two parameters, in this order; any other has its weight.
  std::vector<std::string_view> own = {"weight"};
  if (ends_dotted(module, "experts")) own = {"gate_up_proj", "down_proj"};
  std::vector<std::string> parameters;
  for (const std::string_view parameter : own) {
    const std::string full = std::string(module) + "." + std::string(parameter);
    const bool is_target =
        std::any_of(config.target_parameters.begin(), config.target_parameters.end(),
                    [&](const std::string& target) { return ends_dotted(full, target); });
    if (is_target) parameters.emplace_back(parameter);
  }
  return parameters;
}

}  // namespace heddle::ckpt
