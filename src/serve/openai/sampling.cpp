#include "serve/openai/sampling.h"

#include <limits>
#include <random>
#include <utility>

#include "base/json.h"

namespace heddle::serve::openai {
namespace {

constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMostLogprobs = 20;
constexpr std::size_t kMostStops = 16;
constexpr std::int64_t kMostPriority = std::numeric_limits<std::int32_t>::max();

std::uint64_t random_seed() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) | device();
}

std::map<std::int32_t, double> take_bias(Fields& fields, std::int64_t vocabulary) {
  const Json given = fields.take("logit_bias");
  if (given.is_null()) return {};
  if (!given.is_object())
    throw_field("logit_bias", "is {}: expected an object of token ids", json::shown(given));
  std::map<std::int32_t, double> bias;
  for (const auto& [key, value] : given.items()) {
    const std::string field = "logit_bias." + key;
    const bool is_id =
        !key.empty() && key.size() < 10 && key.find_first_not_of("0123456789") == std::string::npos;
    if (!is_id || std::stoll(key) >= vocabulary)
      throw_field(field, "is no token id below {}", vocabulary);
    if (!value.is_number() || value.get<double>() < -100 || value.get<double>() > 100)
      throw_field(field, "is {}: expected a number from -100 to 100", json::shown(value));
    bias[std::stoi(key)] = value.get<double>();
  }
  return bias;
}

void take_distribution(Fields& fields, Generation& generation, std::int64_t vocabulary) {
  generation.temperature = fields.number("temperature", 0, 100).value_or(1);
  generation.top_p = fields.number("top_p", 0, 1).value_or(1);
  if (generation.top_p == 0) throw_field("top_p", "is 0: expected more; temperature 0 is greedy");
  generation.min_p = fields.number("min_p", 0, 1).value_or(0);
  generation.top_k = std::max<std::int64_t>(0, fields.integer("top_k", -1, kAny).value_or(0));
  const auto seed = fields.integer("seed", std::numeric_limits<std::int64_t>::min(), kAny);
  generation.seed = seed ? static_cast<std::uint64_t>(*seed) : random_seed();
  generation.repetition_penalty = fields.number("repetition_penalty", 0, 100).value_or(1);
  if (generation.repetition_penalty == 0)
    throw_field("repetition_penalty", "is 0: expected more; 1 has no effect");
  generation.presence_penalty = fields.number("presence_penalty", -2, 2).value_or(0);
  generation.frequency_penalty = fields.number("frequency_penalty", -2, 2).value_or(0);
  generation.logit_bias = take_bias(fields, vocabulary);
}

void take_ends(Fields& fields, const ModelFacts& facts, Sampling& sampling) {
  Generation& generation = sampling.generation;
  generation.stop_strings = fields.texts("stop", kMostStops);
  generation.stop_ids = fields.ids("stop_token_ids", facts.vocabulary);
  if (!fields.boolean("ignore_eos").value_or(false)) {
    generation.stop_ids.insert(generation.stop_ids.end(), facts.end_tokens.begin(),
                               facts.end_tokens.end());
  }
  generation.min_tokens = fields.integer("min_tokens", 0, kAny).value_or(0);
  sampling.includes_stop = fields.boolean("include_stop_str_in_output").value_or(false);
}

void take_stream(Fields& fields, Sampling& sampling) {
  sampling.streams = fields.boolean("stream").value_or(false);
  const Json given = fields.take("stream_options");
  if (given.is_null()) return;
  if (!sampling.streams) throw_field("stream_options", "needs 'stream' true");
  Fields options(given, "stream_options.");
  sampling.streams_usage = options.boolean("include_usage").value_or(false);
  options.only("include_obfuscation", false, "leave it out");
  options.only("continuous_usage_stats", false, "'include_usage' has the numbers at the end");
  options.finish();
}

}  // namespace

Sampling take_sampling(Fields& fields, const ModelFacts& facts, const Caller& caller) {
  Sampling sampling;
  sampling.model = fields.text("model").value_or(facts.name);
  Generation& generation = sampling.generation;
  generation.samples = fields.integer("n", 1, 128).value_or(1);
  sampling.max_tokens = fields.integer("max_tokens", 0, kAny);
  take_distribution(fields, generation, facts.vocabulary);
  take_ends(fields, facts, sampling);
  take_stream(fields, sampling);
  generation.prompt_logprobs = fields.integer("prompt_logprobs", 0, kMostLogprobs);
  if (generation.prompt_logprobs && sampling.streams)
    throw_field("prompt_logprobs", "is not served with 'stream' true");
  sampling.returns_token_ids = fields.boolean("return_token_ids").value_or(false);
  sampling.shows_tokens_as_ids = fields.boolean("return_tokens_as_token_ids").value_or(false);
  sampling.truncate_prompt_tokens = fields.integer("truncate_prompt_tokens", 1, kAny);
  generation.skip_special_tokens = fields.boolean("skip_special_tokens").value_or(true);
  fields.only("spaces_between_special_tokens", true, "leave it out");
  generation.priority = fields.integer("priority", -kMostPriority, kMostPriority).value_or(0);
  if (generation.priority < 0 && !caller.may("admin"))
    throw_field("priority", "is {}: before others go keys with the scope admin; expected 0 or more",
                generation.priority);
  if (const Json tier = fields.take("service_tier");
      !tier.is_null() && tier != "auto" && tier != "default")
    throw_field("service_tier", "is {}, which is not served: leave it out", json::shown(tier));
  // Notes that clients keep for themselves.
  fields.pass_over({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"});
  return sampling;
}

Generation generation_of(const Sampling& sampling, std::vector<std::int32_t> prompt,
                         const ModelFacts& facts, std::int64_t usual_max_tokens) {
  if (const auto most = sampling.truncate_prompt_tokens; most && std::ssize(prompt) > *most)
    prompt.erase(prompt.begin(), prompt.end() - *most);
  if (prompt.empty()) throw ApiError(400, "the prompt has no token", "prompt");
  Generation generation = sampling.generation;
  const std::int64_t left = facts.max_context - std::ssize(prompt);
  generation.max_tokens =
      sampling.max_tokens.value_or(usual_max_tokens > 0 ? std::min(usual_max_tokens, left) : left);
  if (left < 1 || generation.max_tokens > left) {
    throw ApiError(
        400,
        fmt::format("This model's maximum context length is {} tokens: the prompt has {}, and {} "
                    "more are asked for; shorten the prompt or lower 'max_tokens'",
                    facts.max_context, prompt.size(),
                    sampling.max_tokens ? generation.max_tokens : 1),
        "max_tokens", "context_length_exceeded");
  }
  if (generation.min_tokens > generation.max_tokens)
    throw_field("min_tokens", "is {}: expected at most the {} tokens of the answer",
                generation.min_tokens, generation.max_tokens);
  generation.prompt = std::move(prompt);
  generation.keep_state = true;
  return generation;
}

}  // namespace heddle::serve::openai
