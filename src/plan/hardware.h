#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace heddle::plan {

/// Figures of the machines for predictions of time and memory: peaks as the vendor states them, and
/// the shares of them that a training step was seen to reach.
struct Hardware {
  std::string name;
  std::int64_t gpus_per_host = 8;
  double memory_gib = 0;        ///< Memory of a GPU that programs may use.
  double peak_tflops = 0;       ///< Dense products, 16 bit.
  double memory_gbs = 0;        ///< 1e9 bytes/s.
  double host_link_gbs = 0;     ///< A GPU to the others of its host, one direction.
  double network_gbs = 0;       ///< A GPU to other hosts, one direction.
  double host_memory_gbs = 50;  ///< A GPU and pinned memory of its host, each direction.
  double host_latency_us = 10;  ///< Time of one collective, per doubling of the ranks.
  double network_latency_us = 25;

  // Shares of the peaks.
  double products = 0.70;         ///< Share of peak_tflops: long products at its clock.
  double expert_products = 0.58;  ///< Grouped products of routed experts.
  /// How many times as fast as 16 bits products of 8-bit floats are, conversions included.
  double eight_bit_products = 1.62, eight_bit_experts = 1.49;
  double attention = 0.36;              ///< Attention of very long sequences ...
  double attention_half_length = 1050;  ///< ... and the length at which half of it is reached.
  double gated_delta_rule = 0.093;      ///< FLOPs as models/*/flops counts them.
  double elementwise = 0.77;            ///< Share of memory_gbs.
  double links = 0.58;                  ///< Share of host_link_gbs and network_gbs.
  double launch_us = 1.4;               ///< The device idles between two kernels.
  double wait_us = 350;                 ///< Where the host waits for it, until it has work again.
  double step_ms = 1.5;                 ///< Idle once a step.
};

/// Share of the memory that a layout may fill: libraries, the fragments between tensors and the
/// estimate's own error take the rest.
inline constexpr double kUsableMemory = 0.92;

std::vector<std::string> hardware_names();

/// A name of hardware_names(), or a YAML file with the keys above, over those of the preset that
/// its key `base` names. Throws ConfigError with file, line and key; FileError if it cannot be
/// read.
Hardware find_hardware(const std::string& name_or_file);

}  // namespace heddle::plan
