#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>

#include "base/errors.h"
#include "base/text.h"
#include "cli/bench_operators.h"
#include "cli/command.h"
#include "comm/launch_environment.h"
#include "comm/world.h"
#include "config/config.h"
#include "train/benchmark.h"
#include "train/setup.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

struct BenchOptions {
  std::string work = "step";
  std::string preset, profile;
  std::int64_t batch = 1, length = 2048, median = 0, micro_batches = 1, steps = 6, warmup = 4;
  bool json = false, check = false;
  std::vector<std::string> overrides;
};

train::Benchmark benchmark_of(const BenchOptions& options) {
  train::Benchmark benchmark;
  benchmark.preset = options.preset;
  benchmark.tokens = {options.batch, options.length, options.median};
  benchmark.micro_batches = options.micro_batches;
  benchmark.steps = options.steps;
  benchmark.warmup = options.warmup;
  benchmark.profile = options.profile;
  return benchmark;
}

nlohmann::ordered_json as_json(const BenchOptions& options, const train::BenchmarkResult& result) {
  nlohmann::ordered_json json;
  json["preset"] = options.preset;
  json["batch"] = options.batch;
  json["length"] = options.length;
  json["median"] = options.median;
  json["micro_batches"] = options.micro_batches;
  json["overrides"] = options.overrides;
  json["layout"] = result.layout;
  json["device"] = result.device;
  json["tokens_per_step"] = result.tokens;
  json["tokens_per_s"] = result.tokens_per_s;
  json["step_ms"] = result.median_s * 1e3;
  json["step_ms_min"] = result.min_s * 1e3;
  json["step_ms_max"] = result.max_s * 1e3;
  json["tflops"] = result.flops_per_s * 1e-12;
  json["peak_gib"] = static_cast<double>(result.peak_bytes) / (1u << 30);
  json["loss"] = {result.first_loss, result.last_loss};
  json["kernels"] = result.kernels;
  return json;
}

std::string as_table(const nlohmann::ordered_json& result) {
  ui::Table table;
  const auto number = [&](const char* key) { return result[key].get<double>(); };
  table.row({"work",
             fmt::format("{}, {} x {} x {} tokens{}, {}", result["preset"].get<std::string>(),
                         result["micro_batches"].get<std::int64_t>(),
                         result["batch"].get<std::int64_t>(), result["length"].get<std::int64_t>(),
                         result["median"].get<std::int64_t>() > 0
                             ? fmt::format(" in sequences of median {}",
                                           result["median"].get<std::int64_t>())
                             : "",
                         text::join(result["overrides"].get<std::vector<std::string>>(), " "))});
  table.row({"layout", result["layout"].get<std::string>()});
  table.row({"device", result["device"].get<std::string>()});
  table.row({"step", fmt::format("{:.1f} ms ({:.1f} to {:.1f})", number("step_ms"),
                                 number("step_ms_min"), number("step_ms_max"))});
  table.row({"rate", fmt::format("{:.0f} tokens/s, {:.0f} TFLOP/s", number("tokens_per_s"),
                                 number("tflops"))});
  table.row({"peak memory", fmt::format("{:.1f} GiB", number("peak_gib"))});
  table.row({"loss", fmt::format("{:.4f} -> {:.4f}", result["loss"][0].get<double>(),
                                 result["loss"][1].get<double>())});
  table.row({"kernels", text::join(result["kernels"].get<std::vector<std::string>>(), "\n")});
  return table.render(ui::TableStyle::kPlain);
}

int run_step(const BenchOptions& options, const config::RunConfig& config, const Session& session) {
  if (options.preset.empty()) throw_error<ConfigError>("bench step: --preset is missing");
  const std::shared_ptr<comm::World> world = train::join_world(config);
  const train::BenchmarkResult measured =
      train::run_benchmark(benchmark_of(options), config, world);
  if (world) world->leave();
  if (world && world->rank() > 0) return 0;
  const nlohmann::ordered_json result = as_json(options, measured);
  if (options.json) {
    session.out << result.dump() << "\n";
  } else {
    session.out << as_table(result);
  }
  return 0;
}

int run(const BenchOptions& options, const Session& session) {
  std::vector<std::string> overrides = {"model.dtype=bfloat16"};
  overrides.insert(overrides.end(), options.overrides.begin(), options.overrides.end());
  const config::RunConfig config =
      config::parse("", "command line", overrides, config::Completeness::kPartial);
  if (options.work == "step") return run_step(options, config, session);
  const auto launched = comm::read_launch_environment();
  if (launched && launched->world > 1) {
    throw_error<ConfigError>("bench {}: times one device; several ranks are for bench step",
                             options.work);
  }
  const nlohmann::ordered_json result =
      run_operator_bench({options.work,
                          options.preset,
                          {options.batch, options.length, options.median},
                          options.check},
                         config);
  if (options.json) {
    session.out << result.dump() << "\n";
  } else {
    session.out << operator_bench_table(result);
  }
  return 0;
}

}  // namespace

void add_bench_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Time training steps or single operators on random data");
  command->add_option("work", options->work, "What is timed")
      ->required()
      ->type_name("step|gdn|gemm|attention|head|experts");
  command->add_option("overrides", options->overrides, "Configuration, such as train.method=lora")
      ->type_name("[key=value ...]");
  command
      ->add_option("--preset", options->preset,
                   "A named shape (see heddle init --help); gdn without one times published shapes")
      ->type_name("NAME");
  command->add_option("--batch", options->batch, "Sequences of a micro-batch")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--length", options->length, "Tokens of a sequence")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
  command
      ->add_option("--median", options->median,
                   "Lognormal lengths of this median instead (step, attention, gdn)")
      ->check(CLI::NonNegativeNumber)
      ->type_name("TOKENS");
  command
      ->add_option("--micro-batches", options->micro_batches,
                   "Micro-batches of a step on each data rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--steps", options->steps, "Timed steps; the median is shown")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--warmup", options->warmup, "Steps before them")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--profile", options->profile,
                   "Time the kernels of one more step, into profile.txt and profile.json there")
      ->type_name("DIR");
  command->add_flag("--check", options->check, "gdn: also print errors against double");
  command->add_flag("--json", options->json, "One JSON object instead of a table");
  command->footer(
      "model.dtype bfloat16 unless given; step: optimizer and clipping included, several ranks:\n"
      "heddle launch --nproc 2 -- bench step ... parallel.fsdp=2\n"
      "\n"
      "Examples:\n"
      "  heddle bench step --preset qwen3.5-0.8b --batch 8 --length 4096 device=cuda "
      "train.method=lora\n"
      "  heddle bench gdn device=cuda\n"
      "  heddle bench attention --preset qwen3.5-4b --batch 4 --length 8192 --median 1000 "
      "device=cuda");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
