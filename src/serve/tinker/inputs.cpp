#include "serve/tinker/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/quote.h"
#include "serve/http/request.h"
#include "serve/store/data_directory.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

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
