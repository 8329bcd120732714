#include "serve/tinker/inputs.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/quote.h"
#include "serve/http/request.h"
#include "serve/tinker/inputs_cells.h"
#include "tenants/loss_kinds.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr const char* kTargets = "target_tokens";
constexpr std::int64_t kMostCells =
    4'000'000;  ///< Number of soft targets: the answer holds as many.

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
  if (tensor.is_sparse) {
    tensor.crow_indices =
        packed<std::int64_t>(fields.list("sparse_crow_indices"), fields.where() + ".crow_indices");
    tensor.col_indices =
        packed<std::int64_t>(fields.list("sparse_col_indices"), fields.where() + ".col_indices");
  }
  return tensor;
}

void take_targets(Cells cells, const ModelFacts& facts, const std::string& where,
                  tenants::Datum& out) {
  for (const double number : cells.numbers) {
    if (!is_whole(number)) throw_http(400, "{} has {}: expected token ids", where, number);
    check_token(static_cast<std::int64_t>(number), facts, where);
    out.target_tokens.push_back(static_cast<std::int64_t>(number));
  }
  out.target_width = cells.width;
  out.target_cells = std::move(cells.places);
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
  const auto place_of = [&](const std::string& name) {
    return fmt::format("{}: input {}", where, text::shown(name, 60));
  };
  const auto targets = datum.loss_fn_inputs.find(kTargets);
  if (targets == datum.loss_fn_inputs.end())
    throw_http(400, "{} has no target_tokens: every loss needs them", where);
  take_targets(cells_of(targets->second, tokens.size(), place_of(kTargets)), facts,
               place_of(kTargets), out);
  for (const auto& [name, tensor] : datum.loss_fn_inputs) {
    if (name == kTargets) continue;
    out.inputs[name] =
        at_cells(cells_of(tensor, tokens.size(), place_of(name)), out, place_of(name));
  }
  return out;
}

/// Turns what a check of the trainer's throws into an answer.
template <class Check>
void refusing(const Check& check) {
  try {
    check();
  } catch (const DataError& error) {
    throw HttpError(422, error.what());
  }
}

}  // namespace

ForwardBackwardRequest read_forward_backward(const std::string& body, const Known& known,
                                             const char* input) {
  const Fields fields(body, known);
  ForwardBackwardRequest request;
  request.model_id = fields.text("model_id");
  request.seq_id = fields.integer("seq_id", 0);
  const Fields in = fields.object(input, known::kLossInput);
  request.loss_fn = in.text("loss_fn");
  if (in.find("loss_fn_config") != nullptr) {
    const Fields config = in.object("loss_fn_config", known::kAny);
    for (const auto& [name, value] : in.find("loss_fn_config")->items())
      request.numbers[name] = config.number(name.c_str(), 0);
  }
  for (const json& value : in.list("data")) {
    const Fields fields_of_datum(value, fmt::format("data[{}]", request.data.size()),
                                 known::kDatum);
    Datum datum;
    datum.model_input = chunks_of(fields_of_datum.object("model_input", known::kModelInput));
    const Fields inputs = fields_of_datum.object("loss_fn_inputs", known::kAny);
    for (const auto& [name, tensor] : fields_of_datum.find("loss_fn_inputs")->items())
      datum.loss_fn_inputs[name] = tensor_of(inputs.object(name.c_str(), known::kTensor));
    request.data.push_back(std::move(datum));
  }
  return request;
}

tenants::Work work_of(const ForwardBackwardRequest& request, const ModelFacts& facts) {
  refusing([&] { tenants::loss_kind(request.loss_fn); });
  if (!request.texts.empty())
    throw_http(422, "loss_fn_config: '{}' is a text: the losses here take numbers",
               text::shown(request.texts.begin()->first, 60));
  if (request.data.empty()) throw HttpError(400, "the request has no datum");
  tenants::Work work;
  work.loss_fn = request.loss_fn;
  work.config = request.numbers;
  work.forward_only = request.forward_only;
  std::int64_t cells = 0;
  for (std::size_t i = 0; i < request.data.size(); ++i) {
    work.data.push_back(datum_of(request.data[i], i, facts));
    cells += std::ssize(work.data[i].tokens) * work.data[i].target_width;
    if (cells > kMostCells)
      throw_http(400,
                 "target_tokens of datums 0 to {} are matrices of {} cells: at most {} in one "
                 "request",
                 i, cells, kMostCells);
  }
  refusing([&] { tenants::check_loss(work); });
  return work;
}

tenants::AdamParams read_adam(const Fields& fields) {
  if (fields.find("optimizer_params") != nullptr)
    throw_http(400, "optimizer {} is not built, as its rule is not published: expected adam_params",
               text::shown(fields.object("optimizer_params", known::kAny).text("type", ""), 40));
  const Fields params = fields.object("adam_params", known::kAdamParams);
  tenants::AdamParams adam;
  adam.lr = params.number("learning_rate", adam.lr);
  adam.beta1 = params.number("beta1", adam.beta1);
  adam.beta2 = params.number("beta2", adam.beta2);
  adam.eps = params.number("eps", adam.eps);
  adam.weight_decay = params.number("weight_decay", adam.weight_decay);
  adam.grad_clip_norm = params.number("grad_clip_norm", adam.grad_clip_norm);
  for (const char* name : {"learning_rate", "eps", "weight_decay", "grad_clip_norm"})
    if (params.number(name, 0) < 0) params.refuse(name, "0 or more");
  // The step computes in float32. An epsilon that is zero there divides zero by zero.
  for (const char* name : {"learning_rate", "weight_decay", "grad_clip_norm"})
    if (params.number(name, 0) > std::numeric_limits<float>::max())
      params.refuse(name, "a number that float32 holds");
  if (adam.eps < std::numeric_limits<float>::min() || adam.eps > std::numeric_limits<float>::max())
    params.refuse("eps", "a number above 0 that float32 holds (1.2e-38 at least)");
  for (const char* name : {"beta1", "beta2"})
    if (const double beta = params.number(name, 0.5); beta < 0 || beta >= 1)
      params.refuse(name, "at least 0, below 1");
  return adam;
}

}  // namespace heddle::serve::tinker
