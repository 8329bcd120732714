#include "serve/openai/generate.h"

#include <utility>

#include "base/json.h"
#include "serve/openai/reply.h"

namespace heddle::serve::openai {
namespace {

constexpr std::int64_t kUsualMaxTokens = 16;

class GenerateReply : public Reply {
 public:
  GenerateReply(Service& service, Sampling sampling, const Request& request, Responder responder,
                std::string request_id, bool has_logprobs)
      : Reply(service, std::move(sampling), request, std::move(responder), ""),
        request_id_(std::move(request_id)),
        has_logprobs_(has_logprobs) {}

 protected:
  const char* object_name() const override { return "generate"; }
  const char* chunk_name() const override { return "generate.chunk"; }

  Json envelope(const char* object) const override {
    Json made = Reply::envelope(object);
    made.erase("id");
    made["request_id"] = request_id_;
    return made;
  }
  std::vector<Json> first_pieces(std::size_t) override { return {}; }
  std::vector<Json> pieces(std::size_t choice, const GeneratedToken& token) override {
    Json entries;
    if (has_logprobs_)
      entries = {{"content", {logprobs_.chat_entry(token.id, token.logprob, token.top)}}};
    return {piece(choice, {token.id}, std::move(entries), nullptr)};
  }
  std::vector<Json> last_pieces(std::size_t choice, const GeneratedSequence& answer) override {
    return {piece(choice, {}, nullptr, finish_reason(answer))};
  }
  Json whole(std::size_t choice, const GeneratedSequence& answer,
             const GenerationResult&) override {
    Json entries;
    if (has_logprobs_) {
      entries = {{"content", Json::array()}};
      for (std::size_t t = 0; t < answer.ids.size(); ++t)
        entries["content"].push_back(logprobs_.chat_entry(
            answer.ids[t], answer.logprobs[t],
            t < answer.top.size() ? answer.top[t] : std::vector<TokenLogprob>()));
    }
    Json made = piece(choice, answer.ids, std::move(entries), finish_reason(answer));
    made["stop_reason"] = stop_reason_of(choice, answer);
    return made;
  }

 private:
  static const char* finish_reason(const GeneratedSequence& answer) {
    return answer.end == GenerationEnd::kStop ? "stop" : "length";
  }
  /// An answer keeps the weights that it began with, so all its tokens have one version.
  Json piece(std::size_t choice, const std::vector<std::int32_t>& ids, Json logprobs,
             Json finish_reason) const {
    const auto& weights = generation_of(choice).weights;
    return {{"index", choice},
            {"token_ids", ids},
            {"weight_versions",
             std::vector<std::int64_t>(ids.size(), weights == nullptr ? 0 : weights->version)},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", std::move(finish_reason)}};
  }

  std::string request_id_;
  bool has_logprobs_;
};

}  // namespace

void answer_generate(Service& service, const Request& request, const Responder& responder) {
  Fields fields = Fields::parse(request.body);
  const Json params = fields.take("sampling_params");
  if (!params.is_object())
    throw_field("sampling_params", "is {}: expected an object", json::shown(params));
  Json joined = params;
  for (const char* outer : {"model", "stream", "stream_options", "priority"}) {
    if (params.contains(outer))
      throw_field(outer, "is a field of the request: put it beside 'sampling_params'");
    if (Json value = fields.take(outer); !value.is_null()) joined[outer] = std::move(value);
  }
  Fields drawn(std::move(joined));
  Sampling sampling = take_sampling(drawn, service.facts(), request.caller);
  const auto logprobs = drawn.integer("logprobs", 0, 20);
  drawn.boolean("detokenize");  // there is no text either way
  drawn.finish();
  service.models.require(sampling.model);
  sampling.generation.top_logprobs = logprobs.value_or(0);
  sampling.shows_tokens_as_ids = true;
  std::vector<std::int32_t> prompt =
      token_ids(fields.take("token_ids"), "token_ids", service.facts().vocabulary);
  if (prompt.empty()) throw_field("token_ids", "is []: expected at least one token id");
  std::string id = fields.text("request_id").value_or(request.id);
  for (const char* unserved : {"features", "kv_transfer_params", "cache_salt"})
    fields.only(unserved, nullptr, "leave it out");
  fields.finish();
  std::vector<Generation> generations = {
      generation_of(sampling, std::move(prompt), service.facts(), kUsualMaxTokens)};
  if (generations[0].max_tokens == 0) throw_field("max_tokens", "is 0: expected 1 or more");
  std::make_shared<GenerateReply>(service, std::move(sampling), request, responder, std::move(id),
                                  logprobs.has_value())
      ->start(std::move(generations));
}

}  // namespace heddle::serve::openai
