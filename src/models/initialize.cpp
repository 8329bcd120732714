#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "models/model.h"
#include "nn/fill.h"
#include "ops/autograd.h"

namespace heddle::models {

void Model::initialize(std::uint64_t seed, const std::vector<std::string>& names) {
  const ops::NoGradient guard;
  visit_parameters([&](nn::Parameter& parameter) {
    const std::string& name = parameter.name();
    if (!names.empty() && std::find(names.begin(), names.end(), name) == names.end()) return;
    at::Tensor owned = parameter.owned();
    const CounterRng rng(seed, name);
    if (name.ends_with(".A_log")) {
      // The lower bound keeps the logarithm finite.
      nn::fill_owned(parameter, [&](std::uint64_t i) {
        return std::log(0.01 + (16 - 0.01) * rng.uniform(i));
      });
    } else if (name.ends_with(".dt_bias") || name.ends_with("linear_attn.norm.weight")) {
      owned.fill_(1);
    } else if (parameter.global_shape().size() == 1) {
      owned.fill_(1 - config_.norm_offset);  // neutral norms
    } else {
      const double std = config_.initializer_range;
      nn::fill_owned(parameter, [&](std::uint64_t i) { return std * rng.normal(i); });
    }
  });
}

}  // namespace heddle::models
