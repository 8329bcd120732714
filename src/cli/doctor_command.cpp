#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <ostream>

#include <c10/core/Device.h>

#include "cli/command.h"
#include "cli/doctor.h"
#include "device/device.h"
#include "ops/registry.h"

namespace heddle::cli {
namespace {

std::vector<KernelFacts> kernels_of(const ops::Registry& registry, bool has_accelerator) {
  std::vector<KernelFacts> kernels;
  for (const ops::Registry::Entry& entry : registry.entries()) {
    const auto same_op = [&](const KernelFacts& k) { return k.op == entry.info.op; };
    auto row = std::ranges::find_if(kernels, same_op);
    if (row == kernels.end()) row = kernels.insert(row, {entry.info.op, {}, {}});
    row->kernels.push_back(entry.info.name);
    const bool needs_accelerator = entry.info.device && *entry.info.device != c10::DeviceType::CPU;
    if (needs_accelerator && !has_accelerator) row->unusable.push_back(entry.info.name);
  }
  return kernels;
}

DoctorFacts examine() {
  DoctorFacts facts;
  facts.machine = probe_machine();
  facts.libraries = loaded_libraries();
  for (const device::Accelerator& a : device::accelerators(facts.why_no_accelerator)) {
    facts.accelerators.push_back({a.name, a.capability, a.memory_bytes});
  }
  facts.has_nvidia_driver = std::filesystem::exists("/proc/driver/nvidia/version");
  facts.float32_flops = device::properties(c10::Device(c10::DeviceType::CPU), 32).peak_flops;
  facts.kernels = kernels_of(ops::builtin_registry(), !facts.accelerators.empty());
  facts.findings = find_problems(facts);
  return facts;
}

}  // namespace

void add_doctor_command(CLI::App& app, Action& action) {
  auto is_json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("doctor", "Show hardware, libraries, kernels, and what is missing");
  command->add_flag("--json", *is_json, "Print one JSON document");
  command->footer(
      "Shows what this process may use (cores, memory, disk, accelerators), which libraries it "
      "loaded, which\n"
      "kernels this build holds for each operator, and for everything that is missing how to get "
      "it.\n"
      "\n"
      "Examples:\n"
      "  heddle doctor\n"
      "  heddle doctor --json > machine.json");
  command->callback([is_json, &action] {
    action = [is_json](const Session& session) {
      const DoctorFacts facts = examine();
      session.out << (*is_json ? to_json(facts) + "\n"
                               : render(facts, session.out_has_color, session.out_width));
      return 0;
    };
  });
}

}  // namespace heddle::cli
