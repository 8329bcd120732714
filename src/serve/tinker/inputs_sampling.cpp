// Requests for samples, and their answers.
#include <algorithm>
#include <iterator>
#include <limits>

#include "base/random_hex.h"
#include "serve/http/request.h"
#include "serve/tinker/inputs.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr std::int64_t kMostSamples = 256;
constexpr std::int64_t kMostTopk = 64;
constexpr float kEmptyCell = -99999.0F;

void refuse_unbuilt(const Fields& fields) {
  if (fields.boolean("record_stability_info", false))
    throw HttpError(400,
                    "field record_stability_info serves the loss stable_reinforce, which is "
                    "not built: leave it out");
}

void read_stop(const Fields& params, const ModelFacts& facts, Generation& generation) {
  const json* stop = params.find("stop");
  if (stop == nullptr) {
    generation.stop_ids = facts.end_tokens;
    return;
  }
  if (stop->is_string()) {
    generation.stop_strings = {stop->get<std::string>()};
  } else if (stop->is_array()) {
    for (const json& each : *stop) {
      if (each.is_string()) {
        generation.stop_strings.push_back(each);
      } else if (each.is_number_integer() && each.get<std::int64_t>() >= 0 &&
                 each.get<std::int64_t>() < facts.vocabulary) {
        generation.stop_ids.push_back(each);
      } else {
        params.refuse("stop", "texts, or token ids of the vocabulary");
      }
    }
  } else {
    params.refuse("stop", "a text, a list of texts, or a list of token ids");
  }
  for (const std::string& text : generation.stop_strings)
    if (text.empty()) params.refuse("stop", "texts that are not empty");
}

TopkLogprobs topk_of(const std::vector<std::vector<TokenLogprob>>& rows, std::int64_t k) {
  TopkLogprobs out;
  out.k = static_cast<std::uint32_t>(k);
  out.length = static_cast<std::uint32_t>(rows.size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(k); ++i) {
      out.token_ids.push_back(i < row.size() ? row[i].id : 0);
      out.logprobs.push_back(i < row.size() ? static_cast<float>(row[i].logprob) : kEmptyCell);
    }
  }
  return out;
}

PromptAltTokens alternatives_of(const std::vector<std::vector<TokenLogprob>>& draws,
                                const Generation& asked) {
  std::vector<std::int64_t> ids;
  std::vector<float> logprobs;
  for (const auto& row : draws) {
    for (const TokenLogprob& draw : row) {
      ids.push_back(draw.id);
      logprobs.push_back(static_cast<float>(draw.logprob));
    }
  }
  PromptAltTokens out;
  out.tokens.dtype = DType::kInt64;
  out.tokens.values = as_bytes(ids);
  out.logprobs.dtype = DType::kFloat32;
  out.logprobs.values = as_bytes(logprobs);
  out.tokens.shape = out.logprobs.shape = {std::ssize(asked.prompt) - 1, asked.prompt_draws};
  return out;
}

}  // namespace

SampleRequest read_sample(const Fields& fields, const ModelFacts& facts) {
  refuse_unbuilt(fields);
  SampleRequest request;
  Generation& generation = request.generation;
  generation.prompt = prompt_of(fields.object("prompt", known::kModelInput));
  if (generation.prompt.empty()) throw HttpError(400, "the prompt has no token");
  for (const std::int32_t token : generation.prompt) check_token(token, facts, "the prompt");
  const auto length = static_cast<std::int64_t>(generation.prompt.size());
  if (length >= facts.max_context)
    throw_http(400, "the prompt has {} tokens: prompt and answer may have {} together", length,
               facts.max_context);
  generation.samples = fields.integer("num_samples", 1);
  if (generation.samples < 1 || generation.samples > kMostSamples)
    fields.refuse("num_samples", "1 to 256");
  const Fields params = fields.object("sampling_params", known::kSamplingParams);
  const std::int64_t room = facts.max_context - length;
  generation.max_tokens = params.integer("max_tokens", room);
  if (generation.max_tokens < 1) params.refuse("max_tokens", "1 or more");
  if (generation.max_tokens > room)
    throw_http(400, "max_tokens {} and a prompt of {} tokens exceed the {} that this server takes",
               generation.max_tokens, length, facts.max_context);
  const auto seed = params.maybe_integer("seed");
  generation.seed =
      seed ? static_cast<std::uint64_t>(*seed) : std::stoull(random_hex(8), nullptr, 16);
  generation.temperature = params.number("temperature", 1);
  if (generation.temperature < 0) params.refuse("temperature", "0 or more");
  generation.top_p = params.number("top_p", 1);
  if (!(generation.top_p > 0 && generation.top_p <= 1))
    params.refuse("top_p", "above 0, at most 1");
  const std::int64_t top_k = params.integer("top_k", -1);
  if (top_k < -1) params.refuse("top_k", "-1 for all, or a count");
  generation.top_k = std::max<std::int64_t>(0, top_k);
  read_stop(params, facts, generation);
  const auto topk = [&](const char* name) {
    const std::int64_t k = fields.integer(name, 0);
    if (k < 0 || k > kMostTopk) fields.refuse(name, "0 to 64");
    return k;
  };
  generation.top_logprobs = topk("topk_sample_logprobs");
  request.topk_prompt = topk("topk_prompt_logprobs");
  request.wants_prompt_logprobs = fields.boolean("prompt_logprobs", false);
  if (request.wants_prompt_logprobs || request.topk_prompt > 0)
    generation.prompt_logprobs = request.topk_prompt;
  if (fields.find("target_prompt_logprobs") != nullptr) {
    request.targets =
        read_targets(fields.object("target_prompt_logprobs", known::kTensor), length, facts);
    for (const auto& cells : request.targets->cells) {
      auto& row = generation.prompt_targets.emplace_back();
      std::ranges::copy_if(cells, std::back_inserter(row), [](std::int64_t id) { return id >= 0; });
    }
    generation.prompt_logprobs = request.topk_prompt;
  }
  generation.prompt_draws = topk("prompt_alt_tokens_k");
  // The places are read with the log-probabilities of the prompt.
  if (generation.prompt_draws > 0 && !generation.prompt_logprobs) generation.prompt_logprobs = 0;
  if (const auto last = fields.maybe_integer("prompt_logprobs_last_n")) {
    if (!request.wants_prompt_logprobs)
      throw HttpError(400, "prompt_logprobs_last_n needs prompt_logprobs true");
    if (*last < 1 || *last >= length)
      throw_http(400,
                 "prompt_logprobs_last_n is {}: expected 1 to {}, one less than the prompt has",
                 *last, length - 1);
    request.prompt_logprobs_last = last;
  }
  return request;
}

SampleResponse response_of(const SampleRequest& request, const GenerationResult& result) {
  SampleResponse response;
  for (const GeneratedSequence& sample : result.samples) {
    SampledSequence out;
    out.is_cut = sample.end == GenerationEnd::kLength;
    out.tokens = sample.ids;
    out.logprobs.assign(sample.logprobs.begin(), sample.logprobs.end());
    if (request.generation.top_logprobs > 0)
      out.topk = topk_of(sample.top, request.generation.top_logprobs);
    response.sequences.push_back(std::move(out));
  }
  const auto length = static_cast<std::int64_t>(result.prompt_logprobs.size());
  const std::int64_t skipped = length - request.prompt_logprobs_last.value_or(length);
  if (request.wants_prompt_logprobs) {
    response.prompt_logprobs.emplace(result.prompt_logprobs.begin(), result.prompt_logprobs.end());
    std::fill_n(response.prompt_logprobs->begin(), skipped,
                std::numeric_limits<float>::quiet_NaN());
  }
  if (request.topk_prompt > 0) {
    auto rows = result.prompt_top;
    std::fill_n(rows.begin(), std::min(skipped, std::ssize(rows)), std::vector<TokenLogprob>{});
    response.topk_prompt_logprobs = topk_of(rows, request.topk_prompt);
  }
  if (request.targets)
    response.target_prompt_logprobs = tensor_of(*request.targets, result.prompt_target_logprobs);
  if (request.generation.prompt_draws > 0)
    response.prompt_alt_tokens = alternatives_of(result.prompt_draws, request.generation);
  response.prompt_cache_hit_tokens = static_cast<std::int32_t>(result.cached_tokens);
  return response;
}

}  // namespace heddle::serve::tinker
