#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// Facts about the machine and this build that `heddle doctor` finds.
namespace heddle::cli {

struct MachineFacts {
  std::string system;  ///< "Debian GNU/Linux 12 (bookworm), Linux 6.1.0, x86_64"
  std::string cpu;     ///< "AMD EPYC 9B14"
  int cores = 0;       ///< this process may use
  int machine_cores = 0;
  std::vector<std::string>
      instruction_sets;  ///< those that matter here, as /proc/cpuinfo spells them
  bool has_amx_without_tiles = false;
  std::int64_t memory_bytes = 0;  ///< of the machine, or of the control group if less
  std::int64_t memory_available_bytes = 0;
  std::string disk_path;
  std::int64_t disk_free_bytes = 0;
};
/// `proc` and `cgroup` are the roots of these file systems; tests give their own.
MachineFacts probe_machine(const std::string& proc = "/proc",
                           const std::string& cgroup = "/sys/fs/cgroup");

/// Shared libraries of this process that matter, each with the path it was loaded from.
std::vector<std::pair<std::string, std::string>> loaded_libraries();

struct AcceleratorFacts {
  std::string name;
  std::string capability;
  std::int64_t memory_bytes = 0;
  std::string device;  ///< "cuda:0", "npu:0"
};

struct KernelFacts {
  std::string op;
  std::vector<std::string> kernels;   ///< "cpu.chunk", in the order in which they are tried
  std::vector<std::string> unusable;  ///< those of `kernels` whose device this machine lacks
};

/// Something missing or weak, and how to get it.
struct Finding {
  bool is_problem = false;  ///< else a hint
  std::string what;
  std::string remedy;
};

struct DoctorFacts {
  MachineFacts machine;
  std::vector<std::pair<std::string, std::string>> libraries;
  std::vector<AcceleratorFacts> accelerators;
  std::string why_no_accelerator;
  bool has_nvidia_driver = false;
  bool has_ascend_driver = false;
  std::vector<std::pair<std::string, std::string>> platform;  ///< "CANN", "9.1.0"
  std::vector<std::string> platform_mismatches;
  double float32_flops = 0;  ///< of a matrix product on the CPU, measured
  std::vector<KernelFacts> kernels;
  std::vector<Finding> findings;
};

/// Conclusions for the user, from everything but `findings`.
std::vector<Finding> find_problems(const DoctorFacts& facts);

std::string to_json(const DoctorFacts& facts);
/// Tables and findings; `width` 0 for plain text.
std::string render(const DoctorFacts& facts, bool has_color, int width);

}  // namespace heddle::cli
