#include "serve/tinker/work_outcome.h"

#include <algorithm>

#include "serve/tinker/fields.h"
#include "serve/tinker/wire.h"

namespace heddle::serve::tinker {
namespace {

BatchedTensor batched(const std::vector<tenants::DatumOutput>& data,
                      std::vector<float> tenants::DatumOutput::*field) {
  BatchedTensor tensor;
  tensor.offsets.push_back(0);
  for (const tenants::DatumOutput& datum : data) {
    tensor.data += as_bytes(datum.*field);
    tensor.offsets.push_back(static_cast<std::int64_t>(tensor.data.size()));
  }
  return tensor;
}

}  // namespace

Outcome outcome_of(const tenants::WorkResult& result) {
  if (!result.error.empty()) return Outcome::failure(result.error, "user");
  ForwardBackwardOutput output;
  output.num_datums = static_cast<std::int64_t>(result.data.size());
  output.fields["logprobs"] = batched(result.data, &tenants::DatumOutput::logprobs);
  const bool has_losses = std::ranges::any_of(
      result.data, [](const auto& datum) { return !datum.elementwise_loss.empty(); });
  if (has_losses)
    output.fields["elementwise_loss"] =
        batched(result.data, &tenants::DatumOutput::elementwise_loss);
  output.metrics = result.metrics;
  return Outcome::proto(Outcome::Form::kForwardBackward, encode(output));
}

Outcome outcome_of(const tenants::StepResult& result) {
  if (!result.updated)
    return Outcome::failure(
        "the norm of the gradients is not finite: the gradients were dropped and nothing else "
        "changed",
        "user");
  return Outcome::json(
      dump({{"type", "optim_step"}, {"metrics", {{"grad_norm:mean", result.grad_norm}}}}));
}

}  // namespace heddle::serve::tinker
