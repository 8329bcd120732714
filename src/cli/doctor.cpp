#include "cli/doctor.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "cli/version.h"
#include "ui/table.h"
#include "ui/terminal.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kGiB = std::int64_t{1} << 30;
constexpr std::int64_t kLittleDisk =
    10 * kGiB;  // a checkpoint of the 0.8B model with its optimizer state
constexpr std::int64_t kLittleMemory = 4 * kGiB;  // weights of the 0.8B model in fp32, and the step

std::string bytes(std::int64_t count) { return text::format_bytes(static_cast<double>(count)); }

bool has_vectors(const MachineFacts& machine) {
  return std::ranges::any_of(machine.instruction_sets, [](const std::string& set) {
    return set == "avx2" || set == "avx512f" || set == "asimd";
  });
}

std::string accelerator_text(const AcceleratorFacts& a) {
  return fmt::format("{}, {}, {}", a.name, bytes(a.memory_bytes), a.capability);
}

}  // namespace

std::vector<Finding> find_problems(const DoctorFacts& facts) {
  std::vector<Finding> findings;
  const MachineFacts& m = facts.machine;
  if (!has_vectors(m)) {
    findings.push_back({true, "this CPU has no AVX2: the fast CPU kernels cannot run",
                        "use a machine with AVX2, or a GPU"});
  }
  if (m.has_amx_without_tiles) {
    findings.push_back({false,
                        "this machine announces AMX but hides its tiles: bfloat16 products on the "
                        "CPU run with AVX-512",
                        "a virtual machine that passes CPUID leaf 1Dh on"});
  }
  if (m.cores < m.machine_cores) {
    findings.push_back(
        {false,
         fmt::format("this process may use {} of the machine's {} cores", m.cores, m.machine_cores),
         "lift the limit of the job or container (--cpus-per-task, taskset, --cpuset-cpus)"});
  }
  if (m.memory_available_bytes < kLittleMemory) {
    findings.push_back(
        {true, fmt::format("only {} of memory are free", bytes(m.memory_available_bytes)),
         "close other programs, or train with train.recompute=full and a smaller data.max_length"});
  }
  if (m.disk_free_bytes < kLittleDisk) {
    findings.push_back(
        {true,
         fmt::format("only {} are free on the disk of {}", bytes(m.disk_free_bytes), m.disk_path),
         "set train.output_dir to a larger disk, or lower ckpt.keep_last"});
  }
  if (facts.accelerators.empty() && facts.has_nvidia_driver) {
    findings.push_back(
        {true, "an NVIDIA driver is here, but no GPU can be used: " + facts.why_no_accelerator,
         "build with cmake --preset cuda, on a machine that has nvcc of CUDA 13"});
  }
  if (facts.accelerators.empty() && facts.has_ascend_driver) {
    findings.push_back(
        {true, "an Ascend driver is here, but no NPU can be used: " + facts.why_no_accelerator,
         "build with cmake --preset npu, after CANN's set_env.sh (docs/ascend.md)"});
  }
  for (const std::string& mismatch : facts.platform_mismatches)
    findings.push_back({true, mismatch, "the versions that fit stand in docs/ascend.md"});
  return findings;
}

std::string to_json(const DoctorFacts& facts) {
  const MachineFacts& m = facts.machine;
  Json libraries = Json::array(), accelerators = Json::array(), kernels = Json::object(),
       findings = Json::array();
  for (const auto& [name, path] : facts.libraries)
    libraries.push_back({{"name", name}, {"path", path}});
  for (const AcceleratorFacts& a : facts.accelerators) {
    accelerators.push_back(
        {{"name", a.name}, {"capability", a.capability}, {"memory_bytes", a.memory_bytes}});
  }
  for (const KernelFacts& k : facts.kernels) {
    kernels[k.op] = {{"kernels", k.kernels}, {"unusable", k.unusable}};
  }
  for (const Finding& f : facts.findings) {
    findings.push_back({{"is_problem", f.is_problem}, {"what", f.what}, {"remedy", f.remedy}});
  }
  Json platform = Json::object();
  for (const auto& [name, value] : facts.platform) platform[name] = value;
  const Json root = {{"version", version()},
                     {"torch_version", torch_version()},
                     {"machine",
                      {{"system", m.system},
                       {"cpu", m.cpu},
                       {"cores", m.cores},
                       {"machine_cores", m.machine_cores},
                       {"instruction_sets", m.instruction_sets},
                       {"float32_flops", facts.float32_flops},
                       {"memory_bytes", m.memory_bytes},
                       {"memory_available_bytes", m.memory_available_bytes},
                       {"disk_path", m.disk_path},
                       {"disk_free_bytes", m.disk_free_bytes}}},
                     {"accelerators", accelerators},
                     {"why_no_accelerator", facts.why_no_accelerator},
                     {"platform", platform},
                     {"libraries", libraries},
                     {"kernels", kernels},
                     {"findings", findings}};
  return root.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::string render(const DoctorFacts& facts, bool has_color, int width) {
  const MachineFacts& m = facts.machine;
  ui::Table table;
  table.section(version_line());
  table.row({"system", m.system});
  table.row({"CPU", m.cpu.empty() ? "unknown" : m.cpu});
  table.row({"cores", fmt::format("{} of {}", m.cores, m.machine_cores)});
  table.row({"instruction sets",
             m.instruction_sets.empty() ? "baseline only" : text::join(m.instruction_sets, " ")});
  if (facts.float32_flops > 0) {
    table.row({"float32 matrix product",
               fmt::format("{:.0f} GFLOP/s, measured", facts.float32_flops / 1e9)});
  }
  table.row({"memory",
             fmt::format("{} of {} free", bytes(m.memory_available_bytes), bytes(m.memory_bytes))});
  table.row({"disk", fmt::format("{} free at {}", bytes(m.disk_free_bytes), m.disk_path)});
  table.section("Accelerators");
  for (const AcceleratorFacts& a : facts.accelerators) table.row({a.device, accelerator_text(a)});
  if (facts.accelerators.empty()) table.row({"none", facts.why_no_accelerator});
  for (const auto& [name, value] : facts.platform) table.row({name, value});
  table.section("Libraries");
  for (const auto& [name, path] : facts.libraries) table.row({name, path});
  if (!facts.kernels.empty()) table.section("Kernels, in the order in which they are tried");
  for (const KernelFacts& k : facts.kernels) {
    std::vector<std::string> names = k.kernels;
    for (std::string& name : names) {
      if (std::ranges::count(k.unusable, name) > 0) name += " (no such device here)";
    }
    table.row({k.op, text::join(names, ", ")});
  }

  std::string out =
      table.render(width > 0 ? ui::TableStyle::kBox : ui::TableStyle::kPlain, has_color, width);
  out += "\n";
  for (const Finding& f : facts.findings) {
    const ui::Color color = f.is_problem ? ui::Color::kRed : ui::Color::kYellow;
    out += fmt::format("{} {}\n        {}\n",
                       ui::paint(f.is_problem ? "missing" : "hint   ", color, has_color), f.what,
                       f.remedy);
  }
  if (facts.findings.empty())
    out += ui::paint("Nothing is missing.", ui::Color::kGreen, has_color) + "\n";
  return out;
}

}  // namespace heddle::cli
