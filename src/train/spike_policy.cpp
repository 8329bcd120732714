#include "train/spike_policy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "ops/autograd.h"

namespace heddle::train {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

}  // namespace

SpikePolicy::SpikePolicy(const config::TrainSection& train)
    : policy_(train.spike),
      factor_(train.spike_factor),
      window_(static_cast<std::size_t>(train.spike_window)) {}

double SpikePolicy::threshold() const {
  if (!is_on() || recent_.size() < window_) return kNone;
  std::vector<double> sorted = recent_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((window_ - 1) / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return factor_ * *middle;
}

void SpikePolicy::remember(double norm) {
  if (!is_on()) return;
  recent_.push_back(norm);
  if (recent_.size() > window_) recent_.erase(recent_.begin());
}

void SpikePolicy::restore(std::vector<double> recent) {
  if (!is_on()) return;
  if (recent.size() > window_)
    recent.erase(recent.begin(), recent.end() - static_cast<std::ptrdiff_t>(window_));
  recent_ = std::move(recent);
  list_.reset();
}

void SpikePolicy::prepare(c10::Device device) {
  if (!is_on() || list_.defined()) return;
  std::vector<double> known(window_ - recent_.size(), kNone);
  known.insert(known.end(), recent_.begin(), recent_.end());
  list_ = at::tensor(known, at::kDouble).to(device);
  stopped_ = at::zeros({}, list_.options());
}

at::Tensor SpikePolicy::object(const at::Tensor& norm) {
  const ops::NoGradient guard;
  const auto middle = static_cast<std::int64_t>((window_ - 1) / 2);
  const at::Tensor median = std::get<0>(at::sort(list_)).select(0, middle),
                   is_known = at::isinf(list_.select(0, 0)).logical_not();
  threshold_ = at::where(is_known, median * factor_, at::full_like(median, kNone));
  const at::Tensor is_spike = norm.gt(threshold_).to(at::kDouble);
  const at::Tensor refused = at::maximum(is_spike, stopped_);
  if (stops()) stopped_.copy_(refused);
  list_.copy_(at::cat({list_.narrow(0, 1, list_.numel() - 1), norm.view({1})}));
  return at::where(refused.gt(0), at::full_like(median, std::numeric_limits<double>::quiet_NaN()),
                   at::zeros_like(median));
}

}  // namespace heddle::train
