#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "config/run_config.h"

namespace heddle::train {

/// Finds steps whose gradient norm is above factor x median of the last norms (train.spike). The
/// norm is that of the whole gradient, so that all ranks of any layout find the same steps. Norms
/// of skipped steps count in later medians: a lasting change is followed. The median of an even
/// number is the lower of the two in the middle, as torch.median's.
class SpikePolicy {
 public:
  explicit SpikePolicy(const config::TrainSection& train);

  bool is_on() const { return policy_ != config::Spike::kOff; }
  bool stops() const { return policy_ == config::Spike::kStop; }
  /// Norms above it are spikes: infinite if the policy is off or too few steps are known.
  double threshold() const;
  /// After each step, in order: its norm.
  void remember(double norm);

  /// Decides on the device, for steps that are queued before the host knows the norms of
  /// those before: NaN for a spike, else 0. `norm`: 0-d fp64. Appends the norm to the device's own
  /// list, so that a recorded call works when it is replayed. A step after a spike that stops the
  /// run is refused as well.
  at::Tensor object(const at::Tensor& norm);
  /// After object(): the threshold that it used, 0-d fp64; undefined before.
  const at::Tensor& threshold_on_device() const { return threshold_; }
  /// Makes the device's list; called before the first object(), outside of recorded steps.
  void prepare(c10::Device device);

  /// The last norms, oldest first, as a checkpoint keeps them.
  const std::vector<double>& recent() const { return recent_; }
  void restore(std::vector<double> recent);

 private:
  config::Spike policy_;
  double factor_;
  std::size_t window_;
  std::vector<double> recent_;
  at::Tensor list_;       ///< [window] fp64: infinite where no step is known yet; the oldest first.
  at::Tensor stopped_;    ///< 0-d fp64: 1 after a spike that stops the run.
  at::Tensor threshold_;  ///< 0-d fp64
};

}  // namespace heddle::train
