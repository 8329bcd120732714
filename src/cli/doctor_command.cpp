#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <ostream>

#include <c10/core/Device.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/doctor.h"
#include "config/config.h"
#include "device/device.h"
#include "ops/gated_delta_net/npu/path.h"
#include "ops/registry.h"
#include "train/layout_report.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

std::vector<KernelFacts> kernels_of(const ops::Registry& registry,
                                    const std::vector<AcceleratorFacts>& accelerators) {
  const auto is_here = [&](c10::DeviceType type) {
    const char* name = type == c10::DeviceType::CUDA ? "cuda" : "npu";
    return type == c10::DeviceType::CPU ||
           std::ranges::any_of(
               accelerators, [&](const AcceleratorFacts& a) { return a.device.starts_with(name); });
  };
  std::vector<KernelFacts> kernels;
  for (const ops::Registry::Entry& entry : registry.entries()) {
    const auto same_op = [&](const KernelFacts& k) { return k.op == entry.info.op; };
    auto row = std::ranges::find_if(kernels, same_op);
    if (row == kernels.end()) row = kernels.insert(row, {entry.info.op, {}, {}});
    row->kernels.push_back(entry.info.name);
    if (entry.info.device && !is_here(*entry.info.device)) row->unusable.push_back(entry.info.name);
  }
  return kernels;
}

DoctorFacts examine() {
  DoctorFacts facts;
  facts.machine = probe_machine();
  facts.libraries = loaded_libraries();
  for (const device::Accelerator& a : device::accelerators(facts.why_no_accelerator)) {
    facts.accelerators.push_back({a.name, a.capability, a.memory_bytes, a.device});
  }
  const device::Platform platform = device::platform();
  facts.platform = platform.parts;
  facts.platform_mismatches = platform.mismatches;
  facts.has_ascend_driver = std::filesystem::exists("/dev/davinci_manager");
  const auto is_npu = [](const AcceleratorFacts& a) { return a.device.starts_with("npu"); };
  if (std::ranges::any_of(facts.accelerators, is_npu)) {
    for (const auto& row : ops::gated_delta_rule_npu::path_rows()) {
      facts.gated_delta_rule_paths.push_back(
          {std::string(row.condition), std::string(row.kernel), std::string(row.reason)});
    }
  }
  facts.has_nvidia_driver = std::filesystem::exists("/proc/driver/nvidia/version");
  facts.float32_flops = device::properties(c10::Device(c10::DeviceType::CPU), 32).peak_flops;
  facts.kernels = kernels_of(ops::builtin_registry(), facts.accelerators);
  facts.findings = find_problems(facts);
  return facts;
}

struct DoctorOptions {
  bool is_json = false;
  std::string mesh_of;
  std::string preset;
  std::vector<std::string> overrides;
  std::int64_t ranks = 0;
};

/// The model's shape: a preset, or config.json alone of a directory that need not hold weights.
models::qwen3_5::Config shape_of(const DoctorOptions& options, const config::RunConfig& config) {
  if (!options.preset.empty()) return models::qwen3_5::preset(options.preset);
  const auto path = std::filesystem::path(config.model.path) / "config.json";
  try {
    return models::qwen3_5::parse_config(nlohmann::ordered_json::parse(files::read(path)),
                                         path.string());
  } catch (const nlohmann::json::parse_error& error) {
    throw_error<ModelError>("{}: {}", path.string(), error.what());
  }
}

train::LayoutReport plan(const DoctorOptions& options) {
  const config::RunConfig config = config::load(options.mesh_of, options.overrides);
  const config::ParallelSection& p = config.parallel;
  std::int64_t ranks = options.ranks;
  if (ranks == 0) {
    if (p.dp.is_auto() || p.fsdp.is_auto())
      throw ConfigError("--ranks: parallel.dp or parallel.fsdp is auto: say how many ranks");
    ranks = p.dp.value * p.fsdp.value * p.tp * p.cp * p.pp;
  }
  return train::plan_layout(config, shape_of(options, config), ranks);
}

ui::Table layout_table(const train::LayoutReport& report) {
  using ui::Align;
  const auto bytes = [](double value) { return text::format_bytes(value); };
  ui::Table table({}, {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight,
                       Align::kRight, Align::kLeft});
  table.section("mesh: " + report.mesh);
  table.row({"", "ranks", "groups", "", "", "", "group of rank 0"});
  for (const train::LayoutGroup& group : report.groups) {
    std::vector<std::string> ranks;
    for (std::size_t i = 0; i < group.of_rank0.size() && i < 8; ++i)
      ranks.push_back(std::to_string(group.of_rank0[i]));
    if (group.of_rank0.size() > 8) ranks.push_back("...");
    table.row({group.dimension, std::to_string(group.size), std::to_string(group.count), "", "", "",
               text::join(ranks, " ")});
  }
  table.section(fmt::format("a rank receives per step of {} tokens, {} micro-batches",
                            text::format_count(report.tokens_per_step), report.micro_batches));
  for (const train::LayoutTraffic& row : report.traffic)
    table.row({row.dimension, bytes(row.bytes), "", "", "", "", row.what});
  table.section("memory of a rank, estimated");
  table.row({"stage", "weights", "gradients", "optimizer", "activations", "sum", "layers"});
  for (const train::LayoutMemory& m : report.memory) {
    table.row({std::to_string(m.stage_rank), bytes(m.weights), bytes(m.gradients),
               bytes(m.optimizer), bytes(m.activations), bytes(m.sum()), m.layers});
  }
  if (report.schedule.empty()) return table;
  table.section(fmt::format("pipeline: {:.0f} % of the time waiting; forward 0-9, backward a-z",
                            100 * report.bubble));
  for (const std::string& line : report.schedule) table.row({"", "", "", "", "", "", line});
  return table;
}

std::string layout_json(const train::LayoutReport& report) {
  nlohmann::ordered_json json = {{"mesh", report.mesh},
                                 {"tokens_per_step", report.tokens_per_step},
                                 {"micro_batches", report.micro_batches},
                                 {"bubble", report.bubble},
                                 {"schedule", report.schedule}};
  for (const train::LayoutGroup& g : report.groups) {
    json["groups"].push_back({{"dimension", g.dimension},
                              {"size", g.size},
                              {"count", g.count},
                              {"of_rank0", g.of_rank0}});
  }
  for (const train::LayoutTraffic& t : report.traffic)
    json["received_bytes"].push_back(
        {{"dimension", t.dimension}, {"what", t.what}, {"bytes", t.bytes}});
  for (const train::LayoutMemory& m : report.memory) {
    json["memory_bytes"].push_back({{"stage_rank", m.stage_rank},
                                    {"layers", m.layers},
                                    {"weights", m.weights},
                                    {"gradients", m.gradients},
                                    {"optimizer", m.optimizer},
                                    {"activations", m.activations}});
  }
  return json.dump(2);
}

}  // namespace

void add_doctor_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* command =
      app.add_subcommand("doctor", "Show hardware, libraries, kernels, and what is missing");
  command->add_flag("--json", options->is_json, "Print one JSON document");
  CLI::Option* mesh =
      command
          ->add_option("--mesh", options->mesh_of,
                       "Work out the layout of a configuration instead, starting nothing")
          ->type_name("CONFIG.yaml");
  command->add_option("--ranks", options->ranks, "Ranks of it; default: what its degrees give")
      ->needs(mesh)
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--preset", options->preset, "A named shape instead of model.path's config.json")
      ->type_name("NAME")
      ->needs(mesh);
  command->add_option("overrides", options->overrides, "key=value, over the file")
      ->needs(mesh)
      ->type_name("[key=value ...]");
  command->footer(
      "Shows what this process may use (cores, memory, disk, accelerators), which libraries it "
      "loaded, which\n"
      "kernels this build holds for each operator, and for everything that is missing how to get "
      "it.\n"
      "With --mesh: who talks to whom along each dimension of parallel.*, bytes per step and "
      "rank, and the\n"
      "memory of a rank, from the configuration and the model's config.json alone.\n"
      "\n"
      "Examples:\n"
      "  heddle doctor\n"
      "  heddle doctor --json > machine.json\n"
      "  heddle doctor --mesh run.yaml --ranks 64 parallel.tp=2 parallel.fsdp=auto\n"
      "  heddle doctor --mesh run.yaml --preset qwen3.5-397b-a17b --ranks 1024 parallel.ep=64 "
      "parallel.fsdp=auto");
  command->callback([options, &action] {
    action = [options](const Session& session) {
      if (!options->mesh_of.empty()) {
        const train::LayoutReport report = plan(*options);
        session.out << (options->is_json ? layout_json(report) + "\n"
                                         : layout_table(report).render(ui::TableStyle::kPlain,
                                                                       session.out_has_color,
                                                                       session.out_width));
        return 0;
      }
      const DoctorFacts facts = examine();
      session.out << (options->is_json ? to_json(facts) + "\n"
                                       : render(facts, session.out_has_color, session.out_width));
      return 0;
    };
  });
}

}  // namespace heddle::cli
