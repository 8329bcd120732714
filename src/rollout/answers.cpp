#include "rollout/answers.h"

#include <limits>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/json.h"

#include "rollout/engine.h"

namespace heddle::rollout {

namespace {

using Json = nlohmann::ordered_json;

std::vector<std::int32_t> eos_of(const Json& config, const std::string& file) {
  if (!config.is_object() || !config.contains("eos_token_id")) return {};
  const Json& eos = config["eos_token_id"];
  if (eos.is_null()) return {};
  std::vector<std::int32_t> ids;
  for (const Json& id : eos.is_array() ? eos : Json::array({eos})) {
    if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<std::int32_t>::max()) {
      throw_error<ModelError>("{}: 'eos_token_id' is {}: expected a token id or a list of them",
                              file, json::shown(eos));
    }
    ids.push_back(id.get<std::int32_t>());
  }
  return ids;
}

/// As transformers reads them: config.json counts where generation_config.json says nothing.
std::vector<std::int32_t> eos_of(const ckpt::ModelDirectory& source) {
  const Json& config = source.config();
  const auto file = [&](const char* name) { return (source.path() / name).string(); };
  std::vector<std::int32_t> ids =
      eos_of(source.generation_config(), file("generation_config.json"));
  if (ids.empty()) ids = eos_of(config, file("config.json"));
  if (ids.empty() && config.contains("text_config"))
    ids = eos_of(config["text_config"], file("config.json"));
  return ids;
}

}  // namespace

std::vector<std::int32_t> end_tokens(const data::Tokenizer& tokenizer,
                                     const ckpt::ModelDirectory* source) {
  std::set<std::int32_t> ids;
  if (source != nullptr) {
    for (const std::int32_t id : eos_of(*source)) ids.insert(id);
  }
  if (tokenizer.eos_id()) ids.insert(*tokenizer.eos_id());
  if (const auto turn_end = tokenizer.id_of("<|im_end|>")) ids.insert(*turn_end);
  return {ids.begin(), ids.end()};
}

std::int64_t longest_context(const ckpt::ModelDirectory& source) {
  const Json& config = source.config();
  for (const Json& level : {config, config.value("text_config", Json::object())}) {
    const auto positions = level.find("max_position_embeddings");
    if (positions != level.end() && positions->is_number_integer())
      return positions->get<std::int64_t>();
  }
  return 0;
}

std::vector<std::string> answer_prompts(assembly::ModelOnRanks& placed,
                                        const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                        const std::vector<std::string>& prompts,
                                        std::int64_t max_new_tokens,
                                        const data::RenderOptions& rendering) {
  const data::Renderer renderer(*tokenizer, rendering);
  const bool chat = !rendering.chat_template.empty() || tokenizer->chat_template().has_value();
  std::vector<Request> requests;
  for (const std::string& prompt : prompts) {
    data::Row row;
    row.text = prompt;
    if (chat) {
      row.form = data::Row::Form::kConversation;
      row.messages = nlohmann::ordered_json::array({{{"role", "user"}, {"content", prompt}}});
    }
    Request request;
    request.prompt = renderer.tokenize_prompt(row);
    request.max_new_tokens = max_new_tokens;
    request.sampling.temperature = 0;
    request.stop_ids = end_tokens(*tokenizer, placed.source.get());
    requests.push_back(std::move(request));
  }
  std::vector<std::string> answers;
  EngineOptions options;
  options.record_steps = false;  // A few short answers would not pay for the recording.
  for (Completion& completion : generate(placed, tokenizer, requests, options))
    answers.push_back(std::move(completion.text));
  return answers;
}

}  // namespace heddle::rollout
