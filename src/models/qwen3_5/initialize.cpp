#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/rng.h"
#include "base/threads.h"
#include "models/qwen3_5/model.h"
#include "ops/autograd.h"

namespace heddle::models::qwen3_5 {
namespace {

/// Element i of the whole parameter is value(i), however the ranks divide it.
void fill(nn::Parameter& parameter, const std::function<double(std::uint64_t)>& value) {
  at::Tensor host = at::empty(parameter.global_shape(), at::kDouble);
  double* out = host.mutable_data_ptr<double>();
  const std::int64_t count = host.numel();
  constexpr std::int64_t kPiece = 1 << 16;
  parallel_items((count + kPiece - 1) / kPiece, available_cores(), [&](std::int64_t piece) {
    for (std::int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
      out[i] = value(static_cast<std::uint64_t>(i));
    }
  });
  parameter.write_owned(host);
}

}  // namespace

void Model::initialize(std::uint64_t seed, const std::vector<std::string>& names) {
  const ops::NoGradient guard;
  visit_parameters([&](nn::Parameter& parameter) {
    const std::string& name = parameter.name();
    if (!names.empty() && std::find(names.begin(), names.end(), name) == names.end()) return;
    at::Tensor owned = parameter.owned();
    const CounterRng rng(seed, name);
    if (name.ends_with(".A_log")) {
      // The lower bound keeps the logarithm finite.
      fill(parameter,
           [&](std::uint64_t i) { return std::log(0.01 + (16 - 0.01) * rng.uniform(i)); });
    } else if (name.ends_with(".dt_bias") || name.ends_with("linear_attn.norm.weight")) {
      owned.fill_(1);
    } else if (parameter.global_shape().size() == 1) {
      owned.zero_();  // zero-centred norms
    } else {
      const double std = config_.initializer_range;
      fill(parameter, [&](std::uint64_t i) { return std * rng.normal(i); });
    }
  });
}

}  // namespace heddle::models::qwen3_5
