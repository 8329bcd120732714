#include "serve/tinker/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/quote.h"
#include "base/random_hex.h"
#include "serve/http/request.h"
#include "serve/store/data_directory.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr std::int64_t kMostSamples = 256;
constexpr std::int64_t kMostTopk = 64;
constexpr float kEmptyCell = -99999.0F;

std::vector<std::int32_t> tokens_of(const json& list, const std::string& where) {
  if (!list.is_array()) throw_http(422, "{} must be a list of token ids", where);
  std::vector<std::int32_t> tokens;
  tokens.reserve(list.size());
  for (const json& token : list) {
    if (!token.is_number_integer() || token.get<std::int64_t>() < 0 ||
        token.get<std::int64_t>() > std::numeric_limits<std::int32_t>::max())
      throw_http(422, "{} must be a list of token ids, found {}", where,
                 text::shown(token.dump(-1, ' ', false, json::error_handler_t::replace), 40));
    tokens.push_back(token.get<std::int32_t>());
  }
  return tokens;
}

/// Old clients leave `type` out.
Chunk chunk_of(const json& value, const std::string& where) {
  const Fields fields(value, where);
  const std::string type = fields.text("type", fields.find("tokens") != nullptr ? "encoded_text"
                                               : fields.find("dmel") != nullptr ? "dmel"
                                                                                : "image");
  if (type == "encoded_text")
    return {Chunk::Kind::kText, tokens_of(fields.list("tokens"), where + ".tokens")};
  return {type == "dmel" ? Chunk::Kind::kDmel : Chunk::Kind::kImage, {}};
}

std::vector<Chunk> chunks_of(const Fields& model_input) {
  std::vector<Chunk> chunks;
  for (const json& value : model_input.list("chunks"))
    chunks.push_back(chunk_of(value, model_input.where() + ".chunks"));
  return chunks;
}

/// A float outside of the range of an integer has no value as one.
bool is_whole(double number) { return std::trunc(number) == number && std::abs(number) < 0x1p63; }

template <class Number>
std::string packed(const json& list, const std::string& where) {
  std::vector<Number> numbers;
  numbers.reserve(list.size());
  for (const json& value : list) {
    if (!value.is_number()) throw_http(422, "{} must be a list of numbers", where);
    if (std::is_integral_v<Number> && !is_whole(value.get<double>()))
      throw_http(422, "{} must be a list of whole numbers, found {}", where,
                 text::shown(value.dump(), 40));
    numbers.push_back(value.get<Number>());
  }
  return as_bytes(numbers);
}

Tensor tensor_of(const Fields& fields) {
  Tensor tensor;
  const std::string dtype = fields.text("dtype");
  const std::string where = fields.where() + ".data";
  if (dtype == "float32") {
    tensor.dtype = DType::kFloat32;
    tensor.values = packed<float>(fields.list("data"), where);
  } else if (dtype == "int64") {
    tensor.dtype = DType::kInt64;
    tensor.values = packed<std::int64_t>(fields.list("data"), where);
  } else {
    fields.refuse("dtype", "float32 or int64");
  }
  if (fields.find("shape") != nullptr) {
    for (const json& size : fields.list("shape")) {
      if (!size.is_number_integer()) fields.refuse("shape", "a list of sizes");
      tensor.shape.push_back(size.get<std::int64_t>());
    }
  }
  tensor.is_sparse = fields.find("sparse_crow_indices") != nullptr;
  return tensor;
}

template <class Number>
std::vector<Number> unpacked(const std::string& bytes, const std::string& where) {
  if (bytes.size() % sizeof(Number) != 0)
    throw_http(400, "{} has {} bytes: expected numbers of {}", where, bytes.size(), sizeof(Number));
  std::vector<Number> numbers(bytes.size() / sizeof(Number));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

std::vector<double> numbers_of(const Tensor& tensor, const std::string& where) {
  const auto widened = [](const auto& numbers) {
    return std::vector<double>(numbers.begin(), numbers.end());
  };
  switch (tensor.dtype) {
    case DType::kFloat32:
      return widened(unpacked<float>(tensor.values, where));
    case DType::kInt64:
      return widened(unpacked<std::int64_t>(tensor.values, where));
    case DType::kInt32:
      return widened(unpacked<std::int32_t>(tensor.values, where));
    default:
      throw_http(400, "{} has a dtype that is not known: expected float32 or int64", where);
  }
}

/// Numbers of a tensor [tokens], or [tokens,1].
std::vector<double> row_of(const Tensor& tensor, std::size_t tokens, const std::string& where) {
  if (tensor.is_sparse)
    throw_http(400,
               "{} is a sparse matrix: several targets for a token (soft targets) are not "
               "built, give one target a token",
               where);
  const auto numbers = numbers_of(tensor, where);
  std::int64_t size = 1;
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0 || extent > std::numeric_limits<std::int32_t>::max())
      throw_http(400, "{} has the size {} in its shape", where, extent);
    size = std::min<std::int64_t>(size * extent, std::numeric_limits<std::int32_t>::max());
  }
  if (!tensor.shape.empty() && size != static_cast<std::int64_t>(numbers.size()))
    throw_http(400, "{} has {} numbers, which its shape does not have", where, numbers.size());
  if (tensor.shape.size() > 1 && numbers.size() > tokens)
    throw_http(400,
               "{} has several numbers for a token (soft targets): not built, give one a token",
               where);
  if (numbers.size() != tokens)
    throw_http(400, "{} has {} numbers: expected one for each of the {} input tokens", where,
               numbers.size(), tokens);
  return numbers;
}

void check_token(std::int64_t token, const ModelFacts& facts, const std::string& where) {
  if (token < 0 || token >= facts.vocabulary)
    throw_http(400, "{} has token {}: the vocabulary has ids 0 to {}", where, token,
               facts.vocabulary - 1);
}

std::vector<std::int32_t> text_of(const std::vector<Chunk>& chunks, const std::string& where) {
  std::vector<std::int32_t> tokens;
  for (const Chunk& chunk : chunks) {
    if (chunk.kind != Chunk::Kind::kText)
      throw_http(400, "{} has an image or audio chunk: this server takes text only", where);
    tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
  }
  return tokens;
}

tenants::Datum datum_of(const Datum& datum, std::size_t index, const ModelFacts& facts) {
  const std::string where = fmt::format("datum {}", index);
  tenants::Datum out;
  const auto tokens = text_of(datum.model_input, where);
  if (tokens.empty()) throw_http(400, "{} has no input token", where);
  if (static_cast<std::int64_t>(tokens.size()) > facts.max_context)
    throw_http(400, "{} has {} tokens: this server takes {}", where, tokens.size(),
               facts.max_context);
  for (const std::int32_t token : tokens) check_token(token, facts, where);
  out.tokens.assign(tokens.begin(), tokens.end());
  for (const auto& [name, tensor] : datum.loss_fn_inputs) {
    const std::string input = fmt::format("{}: input {}", where, text::shown(name, 60));
    const auto numbers = row_of(tensor, tokens.size(), input);
    if (name == "target_tokens") {
      for (const double number : numbers) {
        if (!is_whole(number)) throw_http(400, "{} has {}: expected token ids", input, number);
        check_token(static_cast<std::int64_t>(number), facts, input);
        out.target_tokens.push_back(static_cast<std::int64_t>(number));
      }
    } else {
      out.inputs[name].assign(numbers.begin(), numbers.end());
    }
  }
  if (out.target_tokens.empty())
    throw_http(400, "{} has no target_tokens: every loss needs them", where);
  return out;
}

void check_loss(const std::string& loss) {
  if (loss == "stable_reinforce")
    throw HttpError(400,
                    "loss_fn stable_reinforce is not published and not built: start the recipe "
                    "with loss_fn=importance_sampling (asynchronous: AsyncConfig.loss_fn)");
  constexpr std::array kLosses = {
      "cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro"};
  if (std::ranges::find(kLosses, loss) == kLosses.end())
    throw_http(400,
               "loss_fn {} is not known: expected cross_entropy, importance_sampling, ppo, "
               "cispo, gspo or dro",
               text::shown(loss, 60));
}

void refuse_unbuilt(const Fields& fields) {
  for (const char* name : {"target_prompt_logprobs", "prompt_logprobs_last_n"}) {
    if (fields.find(name) != nullptr) throw_http(400, "field {} is not built: leave it out", name);
  }
  if (fields.integer("prompt_alt_tokens_k", 0) != 0)
    throw HttpError(400, "field prompt_alt_tokens_k is not built: leave it out");
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

}  // namespace

ForwardBackwardRequest read_forward_backward(const Fields& fields, const char* input) {
  ForwardBackwardRequest request;
  request.model_id = fields.text("model_id");
  request.seq_id = fields.integer("seq_id", 0);
  const Fields in = fields.object(input);
  request.loss_fn = in.text("loss_fn");
  if (in.find("loss_fn_config") != nullptr) {
    const Fields config = in.object("loss_fn_config");
    for (const auto& [name, value] : in.find("loss_fn_config")->items())
      request.numbers[name] = config.number(name.c_str(), 0);
  }
  for (const json& value : in.list("data")) {
    const Fields fields_of_datum(value, fmt::format("data[{}]", request.data.size()));
    Datum datum;
    datum.model_input = chunks_of(fields_of_datum.object("model_input"));
    const Fields inputs = fields_of_datum.object("loss_fn_inputs");
    for (const auto& [name, tensor] : fields_of_datum.find("loss_fn_inputs")->items())
      datum.loss_fn_inputs[name] = tensor_of(inputs.object(name.c_str()));
    request.data.push_back(std::move(datum));
  }
  return request;
}

tenants::Work work_of(const ForwardBackwardRequest& request, const ModelFacts& facts) {
  check_loss(request.loss_fn);
  if (!request.texts.empty())
    throw_http(400, "loss_fn_config {} is a text: the losses here take numbers",
               text::shown(request.texts.begin()->first, 60));
  if (request.data.empty()) throw HttpError(400, "the request has no datum");
  tenants::Work work;
  work.loss_fn = request.loss_fn;
  work.config = request.numbers;
  work.forward_only = request.forward_only;
  for (std::size_t i = 0; i < request.data.size(); ++i)
    work.data.push_back(datum_of(request.data[i], i, facts));
  return work;
}

std::vector<std::int32_t> prompt_of(const Fields& model_input) {
  return text_of(chunks_of(model_input), "the prompt");
}

SampleRequest read_sample(const Fields& fields, const ModelFacts& facts) {
  refuse_unbuilt(fields);
  SampleRequest request;
  Generation& generation = request.generation;
  generation.prompt = prompt_of(fields.object("prompt"));
  if (generation.prompt.empty()) throw HttpError(400, "the prompt has no token");
  for (const std::int32_t token : generation.prompt) check_token(token, facts, "the prompt");
  const auto length = static_cast<std::int64_t>(generation.prompt.size());
  if (length >= facts.max_context)
    throw_http(400, "the prompt has {} tokens: prompt and answer may have {} together", length,
               facts.max_context);
  generation.samples = fields.integer("num_samples", 1);
  if (generation.samples < 1 || generation.samples > kMostSamples)
    fields.refuse("num_samples", "1 to 256");
  const Fields params = fields.object("sampling_params");
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
  if (request.wants_prompt_logprobs)
    response.prompt_logprobs.emplace(result.prompt_logprobs.begin(), result.prompt_logprobs.end());
  if (request.topk_prompt > 0)
    response.topk_prompt_logprobs = topk_of(result.prompt_top, request.topk_prompt);
  response.prompt_cache_hit_tokens = static_cast<std::int32_t>(result.cached_tokens);
  return response;
}

tenants::AdamParams read_adam(const Fields& fields) {
  if (fields.find("optimizer_params") != nullptr)
    throw_http(400, "optimizer {} is not built: expected adam_params",
               text::shown(fields.object("optimizer_params").text("type", ""), 40));
  const Fields params = fields.object("adam_params");
  tenants::AdamParams adam;
  adam.lr = params.number("learning_rate", adam.lr);
  adam.beta1 = params.number("beta1", adam.beta1);
  adam.beta2 = params.number("beta2", adam.beta2);
  adam.eps = params.number("eps", adam.eps);
  adam.weight_decay = params.number("weight_decay", adam.weight_decay);
  adam.grad_clip_norm = params.number("grad_clip_norm", adam.grad_clip_norm);
  for (const char* name : {"learning_rate", "eps", "weight_decay", "grad_clip_norm"})
    if (params.number(name, 0) < 0) params.refuse(name, "0 or more");
  for (const char* name : {"beta1", "beta2"})
    if (const double beta = params.number(name, 0.5); beta < 0 || beta >= 1)
      params.refuse(name, "at least 0, below 1");
  return adam;
}

}  // namespace heddle::serve::tinker
