#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>

#include <c10/core/Device.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/json.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/doctor.h"
#include "cli/layout_table.h"
#include "cli/names.h"
#include "config/config.h"
#include "config/objective.h"
#include "device/device.h"
#include "models/registry.h"
#include "ops/kernel_document.h"
#include "ops/registry.h"
#include "train/adapter_start.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

std::vector<KernelFacts> kernels_of(const ops::Registry& registry,
                                    const std::vector<AcceleratorFacts>& accelerators) {
  const auto is_here = [&](ops::Platform platform) {
    const char* name = platform == ops::Platform::kCuda ? "cuda" : "npu";
    return platform == ops::Platform::kCpu ||
           std::ranges::any_of(
               accelerators, [&](const AcceleratorFacts& a) { return a.device.starts_with(name); });
  };
  std::vector<KernelFacts> kernels;
  for (const ops::Registry::Entry& entry : registry.entries()) {
    const auto same_op = [&](const KernelFacts& k) { return k.op == entry.info.op; };
    auto row = std::ranges::find_if(kernels, same_op);
    if (row == kernels.end()) row = kernels.insert(row, {entry.info.op, {}, {}});
    row->kernels.push_back(entry.info.name);
    if (!entry.info.platforms.empty() && std::ranges::none_of(entry.info.platforms, is_here))
      row->unusable.push_back(entry.info.name);
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
  facts.has_nvidia_driver = std::filesystem::exists("/proc/driver/nvidia/version");
  facts.float32_flops = device::peak_flops(c10::Device(c10::DeviceType::CPU), 32);
  facts.kernels = kernels_of(ops::builtin_registry(), facts.accelerators);
  facts.findings = find_problems(facts);
  return facts;
}

struct DoctorOptions {
  bool is_json = false, lists_kernels = false;
  std::string mesh_of;
  std::string preset;
  std::vector<std::string> overrides;
  std::int64_t ranks = 0;
  std::string hardware, measured;
  std::int64_t propose = 0;
  bool is_dry_run = false;

  bool is_plan() const { return !mesh_of.empty() || !preset.empty(); }
};

/// Throws ConfigError for numbers that are none and for options without what they are of.
void check(const DoctorOptions& options) {
  if (options.ranks < 0) throw_error<ConfigError>("--ranks: {}: expected 1 or more", options.ranks);
  if (options.propose < 0)
    throw_error<ConfigError>("--propose: {}: expected 1 or more", options.propose);
  const std::pair<const char*, bool> of_plans[] = {{"--ranks", options.ranks > 0},
                                                   {"--propose", options.propose > 0},
                                                   {"--dry-run", options.is_dry_run},
                                                   {"key=value", !options.overrides.empty()}};
  for (const auto& [name, is_given] : of_plans) {
    if (is_given && !options.is_plan())
      throw_error<ConfigError>("{}: is of a plan: give --mesh CONFIG.yaml or --preset NAME", name);
  }
  if (options.is_plan() && !options.measured.empty())
    throw ConfigError("--measured: has its own runs: leave --mesh and --preset away");
  if (!options.hardware.empty() && !options.is_plan() && options.measured.empty())
    throw ConfigError("--hardware: predicts a layout: give --mesh, --preset or --measured as well");
}

/// The model's shape: a preset, or config.json alone of a directory that need not hold weights.
models::Config shape_of(const DoctorOptions& options, const config::RunConfig& config) {
  if (!options.preset.empty()) return models::preset(options.preset);
  const auto path = find_model(config.model.path, hub::Need::kShape) / "config.json";
  if (!std::filesystem::exists(path)) {
    throw_error<ConfigError>("{}: there is no {}; --preset NAME plans without a model",
                             config::where(config, "model.path"), path.string());
  }
  return models::parse_config(
      json::read_object<ModelError>(path, files::kJsonLimit, path.parent_path()), path.string());
}

/// A layout's configuration and its number of ranks.
struct Planned {
  config::RunConfig config;
  models::Config model;
  std::int64_t ranks;
};

/// Ten times the largest jobs there are. A plan names the ranks of every group and tries their
/// divisors: what it holds and how long it takes grow with them.
constexpr std::int64_t kMostRanks = 1 << 20;

/// Takes --ranks or, where that is not given, the product of the degrees.
std::int64_t ranks_of(const config::ParallelSection& p, std::int64_t asked) {
  const bool has_auto = p.dp.is_auto() || p.fsdp.is_auto();
  if (asked == 0 && has_auto)
    throw ConfigError("--ranks: parallel.dp or parallel.fsdp is auto: say how many ranks");
  double product = 1;  // which int64 may not hold
  for (const std::int64_t degree :
       {p.dp.is_auto() ? 1 : p.dp.value, p.fsdp.is_auto() ? 1 : p.fsdp.value, p.tp, p.cp, p.pp})
    product *= static_cast<double>(degree);
  const double most = std::max(product, static_cast<double>(asked));
  if (most > static_cast<double>(kMostRanks)) {
    throw_error<ConfigError>("{}: a plan of {:.0f} ranks; expected at most {}",
                             asked > 0 ? "--ranks" : "parallel.*", most, kMostRanks);
  }
  return asked > 0 ? asked : static_cast<std::int64_t>(product);
}

/// Ranks that train among all of a job's, which --ranks counts as `heddle launch --nproc` does.
std::int64_t trainers_of(const config::RunConfig& config, std::int64_t ranks) {
  const config::RlSection& rl = config.rl;
  if (ranks == 0 || config::objective_of(config) != config::Objective::kPolicy ||
      rl.rollout_ranks == 0 || rl.has_two_jobs())
    return ranks;
  if (rl.rollout_ranks >= ranks) {
    throw_error<ConfigError>("--ranks: {} with rl.rollout_ranks {}: none is left to train", ranks,
                             rl.rollout_ranks);
  }
  return ranks - rl.rollout_ranks;
}

/// `heddle rl` and `heddle dpo` say what they train, so that their files need not; "" for others.
std::string implied_objective(const config::RunConfig& config) {
  if (config.is_set("train.objective")) return "";
  const auto has_section = [&](const std::string& prefix) {
    const auto first = config.origins.lower_bound(prefix);
    return first != config.origins.end() && first->first.starts_with(prefix);
  };
  return has_section("rl.") ? "policy" : has_section("dpo.") ? "dpo" : "";
}

Planned planned(const DoctorOptions& options) {
  // A plan reads no data: a file that has none yet is planned too.
  std::vector<std::string> settings = {"data.train=rows.jsonl"};
  settings.insert(settings.end(), options.overrides.begin(), options.overrides.end());
  // A file for no model in particular may leave it out.
  if (!options.preset.empty()) settings.push_back("model.path=" + options.preset);
  const auto load = [&] {
    return config::load(options.mesh_of, settings, config::Completeness::kComplete,
                        assembly::usual_device());
  };
  Planned planned{load(), {}, 0};
  if (const std::string objective = implied_objective(planned.config); !objective.empty()) {
    settings.push_back("train.objective=" + objective);
    planned.config = load();
  }
  // An adapter that is not here is planned as the configuration says.
  if (std::filesystem::is_directory(planned.config.adapter.path))
    train::take_adapter_settings(planned.config);
  planned.ranks = ranks_of(planned.config.parallel, trainers_of(planned.config, options.ranks));
  planned.model = shape_of(options, planned.config);
  return planned;
}

/// The table, or the JSON document of it.
void print(const Session& session, bool is_json, const std::string& json, const ui::Table& table) {
  session.out << (is_json ? json + "\n"
                          : table.render(ui::TableStyle::kPlain, session.out_has_color,
                                         session.out_width));
}

int show_layout(const DoctorOptions& options, const Session& session) {
  const Planned run = planned(options);
  std::optional<plan::Hardware> hardware;
  if (!options.hardware.empty()) hardware = plan::find_hardware(options.hardware);
  if (options.propose > 0) {
    if (!hardware) throw ConfigError("--propose: say on which --hardware");
    const plan::Search search = plan::search_layouts(run.config, run.model, run.ranks, *hardware,
                                                     static_cast<std::size_t>(options.propose));
    print(session, options.is_json, proposal_json(search),
          proposal_table(search, *hardware, run.ranks));
    return 0;
  }
  const plan::LayoutReport report = plan::plan_layout(run.config, run.model, run.ranks, hardware);
  if (options.is_dry_run) {
    const plan::DryRunReport dry = plan::dry_run(run.config, run.model, run.ranks);
    print(session, options.is_json, dry_run_json(dry), dry_run_table(dry, report));
    return 0;
  }
  print(session, options.is_json, layout_json(report), layout_table(report));
  return 0;
}

int show_measured(const DoctorOptions& options, const Session& session) {
  const auto comparisons = plan::compare_with_measured(options.measured, options.hardware);
  print(session, options.is_json, comparison_json(comparisons), comparison_table(comparisons));
  return 0;
}

}  // namespace

void add_doctor_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* command =
      app.add_subcommand("doctor", "Show hardware, libraries, kernels, and what is missing");
  command->add_flag("--json", options->is_json, "Print one JSON document");
  command->add_flag("--kernels", options->lists_kernels,
                    "Print the kernels of this build as a table in Markdown, with their rules");
  command
      ->add_option("--mesh", options->mesh_of,
                   "Work out the layout of a configuration instead, starting nothing")
      ->type_name("CONFIG.yaml");
  command->add_option("--ranks", options->ranks, "Ranks of it; default: what its degrees give")
      ->type_name("N");
  command
      ->add_option("--preset", options->preset,
                   "A named shape instead of model.path's config.json; needs no CONFIG.yaml")
      ->type_name("NAME");
  command
      ->add_option("--hardware", options->hardware,
                   "Predict the time of a step on it: " + text::join(plan::hardware_names(), ", ") +
                       ", or a file")
      ->type_name("NAME|FILE.yaml");
  command->add_flag("--dry-run", options->is_dry_run,
                    "Make the model objects of every rank without storage, and check them");
  command->add_option("--propose", options->propose, "Print the N fastest layouts that fit instead")
      ->type_name("N");
  command
      ->add_option("--measured", options->measured,
                   "Predict the runs of a file and compare (bench/plan/measured.yaml)")
      ->type_name("FILE.yaml");
  command->add_option("overrides", options->overrides, "key=value, over the file")
      ->type_name("[key=value ...]");
  command->footer(fmt::format(
      "Shows what this process may use (cores, memory, disk, accelerators), which libraries it "
      "loaded, which\n"
      "kernels this build holds for each operator, and for everything that is missing how to get "
      "it.\n"
      "With --mesh: who talks to whom along each dimension of parallel.*, bytes per step and "
      "rank, and the\n"
      "memory of a rank, from the configuration and the model's config.json alone.\n"
      "With --hardware also the time of a step, or with --propose the fastest layouts.\n"
      "\n"
      "Examples:\n"
      "  heddle doctor\n"
      "  heddle doctor --json > machine.json\n"
      "  heddle doctor --mesh run.yaml --ranks 64 parallel.tp=2 parallel.fsdp=auto\n"
      "  heddle doctor --preset {} --ranks 8 --hardware h200 --propose 5 parallel.tp=8\n"
      "  heddle doctor --mesh run.yaml --preset {} --ranks 1024 parallel.ep=64 "
      "parallel.fsdp=auto",
      models::kLargeExample, models::kLargestExample));
  command->callback([options, &action] {
    action = [options](const Session& session) {
      check(*options);
      if (options->lists_kernels) {
        session.out << ops::kernel_document(ops::builtin_registry());
        return 0;
      }
      if (options->is_plan()) return show_layout(*options, session);
      if (!options->measured.empty()) return show_measured(*options, session);
      const DoctorFacts facts = examine();
      session.out << (options->is_json ? to_json(facts) + "\n"
                                       : render(facts, session.out_has_color, session.out_width));
      return 0;
    };
  });
}

}  // namespace heddle::cli
