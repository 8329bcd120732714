#include <link.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fmt/format.h>

#include "base/amx.h"
#include "base/host_memory.h"
#include "base/text.h"
#include "base/threads.h"
#include "cli/doctor.h"

namespace heddle::cli {
namespace {

/// The text after "key" and ':' or '=' in the first line that starts with it, or "".
std::string value_of(const std::string& file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const std::string_view view = line;
    if (!view.starts_with(key)) continue;
    const std::size_t separator = view.find_first_of(":=");
    if (separator == std::string_view::npos) continue;
    if (text::trim(view.substr(0, separator)) != key) continue;
    std::string_view value = text::trim(view.substr(separator + 1));
    if (value.size() > 1 && value.front() == '"') value = value.substr(1, value.size() - 2);
    return std::string(value);
  }
  return "";
}

std::string system_line() {
  utsname kernel{};
  uname(&kernel);
  const std::string distribution = value_of("/etc/os-release", "PRETTY_NAME");
  return fmt::format("{}{}{} {}, {}", distribution, distribution.empty() ? "" : ", ",
                     kernel.sysname, kernel.release, kernel.machine);
}

}  // namespace

MachineFacts probe_machine(const std::string& proc, const std::string& cgroup) {
  MachineFacts facts;
  facts.system = system_line();
  facts.cores = available_cores();
  facts.machine_cores = static_cast<int>(std::thread::hardware_concurrency());

  const std::string cpuinfo = proc + "/cpuinfo";
  for (const char* key : {"model name", "Model", "CPU part"}) {  // x86, Raspberry Pi, other Arm
    if (facts.cpu.empty()) facts.cpu = value_of(cpuinfo, key);
  }
  std::string flags = value_of(cpuinfo, "flags");
  if (flags.empty()) flags = value_of(cpuinfo, "Features");
  const std::vector<std::string> all = text::split(flags, ' ');
  for (const char* wanted : {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16",
                             "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16"}) {
    if (std::ranges::count(all, wanted) > 0) facts.instruction_sets.emplace_back(wanted);
  }

  facts.has_amx_without_tiles = has_amx_without_tiles();

  const HostMemory memory = host_memory(proc, cgroup);
  facts.memory_bytes = memory.total;
  facts.memory_available_bytes = memory.available;

  std::error_code ignored;
  facts.disk_path = std::filesystem::current_path(ignored).string();
  struct statvfs disk {};
  if (statvfs(facts.disk_path.c_str(), &disk) == 0) {
    facts.disk_free_bytes =
        static_cast<std::int64_t>(disk.f_bavail) * static_cast<std::int64_t>(disk.f_frsize);
  }
  return facts;
}

std::vector<std::pair<std::string, std::string>> loaded_libraries() {
  using Libraries = std::vector<std::pair<std::string, std::string>>;
  Libraries libraries;
  const auto visit = [](dl_phdr_info* info, std::size_t, void* data) {
    constexpr std::array<std::string_view, 12> kStarts = {
        "libtorch_cpu", "libtorch_cuda", "libtorch_npu", "libc10.",  "libcudart", "libcudnn.",
        "libcublas.",   "libnccl",       "libgomp",      "libiomp5", "libmkl_",   "libopenblas"};
    const auto path = std::filesystem::path(info->dlpi_name).lexically_normal();
    const std::string name = path.filename().string();
    const bool matters = std::ranges::any_of(
        kStarts, [&](std::string_view start) { return name.starts_with(start); });
    if (matters) static_cast<Libraries*>(data)->emplace_back(name, path.string());
    return 0;
  };
  dl_iterate_phdr(visit, &libraries);
  std::ranges::sort(libraries);
  return libraries;
}

}  // namespace heddle::cli
