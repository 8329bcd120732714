#include "serve/openai/completions.h"

#include <utility>

#include "base/json.h"
#include "serve/openai/reply.h"

namespace heddle::serve::openai {
namespace {

constexpr std::int64_t kUsualMaxTokens = 16;

class CompletionReply : public Reply {
 public:
  CompletionReply(Service& service, Sampling sampling, const Request& request, Responder responder,
                  bool echoes, bool has_logprobs, std::size_t prompts)
      : Reply(service, std::move(sampling), request, std::move(responder), "cmpl-"),
        echoes_(echoes),
        has_logprobs_(has_logprobs),
        offsets_(prompts * static_cast<std::size_t>(sampling_.generation.samples)) {}

 protected:
  const char* object_name() const override { return "text_completion"; }
  const char* chunk_name() const override { return "text_completion"; }

  std::vector<Json> first_pieces(std::size_t choice) override {
    if (!echoes_) return {};
    const std::string prompt = prompt_text(choice);
    offsets_[choice] = characters(prompt);
    return {piece(choice, prompt, nullptr, nullptr)};
  }

  std::vector<Json> pieces(std::size_t choice, const GeneratedToken& token) override {
    Json table;
    if (has_logprobs_) {
      table = Logprobs::empty_table();
      logprobs_.append(table, token.id, token.logprob, token.top, offsets_[choice]);
    }
    if (token.text.empty() && !has_logprobs_ && !sampling_.returns_token_ids) return {};
    Json made = piece(choice, token.text, std::move(table), nullptr);
    if (sampling_.returns_token_ids) made["token_ids"] = {token.id};
    return {made};
  }

  std::vector<Json> last_pieces(std::size_t choice, const GeneratedSequence& answer) override {
    Json last = piece(choice, ending_of(choice, answer), nullptr, finish_reason(answer));
    last["stop_reason"] = stop_reason_of(choice, answer);
    return {last};
  }

  Json whole(std::size_t choice, const GeneratedSequence& answer,
             const GenerationResult& result) override {
    std::size_t offset = 0;
    Json table;
    if (has_logprobs_) table = Logprobs::empty_table();
    if (has_logprobs_ && echoes_) append_prompt(table, choice, result, offset);
    for (std::size_t t = 0; has_logprobs_ && t < answer.ids.size(); ++t) {
      logprobs_.append(table, answer.ids[t], answer.logprobs[t],
                       t < answer.top.size() ? answer.top[t] : std::vector<TokenLogprob>(), offset);
    }
    Json object = piece(
        choice, (echoes_ ? prompt_text(choice) : "") + answer.text + ending_of(choice, answer),
        std::move(table), finish_reason(answer));
    object["stop_reason"] = stop_reason_of(choice, answer);
    if (sampling_.generation.prompt_logprobs)
      object["prompt_logprobs"] = logprobs_.prompt_table(generation_of(choice).prompt, result);
    if (sampling_.returns_token_ids) {
      object["token_ids"] = answer.ids;
      object["prompt_token_ids"] = generation_of(choice).prompt;
    }
    return object;
  }

 private:
  static const char* finish_reason(const GeneratedSequence& answer) {
    return answer.end == GenerationEnd::kStop ? "stop" : "length";
  }
  static Json piece(std::size_t choice, std::string text, Json logprobs, Json finish_reason) {
    return {{"index", choice},
            {"text", std::move(text)},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", std::move(finish_reason)}};
  }
  std::string prompt_text(std::size_t choice) const {
    return service_.tokenizer->decode(generation_of(choice).prompt);
  }
  void append_prompt(Json& table, std::size_t choice, const GenerationResult& result,
                     std::size_t& offset) const {
    const std::vector<std::int32_t>& prompt = generation_of(choice).prompt;
    for (std::size_t t = 0; t < prompt.size() && t < result.prompt_logprobs.size(); ++t) {
      logprobs_.append(
          table, prompt[t], result.prompt_logprobs[t],
          t < result.prompt_top.size() ? result.prompt_top[t] : std::vector<TokenLogprob>(),
          offset);
    }
  }

  bool echoes_, has_logprobs_;
  std::vector<std::size_t> offsets_;  ///< Characters of the text so far, of each choice.
};

/// A text, texts, token ids or lists of token ids.
std::vector<std::vector<std::int32_t>> take_prompts(Fields& fields, const Service& service) {
  const Json given = fields.take("prompt");
  const bool adds_special = fields.boolean("add_special_tokens").value_or(true);
  const auto encode = [&](const Json& text) {
    return service.tokenizer->encode(text.get<std::string>(), {.add_special_tokens = adds_special});
  };
  if (given.is_string()) return {encode(given)};
  if (!given.is_array() || given.empty()) {
    throw_field("prompt", "is {}: expected a text, token ids, or a list of one of them",
                json::shown(given));
  }
  if (given[0].is_number()) return {token_ids(given, "prompt", service.facts().vocabulary)};
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const std::string field = fmt::format("prompt[{}]", i);
    if (given[i].is_string()) {
      prompts.push_back(encode(given[i]));
    } else {
      prompts.push_back(token_ids(given[i], field, service.facts().vocabulary));
    }
  }
  return prompts;
}

}  // namespace

void answer_completion(Service& service, const Request& request, const Responder& responder) {
  Fields fields = Fields::parse(request.body);
  Sampling sampling = take_sampling(fields, service.facts(), request.caller);
  service.models.require(sampling.model);
  std::vector<std::vector<std::int32_t>> prompts = take_prompts(fields, service);
  const bool echoes = fields.boolean("echo").value_or(false);
  const auto logprobs = fields.integer("logprobs", 0, 20);
  fields.only("best_of", sampling.generation.samples, "ask for 'n' answers and choose");
  fields.only("suffix", "", "the model only continues text");
  fields.finish();
  sampling.generation.top_logprobs = logprobs.value_or(0);
  if (echoes && logprobs) {
    if (sampling.streams)
      throw_field("echo", "is not served with 'stream' and 'logprobs' together");
    sampling.generation.prompt_logprobs =
        std::max(sampling.generation.prompt_logprobs.value_or(0), *logprobs);
  }
  std::vector<Generation> generations;
  for (std::vector<std::int32_t>& prompt : prompts) {
    generations.push_back(
        generation_of(sampling, std::move(prompt), service.facts(), kUsualMaxTokens));
  }
  if (generations[0].max_tokens == 0 && !echoes)
    throw_field("max_tokens", "is 0: expected 1 or more, or 'echo' true");
  std::make_shared<CompletionReply>(service, std::move(sampling), request, responder, echoes,
                                    logprobs.has_value(), generations.size())
      ->start(std::move(generations));
}

}  // namespace heddle::serve::openai
