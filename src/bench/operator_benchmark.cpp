#include "bench/operator_benchmark.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "device/device.h"
#include "ops/autograd.h"

namespace heddle::bench {
namespace {

double seconds_of(const OperatorPlace& place, const std::function<void()>& run, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) run();
  device::synchronize(place.device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Median seconds of one call. Trials are long enough that waiting for the device does not count.
double median_seconds(const OperatorPlace& place, const std::function<void()>& run) {
  const ops::NoGradient guard;
  run();
  device::synchronize(place.device);
  const double once = seconds_of(place, run, 1);
  const int calls = std::clamp(static_cast<int>(std::ceil(10e-3 / std::max(once, 1e-6))), 1, 50);
  std::array<double, 7> trials{};
  for (double& trial : trials) trial = seconds_of(place, run, calls) / calls;
  std::sort(trials.begin(), trials.end());
  return trials[trials.size() / 2];
}

}  // namespace

Ceilings measure_ceilings(const OperatorPlace& place) {
  const std::int64_t n = place.device.is_cpu() ? 1024 : 8192;
  const auto options = at::TensorOptions().device(place.device).dtype(place.dtype);
  const at::Tensor a = at::randn({n, n}, options), b = at::randn({n, n}, options);
  at::Tensor c = at::empty({n, n}, options);
  Ceilings ceilings;
  const double cube = std::pow(static_cast<double>(n), 3);
  ceilings.flops_per_s = 2 * cube / median_seconds(place, [&] { at::mm_out(c, a, b); });
  const std::int64_t count = place.device.is_cpu() ? 1 << 24 : std::int64_t{1} << 30;
  const at::Tensor from = at::empty({count}, options);
  at::Tensor to = at::empty({count}, options);
  ceilings.bytes_per_s =
      2.0 * static_cast<double>(from.nbytes()) / median_seconds(place, [&] { to.copy_(from); });
  return ceilings;
}

std::vector<CaseTime> time_cases(const OperatorPlace& place, const Ceilings& ceilings,
                                 const std::vector<CaseMaker>& cases) {
  std::vector<CaseTime> times;
  for (const CaseMaker& make : cases) {
    const OperatorCase one = make();
    CaseTime time{one.name, one.kernel, {}};
    for (const OperatorCall& call : one.calls) {
      const double seconds = median_seconds(place, call.run);
      const double bound =
          std::max(call.flops / ceilings.flops_per_s, call.bytes / ceilings.bytes_per_s);
      time.calls.push_back(
          {call.name, seconds * 1e3, call.flops / seconds, call.bytes / seconds, bound / seconds});
    }
    times.push_back(std::move(time));
  }
  return times;
}

}  // namespace heddle::bench
