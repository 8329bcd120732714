#include "parallel/recompute.h"

#include <algorithm>
#include <chrono>

#include "device/device.h"

namespace heddle::parallel {

void RecomputeProbe::keep(std::int64_t layer, std::int64_t rows, std::int64_t bytes) {
  layers_[layer].rows += static_cast<double>(rows);
  layers_[layer].input_bytes += static_cast<double>(bytes);
  ++kept_[layer];
  kept_bytes_ += bytes;
}

void RecomputeProbe::release(std::int64_t layer, std::int64_t bytes) {
  if (--kept_[layer] == 0) kept_.erase(layer);
  kept_bytes_ -= bytes;
}

double RecomputeProbe::timed(const std::function<void()>& work) const {
  device::synchronize(device_);
  const auto start = std::chrono::steady_clock::now();
  work();
  device::synchronize(device_);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void RecomputeProbe::measure_forward(std::int64_t layer, std::size_t stage,
                                     const std::function<void()>& work) {
  Stage& sum = layers_[layer].stages.at(stage);
  const std::int64_t before = meter_.used_bytes();
  sum.forward_s += timed(work);
  sum.bytes += static_cast<double>(meter_.used_bytes() - before);
}

void RecomputeProbe::measure_backward(std::int64_t layer, std::size_t stage,
                                      const std::function<void()>& work) {
  layers_[layer].stages.at(stage).backward_s += timed(work);
}

void RecomputeProbe::note_peak() {
  const Moment now{meter_.take_peak(),
                   std::max<std::int64_t>(0, meter_.used_bytes() - kept_bytes_)};
  Moment& highest = moments_[kept_];
  if (now.peak > highest.peak) highest = now;
}

}  // namespace heddle::parallel
