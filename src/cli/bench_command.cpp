#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/text.h"
#include "bench/step_benchmark.h"
#include "cli/bench_generate.h"
#include "cli/bench_operators.h"
#include "cli/command.h"
#include "cli/option_checks.h"
#include "comm/launch_environment.h"
#include "comm/world.h"
#include "config/config.h"
#include "models/registry.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

struct BenchOptions {
  std::string work = "step";
  std::string preset, profile;
  std::int64_t batch = 1, length = 2048, new_tokens = 128, median = 0, micro_batches = 1, steps = 6,
               warmup = 4, layers = 0;
  std::int64_t samples = 1, top_k = 0;
  double top_p = 1;
  std::int64_t sets = 0;
  bool json = false, check = false, launch_by_launch = false;
  std::vector<std::string> heads, layouts, sweep;
  std::vector<std::string> overrides;
  std::vector<std::string> given;  ///< Options of the command line: "--batch".
};

constexpr const char* kWorks = "step|generate|gdn|gemm|lora|attention|head|experts|adamw";

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The benchmarks that take an option; all take those that are not named here.
std::vector<std::string> works_with(const std::string& option) {
  static const std::map<std::string, const char*> kTakenBy = {
      {"--batch", "step|generate|gdn|gemm|lora|attention|head|experts"},
      {"--length", "step|generate|gdn|gemm|lora|attention|head|experts"},
      {"--median", "step|gdn|attention"},
      {"--new-tokens", "generate"},
      {"--sweep", "generate"},
      {"--samples", "generate"},
      {"--sets", "generate"},
      {"--launch-by-launch", "generate"},
      {"--top-k", "generate"},
      {"--top-p", "generate"},
      {"--layers", "step"},
      {"--micro-batches", "step"},
      {"--steps", "step"},
      {"--warmup", "step"},
      {"--profile", "step|generate"},
      {"--heads", "gdn"},
      {"--layout", "gdn"},
      {"--check", "gdn"},
  };
  const auto known = kTakenBy.find(option);
  return text::split(known == kTakenBy.end() ? kWorks : known->second, '|');
}

/// Whether single operators read the key. Nothing else of the configuration reaches them.
bool operator_takes(const std::string& work, const std::string& key) {
  return key == "model.dtype" || key == "train.deterministic" || key == "device" ||
         key.starts_with("device.") || key.starts_with("kernels.") ||
         (work == "lora" && key == "adapter.rank");
}

/// Throws ConfigError for what the chosen benchmark would ignore.
void refuse_what_is_not_taken(const BenchOptions& options) {
  const std::vector<std::string> works = text::split(kWorks, '|');
  if (!contains(works, options.work)) {
    throw_error<ConfigError>("bench: expected {}, found '{}'", text::join(works, ", "),
                             options.work);
  }
  for (const std::string& option : options.given) {
    const std::vector<std::string> takers = works_with(option);
    if (contains(takers, options.work)) continue;
    throw_error<ConfigError>("bench {}: {} is an option of bench {}", options.work, option,
                             text::join(takers, ", "));
  }
  if (options.work == "gdn") {
    // Published heads and layouts are the default; errors are those of one sequence.
    const bool published = options.preset.empty();
    std::vector<std::string> unused = {"--heads", "--layout"};
    if (published) unused = {"--batch", "--median"};
    if (published && !options.check) unused.emplace_back("--length");
    if (options.check) unused.insert(unused.end(), {"--batch", "--median", "--layout"});
    for (const std::string& option : unused) {
      if (!contains(options.given, option)) continue;
      throw_error<ConfigError>("bench gdn: {} has no effect {} --preset{}", option,
                               published ? "without" : "beside",
                               options.check ? " with --check" : "");
    }
  } else if (options.preset.empty()) {
    throw_error<ConfigError>("bench {}: --preset is missing", options.work);
  }
  if (options.work == "step" || options.work == "generate") return;
  for (const std::string& item : options.overrides) {
    const std::string key = item.substr(0, item.find('='));
    if (operator_takes(options.work, key)) continue;
    throw_error<ConfigError>(
        "bench {}: {} has no effect on single operators, only on bench step and bench generate",
        options.work, key);
  }
}

bench::DeltaHeads parse_heads(const std::string& pair) {
  std::int64_t keys = 0, values = 0;
  char sign = 0, rest = 0;
  std::istringstream in(pair);
  if (!(in >> keys >> sign >> values) || sign != '/' || in >> rest || keys < 1 ||
      values % keys != 0 || values < keys) {
    throw_error<ConfigError>(
        "bench gdn: --heads: expected key heads/value heads such as 16/32, "
        "value heads a multiple of key heads, found '{}'",
        pair);
  }
  return {keys, values};
}

bench::Benchmark benchmark_of(const BenchOptions& options) {
  bench::Benchmark benchmark;
  benchmark.preset = options.preset;
  benchmark.layers = options.layers;
  benchmark.tokens = {options.batch, options.length, options.median};
  benchmark.micro_batches = options.micro_batches;
  benchmark.steps = options.steps;
  benchmark.warmup = options.warmup;
  benchmark.profile = options.profile;
  return benchmark;
}

nlohmann::ordered_json as_json(const BenchOptions& options, const bench::BenchmarkResult& result) {
  nlohmann::ordered_json json;
  json["preset"] = options.preset;
  if (options.layers > 0) json["layers"] = options.layers;
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
  table.row(
      {"work",
       fmt::format(
           "{}{}, {} x {} x {} tokens{}, {}", result["preset"].get<std::string>(),
           result.contains("layers")
               ? fmt::format(", first {} layers", result["layers"].get<std::int64_t>())
               : "",
           result["micro_batches"].get<std::int64_t>(), result["batch"].get<std::int64_t>(),
           result["length"].get<std::int64_t>(),
           result["median"].get<std::int64_t>() > 0
               ? fmt::format(" in sequences of median {}", result["median"].get<std::int64_t>())
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

/// Facts that decide which collectives a rank takes part in, besides the configuration.
std::vector<comm::Fact> facts_of(const BenchOptions& options) {
  return {{"--preset", options.preset},
          {"--layers", std::to_string(options.layers)},
          {"--batch", std::to_string(options.batch)},
          {"--length", std::to_string(options.length)},
          {"--median", std::to_string(options.median)},
          {"--micro-batches", std::to_string(options.micro_batches)},
          {"--steps", std::to_string(options.steps)},
          {"--warmup", std::to_string(options.warmup)},
          {"--profile", options.profile.empty() ? "not given" : "given"}};
}

bench::BenchmarkResult benchmark_as_rank(const BenchOptions& options,
                                         const config::RunConfig& config,
                                         const std::shared_ptr<comm::World>& world) {
  try {
    return bench::run_benchmark(benchmark_of(options), config, world);
  } catch (const std::exception& error) {
    // The others wait for this rank: what they report is its message.
    if (world) world->fail(error.what());
    throw;
  }
}

int run_step(const BenchOptions& options, const config::RunConfig& config, const Session& session) {
  const std::shared_ptr<comm::World> world =
      assembly::join_world(config, "bench " + options.work, facts_of(options));
  const bench::BenchmarkResult measured = benchmark_as_rank(options, config, world);
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
  refuse_what_is_not_taken(options);
  std::vector<std::string> overrides = {"model.dtype=bfloat16"};
  overrides.insert(overrides.end(), options.overrides.begin(), options.overrides.end());
  const config::RunConfig config = config::parse(
      "", "command line", overrides, config::Completeness::kPartial, assembly::usual_device());
  if (options.work == "step") return run_step(options, config, session);
  const auto launched = comm::read_launch_environment();
  if (launched && launched->world > 1) {
    throw_error<ConfigError>("bench {}: times one device; several ranks are for bench step",
                             options.work);
  }
  if (options.work == "generate") {
    GenerateBench bench;
    bench.preset = options.preset;
    bench.samples = options.samples;
    bench.top_k = options.top_k;
    bench.top_p = options.top_p;
    bench.sets = options.sets;
    bench.records = !options.launch_by_launch;
    bench.profile = options.profile;
    for (const std::string& point : options.sweep) bench.points.push_back(parse_point(point));
    if (bench.points.empty())
      bench.points.push_back({options.batch, options.length, options.new_tokens});
    const nlohmann::ordered_json result = run_generate_bench(bench, config);
    session.out << (options.json ? result.dump() + "\n" : generate_bench_table(result));
    return 0;
  }
  bench::DeltaSelection published{{}, options.layouts};
  for (const std::string& pair : options.heads) published.heads.push_back(parse_heads(pair));
  const nlohmann::ordered_json result =
      run_operator_bench({options.work,
                          options.preset,
                          published,
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
  CLI::App* command = app.add_subcommand(
      "bench", "Time training steps, generation or single operators on random data");
  command->add_option("work", options->work, "What is timed")->required()->type_name(kWorks);
  command->add_option("overrides", options->overrides, "Configuration, such as train.method=lora")
      ->type_name("[key=value ...]");
  command
      ->add_option("--preset", options->preset,
                   "A named shape (see heddle init --help); gdn without one: published shapes")
      ->type_name("NAME");
  command->add_option("--layers", options->layers, "step: so many layers of the shape alone")
      ->check(above_zero());
  command->add_option("--batch", options->batch, "Sequences of a micro-batch")
      ->check(above_zero())
      ->capture_default_str();
  command->add_option("--length", options->length, "Tokens of a sequence")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
  command->add_option("--new-tokens", options->new_tokens, "generate: tokens drawn a sequence")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--sweep", options->sweep,
                   "generate: several points instead, batch x length x new tokens each")
      ->type_name("64x1024x128,...")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--samples", options->samples, "generate: sequences that share a prompt")
      ->check(above_zero())
      ->capture_default_str();
  command
      ->add_option("--sets", options->sets,
                   "generate: sets of adapters that the sequences have in turn")
      ->check(above_zero());
  command->add_flag("--launch-by-launch", options->launch_by_launch,
                    "generate: no steps recorded as graphs");
  command->add_option("--top-k", options->top_k, "generate: draw from the most likely tokens")
      ->check(not_below_zero());
  command
      ->add_option("--top-p", options->top_p, "generate: draw from the smallest set of this mass")
      ->check(CLI::Range(1e-6, 1.0));
  command
      ->add_option("--median", options->median,
                   "Lognormal lengths of this median instead (step, attention, gdn)")
      ->check(not_below_zero())
      ->type_name("TOKENS");
  command
      ->add_option("--micro-batches", options->micro_batches,
                   "Micro-batches of a step on each data rank")
      ->check(above_zero())
      ->capture_default_str();
  command->add_option("--steps", options->steps, "Timed steps; the median is shown")
      ->check(above_zero())
      ->capture_default_str();
  command->add_option("--warmup", options->warmup, "Steps before them")
      ->check(not_below_zero())
      ->capture_default_str();
  command
      ->add_option("--profile", options->profile,
                   "Time the kernels of one more step, generate: of eight, into profile.txt and "
                   "profile.json there")
      ->type_name("DIR");
  command
      ->add_option("--heads", options->heads,
                   "gdn: only these published heads, key/value; may be repeated")
      ->type_name("16/32")
      ->allow_extra_args(false);
  command
      ->add_option("--layout", options->layouts,
                   "gdn: only sequences of these published lengths; may be repeated")
      ->type_name("28672+4096")
      ->allow_extra_args(false);
  command->add_flag("--check", options->check,
                    "gdn: errors of one sequence of --length tokens against double, no times");
  command->add_flag("--json", options->json, "One JSON object instead of a table");
  command->footer(fmt::format(
      "model.dtype bfloat16 unless given; step: optimizer and clipping included, several ranks:\n"
      "heddle launch --nproc 2 -- bench step ... parallel.fsdp=2\n"
      "\n"
      "Examples:\n"
      "  heddle bench step --preset {0} --batch 8 --length 4096 device=cuda "
      "train.method=lora\n"
      "  heddle bench generate --preset {0} --batch 64 --length 128 device=cuda\n"
      "  heddle bench gdn --heads 16/32 --layout 28672+4096 device=cuda",
      models::kSmallExample));
  command->callback([options, command, &action] {
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() > 0 && !option->get_positional())
        options->given.push_back(option->get_name());
    }
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
