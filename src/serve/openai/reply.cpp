#include "serve/openai/reply.h"

#include <algorithm>
#include <utility>

namespace heddle::serve::openai {

Reply::Reply(Service& service, Sampling sampling, const Request& request, Responder responder,
             const std::string& id_prefix)
    : service_(service),
      sampling_(std::move(sampling)),
      logprobs_(*service.tokenizer, sampling_.shows_tokens_as_ids),
      caller_(request.caller),
      meter_(request.meter),
      responder_(std::move(responder)),
      id_(id_prefix + random_name(24)) {}

Reply::~Reply() {
  if (done_ == generations_.size() || has_failed_) return;
  for (auto& metrics : metrics_) metrics->ended("abort");
}

void Reply::start(std::vector<Generation> generations) {
  std::int64_t samples = 0;
  for (const Generation& generation : generations) samples += generation.samples;
  places_ = service_.samples->take(caller_.tenant, samples);
  generations_ = std::move(generations);
  results_.resize(generations_.size());
  const auto self = shared_from_this();
  service_.models.find(
      sampling_.model, caller_,
      {[self](const std::shared_ptr<const SamplerWeights>& weights) { self->begin(weights); },
       [self](int status, const std::string& message) {
         self->has_failed_ = true;
         self->end_metering();
         const bool is_unknown = status == 404;
         self->responder_.answer(status,
                                 dump(error_object(status, message, is_unknown ? "model" : "",
                                                   is_unknown ? kUnknownModel : "")));
       }});
}

void Reply::begin(const std::shared_ptr<const SamplerWeights>& weights) {
  for (Generation& generation : generations_) {
    generation.weights = weights;
    metrics_.push_back(std::make_unique<GenerationMetrics::Request>(service_.metrics,
                                                                    std::ssize(generation.prompt)));
    if (meter_) meter_->add_tokens(Meter::Tokens::kRead, std::ssize(generation.prompt));
  }
  std::vector<GenerationId> ids;
  for (std::size_t i = 0; i < generations_.size(); ++i) {
    const auto self = shared_from_this();
    GenerationEvents events;
    events.on_token = [self, i](const GeneratedToken& token) { self->on_token(i, token); };
    events.on_done = [self, i](GenerationResult&& result) { self->on_done(i, std::move(result)); };
    events.on_failed = [self](const std::string& message, bool is_users) {
      self->on_failed(message, is_users);
    };
    ids.push_back(service_.model.generate(generations_[i], std::move(events)));
  }
  // Not `this`: the action must not keep the responder that keeps it.
  responder_.on_gone([&model = service_.model, ids] {
    for (const GenerationId id : ids) model.cancel(id);
  });
}

void Reply::on_token(std::size_t index, const GeneratedToken& token) {
  metrics_[index]->token();
  if (meter_) meter_->add_tokens(Meter::Tokens::kGenerated, 1);
  if (!sampling_.streams || has_failed_) return;
  begin_stream();
  const std::size_t choice = index * static_cast<std::size_t>(sampling_.generation.samples) +
                             static_cast<std::size_t>(token.sample);
  for (Json& piece : pieces(choice, token)) send_piece(std::move(piece));
}

void Reply::on_done(std::size_t index, GenerationResult&& result) {
  for (const GeneratedSequence& answer : result.samples)
    metrics_[index]->ended(answer.end == GenerationEnd::kStop ? "stop" : "length");
  service_.metrics.cached(std::ssize(generations_[index].prompt), result.cached_tokens);
  service_.metrics.begun(result.queue_s, result.prompt_s);
  results_[index] = std::move(result);
  if (++done_ == generations_.size() && !has_failed_) finish();
}

void Reply::on_failed(const std::string& message, bool is_users) {
  if (std::exchange(has_failed_, true)) return;
  for (auto& metrics : metrics_) metrics->ended("error");
  end_metering();
  const int status = is_users ? 400 : 500;
  const std::string body = dump(error_object(status, message));
  if (has_begun_) {
    responder_.write("data: " + body + "\n\n");
    responder_.end();
  } else {
    responder_.answer(status, body);
  }
}

void Reply::end_metering() {
  if (meter_) meter_->finish();
}

void Reply::finish() {
  end_metering();
  const auto samples = static_cast<std::size_t>(sampling_.generation.samples);
  const auto each = [&](const auto& use) {
    for (std::size_t i = 0; i < results_.size(); ++i) {
      for (std::size_t s = 0; s < results_[i].samples.size(); ++s)
        use(i * samples + s, results_[i].samples[s], results_[i]);
    }
  };
  if (!sampling_.streams) {
    Json answer = envelope(object_name());
    each([&](std::size_t choice, const GeneratedSequence& sequence, const GenerationResult& from) {
      answer["choices"].push_back(whole(choice, sequence, from));
    });
    answer["usage"] = usage();
    if (sampling_.generation.prompt_logprobs && generations_.size() == 1) {
      answer["prompt_logprobs"] = logprobs_.prompt_table(generations_[0].prompt, results_[0]);
    }
    if (sampling_.returns_token_ids && generations_.size() == 1)
      answer["prompt_token_ids"] = generations_[0].prompt;
    responder_.answer(200, dump(answer));
    return;
  }
  begin_stream();
  each([&](std::size_t choice, const GeneratedSequence& sequence, const GenerationResult&) {
    for (Json& piece : last_pieces(choice, sequence)) send_piece(std::move(piece));
  });
  if (sampling_.streams_usage) {
    Json chunk = envelope(chunk_name());
    chunk["usage"] = usage();
    responder_.write("data: " + dump(chunk) + "\n\n");
  }
  responder_.write("data: [DONE]\n\n");
  responder_.end();
}

void Reply::begin_stream() {
  if (std::exchange(has_begun_, true)) return;
  responder_.start(200, "text/event-stream", {{"Cache-Control", "no-cache"}});
  const std::size_t choices =
      generations_.size() * static_cast<std::size_t>(sampling_.generation.samples);
  for (std::size_t choice = 0; choice < choices; ++choice) {
    for (Json& piece : first_pieces(choice)) send_piece(std::move(piece));
  }
}

void Reply::send_piece(Json choice) {
  Json chunk = envelope(chunk_name());
  chunk["choices"].push_back(std::move(choice));
  if (sampling_.streams_usage) chunk["usage"] = nullptr;
  responder_.write("data: " + dump(chunk) + "\n\n");
}

Json Reply::envelope(const char* object) const {
  return {{"id", id_},
          {"object", object},
          {"created", created_},
          {"model", sampling_.model},
          {"choices", Json::array()}};
}

Json Reply::usage() const {
  std::int64_t prompt = 0, completion = 0, cached = 0;
  for (std::size_t i = 0; i < results_.size(); ++i) {
    prompt += std::ssize(generations_[i].prompt);
    cached += results_[i].cached_tokens;
    for (const GeneratedSequence& answer : results_[i].samples)
      completion += std::ssize(answer.ids);
  }
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"prompt_tokens_details", {{"cached_tokens", cached}}}};
}

std::string Reply::stop_string_of(std::size_t choice, const GeneratedSequence& answer) const {
  const std::vector<std::string>& stops = generation_of(choice).stop_strings;
  if (answer.end != GenerationEnd::kStop || stops.empty()) return "";
  std::vector<std::int32_t> ids = answer.ids;
  std::erase_if(ids, [&](std::int32_t id) { return id >= service_.tokenizer->vocab_size(); });
  const std::string text =
      service_.tokenizer->decode(ids, generation_of(choice).skip_special_tokens);
  if (text.size() <= answer.text.size()) return "";
  const std::string_view rest = std::string_view(text).substr(answer.text.size());
  for (const std::string& stop : stops) {
    if (rest.starts_with(stop)) return stop;
  }
  return "";
}

Json Reply::stop_reason_of(std::size_t choice, const GeneratedSequence& answer) const {
  if (answer.end != GenerationEnd::kStop || answer.ids.empty()) return {};
  if (const std::string stop = stop_string_of(choice, answer); !stop.empty()) return stop;
  const std::int32_t last = answer.ids.back();
  const std::vector<std::int32_t>& ends = service_.facts().end_tokens;
  if (std::ranges::find(ends, last) != ends.end()) return {};
  return last;
}

}  // namespace heddle::serve::openai
