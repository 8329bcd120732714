#include "serve/tinker/work_outcome.h"

#include <algorithm>
#include <span>

#include "serve/tinker/fields.h"
#include "serve/tinker/wire.h"

namespace heddle::serve::tinker {
namespace {

/// One number a target; soft targets are cells of a matrix, the others of which are 0.
std::string bytes_of(const std::vector<float>& numbers, const tenants::Datum& datum) {
  if (!datum.has_soft_targets() || numbers.empty()) return as_bytes(numbers);
  std::vector<float> matrix(datum.tokens.size() * static_cast<std::size_t>(datum.target_width));
  for (std::size_t r = 0; r < numbers.size(); ++r)
    matrix[static_cast<std::size_t>(datum.target_cells[r])] = numbers[r];
  return as_bytes(matrix);
}

BatchedTensor batched(std::span<const tenants::DatumOutput> outputs,
                      std::span<const tenants::Datum> data,
                      std::vector<float> tenants::DatumOutput::*field) {
  BatchedTensor tensor;
  if (data[0].has_soft_targets()) tensor.trailing_shape = {data[0].target_width};
  tensor.offsets.push_back(0);
  for (std::size_t i = 0; i < data.size(); ++i) {
    tensor.data += bytes_of(outputs[i].*field, data[i]);
    tensor.offsets.push_back(static_cast<std::int64_t>(tensor.data.size()));
  }
  return tensor;
}

}  // namespace

Outcome outcome_of(const tenants::Work& work, const tenants::WorkResult& result) {
  if (!result.error.empty()) return Outcome::failure(result.error, "user");
  ForwardBackwardOutput output;
  const bool has_losses = std::ranges::any_of(
      result.data, [](const auto& datum) { return !datum.elementwise_loss.empty(); });
  for (std::size_t first = 0; first < work.data.size();) {
    std::size_t last = first;
    while (last < work.data.size() && work.data[last].target_width == work.data[first].target_width)
      ++last;
    const auto outputs = std::span(result.data).subspan(first, last - first);
    const auto data = std::span(work.data).subspan(first, last - first);
    ArrayRecord& record = output.records.emplace_back();
    record.num_datums = std::ssize(data);
    record.fields["logprobs"] = batched(outputs, data, &tenants::DatumOutput::logprobs);
    if (has_losses)
      record.fields["elementwise_loss"] =
          batched(outputs, data, &tenants::DatumOutput::elementwise_loss);
    first = last;
  }
  output.metrics = result.metrics;
  return Outcome::proto(Outcome::Form::kForwardBackward, encode(output));
}

Outcome outcome_of(const tenants::StepResult& result) {
  if (result.updated)
    return Outcome::json(
        dump({{"type", "optim_step"}, {"metrics", {{"grad_norm:mean", result.grad_norm}}}}));
  Outcome failure =
      result.error.empty()
          ? Outcome::failure(
                "the norm of the gradients is not finite: the gradients were dropped and nothing "
                "else changed",
                "user")
          : Outcome::failure(result.error, "server");
  failure.drops_gradients = true;
  return failure;
}

}  // namespace heddle::serve::tinker
