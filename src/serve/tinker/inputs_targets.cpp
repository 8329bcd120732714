// Tokens whose log-probabilities in places of a prompt a client asks for.
#include <algorithm>
#include <limits>

#include "serve/http/request.h"
#include "serve/tinker/inputs.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr std::int64_t kMostTargets = 64;  ///< In one place: each costs a row of the head.

std::vector<std::int64_t> integers_of(const Fields& fields, const char* name) {
  std::vector<std::int64_t> out;
  for (const json& value : fields.list(name)) {
    if (!value.is_number_integer()) fields.refuse(name, "a list of whole numbers");
    out.push_back(value.get<std::int64_t>());
  }
  return out;
}

}  // namespace

SampleRequest::Targets read_targets(const Fields& tensor, std::int64_t prompt_tokens,
                                    const ModelFacts& facts) {
  const std::int64_t rows = prompt_tokens - 1;
  if (tensor.text("dtype") != "int64") tensor.refuse("dtype", "int64");
  const std::vector<std::int64_t> ids = integers_of(tensor, "data");
  SampleRequest::Targets targets;
  targets.layout.dtype = DType::kFloat32;
  targets.layout.shape = integers_of(tensor, "shape");
  const auto& shape = targets.layout.shape;
  if (shape.size() != 2 || shape[0] != rows || shape[1] < 1 || shape[1] > kMostTargets)
    throw_http(400, "{}.shape must be [{}, 1 to {}]: one row less than the prompt has tokens",
               tensor.where(), rows, kMostTargets);
  std::vector<std::int64_t> ends;
  targets.layout.is_sparse = tensor.find("sparse_crow_indices") != nullptr;
  if (targets.layout.is_sparse) {
    ends = integers_of(tensor, "sparse_crow_indices");
    const std::vector<std::int64_t> columns = integers_of(tensor, "sparse_col_indices");
    const bool is_whole = std::ssize(ends) == rows + 1 && ends.front() == 0 &&
                          ends.back() == std::ssize(ids) && std::ranges::is_sorted(ends);
    if (!is_whole || columns.size() != ids.size())
      throw_http(400, "{} is no CSR matrix of {} rows and {} values", tensor.where(), rows,
                 ids.size());
    targets.layout.crow_indices = as_bytes(ends);
    targets.layout.col_indices = as_bytes(columns);
  } else {
    for (std::int64_t row = 0; row <= rows; ++row) ends.push_back(row * shape[1]);
    if (ends.back() != std::ssize(ids))
      throw_http(400, "{}.data has {} values: its shape has {}", tensor.where(), ids.size(),
                 ends.back());
  }
  bool asks = false;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto first = ids.begin() + ends[static_cast<std::size_t>(row)],
               last = ids.begin() + ends[static_cast<std::size_t>(row) + 1];
    if (last - first > kMostTargets)
      throw_http(400, "{} has {} values in row {}: at most {}", tensor.where(), last - first, row,
                 kMostTargets);
    targets.cells.emplace_back(first, last);
    for (const std::int64_t id : targets.cells.back()) {
      if (id == -1) continue;
      check_token(id, facts, tensor.where());
      asks = true;
    }
  }
  if (!asks) throw_http(400, "{} asks for no token", tensor.where());
  return targets;
}

Tensor tensor_of(const SampleRequest::Targets& targets,
                 const std::vector<std::vector<double>>& logprobs) {
  std::vector<float> values;
  for (std::size_t row = 0; row < targets.cells.size(); ++row) {
    auto next = logprobs.at(row).begin();
    for (const std::int64_t id : targets.cells[row])
      values.push_back(id < 0 ? std::numeric_limits<float>::quiet_NaN()
                              : static_cast<float>(*next++));
  }
  Tensor tensor = targets.layout;
  tensor.values = as_bytes(values);
  return tensor;
}

}  // namespace heddle::serve::tinker
