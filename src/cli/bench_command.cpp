#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "base/errors.h"
#include "base/files.h"
#include "base/rng.h"
#include "base/text.h"
#include "cli/command.h"
#include "config/config.h"
#include "device/device.h"
#include "models/qwen3_5/flops.h"
#include "ops/autograd.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"
#include "train/setup.h"
#include "train/step_profile.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

using models::qwen3_5::Model;

struct BenchOptions {
  std::string work = "step";
  std::string preset, profile;
  std::int64_t batch = 1, length = 2048, steps = 6, warmup = 4;
  bool json = false;
  std::vector<std::string> overrides;
};

/// Random weights made on the device: no rate depends on their values, and a model of billions of
/// parameters takes minutes on the host.
void fill_on_device(Model& model, double std) {
  const ops::NoGradient guard;
  model.visit_parameters([&](nn::Parameter& parameter) {
    at::Tensor data = parameter.data();
    const std::string& name = parameter.name();
    if (name.ends_with(".A_log")) {
      data.uniform_(0.01, 16).log_();
    } else if (name.ends_with(".dt_bias") || name.ends_with("linear_attn.norm.weight")) {
      data.fill_(1);
    } else if (data.dim() == 1) {
      data.zero_();
    } else {
      data.normal_(0, std);
    }
  });
}

/// `count` sequences of `length` random tokens, all but the last position of each in the loss.
data::Batch random_batch(std::int64_t count, std::int64_t length, std::int64_t vocabulary,
                         std::uint64_t step) {
  const CounterRng rng(step, "bench/tokens");
  const auto size = static_cast<std::size_t>(length);
  std::vector<std::vector<std::int32_t>> tokens(static_cast<std::size_t>(count)), labels;
  std::vector<float> weights(size, 1);
  weights.back() = 0;
  std::uint64_t index = 0;
  for (std::vector<std::int32_t>& row : tokens) {
    for (std::size_t t = 0; t < size; ++t)
      row.push_back(
          static_cast<std::int32_t>(rng.below(index++, static_cast<std::uint64_t>(vocabulary))));
    labels.emplace_back(row.begin() + 1, row.end());
    labels.back().push_back(static_cast<std::int32_t>(data::kIgnoredLabel));
  }
  std::vector<data::SequenceView> views;
  for (std::size_t i = 0; i < tokens.size(); ++i)
    views.push_back({tokens[i], labels[i], weights, static_cast<std::int64_t>(i), 0});
  return data::Batch::from_sequences(views);
}

/// A model with its optimizer, as a run has them, but without files.
struct Bench {
  config::RunConfig config;
  runtime::Context context;
  std::unique_ptr<Model> model;
  std::unique_ptr<adapters::LoraSet> adapters;
  std::vector<nn::Parameter*> trainable;
  std::optional<train::Optimizer> optimizer;
  std::optional<parallel::Pipeline> pipeline;

  Bench(const config::RunConfig& given, const std::string& preset)
      : config(given), context(train::make_context(given)) {
    models::qwen3_5::ModelOptions options;
    options.kernel_policy = train::kernel_policy(config, context.device);
    model = std::make_unique<Model>(models::qwen3_5::preset(preset), "model.", context, options);
    model->allocate();
    fill_on_device(*model, model->config().initializer_range);
    const bool lora = config.train.method == config::Method::kLora;
    for (nn::Parameter* parameter : model->parameters()) {
      parameter->set_trainable(!lora);
      if (!lora) trainable.push_back(parameter);
    }
    if (lora) {
      adapters = train::make_adapters(config, *model);
      adapters->initialize();
      adapters->visit_parameters([&](nn::Parameter& p) { trainable.push_back(&p); });
    }
    optimizer.emplace(trainable, config.optim, config.train.seed);
    pipeline.emplace(train::block_entries(*model), !lora,
                     train::recompute_of(config.train.recompute));
  }

  /// One optimizer step over one micro-batch; returns the mean loss.
  double step(const data::Batch& batch) {
    const train::MicroBatchLoss loss = train::run_micro_batches(
        *model, adapters.get(), *pipeline, trainable, {&batch, 1},
        {train::training_head(*model, 1 / batch.loss_weight_sum)},
        {.auxiliary_scale = 0,
         .pooled_auxiliary_loss = false,
         .recompute_elementwise = config.train.recompute != config::Recompute::kOff});
    const double norm = optimizer->gradient_norm();
    const double clip = config.optim.clip_norm;
    const double multiplier = clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1;
    optimizer->step(model->kernels(), config.optim.lr, multiplier);
    return loss.loss_sum.item<double>() / batch.loss_weight_sum;
  }
};

nlohmann::ordered_json measure(const BenchOptions& options, const config::RunConfig& config) {
  Bench bench(config, options.preset);
  std::vector<data::Batch> batches;
  const std::int64_t total = options.warmup + options.steps;
  for (std::int64_t i = 0; i <= total; ++i)
    batches.push_back(random_batch(options.batch, options.length, bench.model->config().vocab_size,
                                   static_cast<std::uint64_t>(i)));
  std::vector<double> seconds;
  double first_loss = 0, last_loss = 0;
  for (std::int64_t i = 0; i < total; ++i) {
    device::synchronize(bench.context.device);
    const auto start = std::chrono::steady_clock::now();
    last_loss = bench.step(batches[static_cast<std::size_t>(i)]);
    device::synchronize(bench.context.device);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (i == 0) first_loss = last_loss;
    if (i >= options.warmup) seconds.push_back(spent.count());
  }
  if (!options.profile.empty()) {
    files::make_writable_directory(options.profile);
    train::StepProfile profile(bench.context.device);
    bench.step(batches.back());
    profile.finish(options.profile);
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double rate = static_cast<double>(options.batch * options.length) / median;
  const int bits = static_cast<int>(8 * c10::elementSize(bench.context.dtype));
  const auto properties = device::properties(bench.context.device, bits);
  const double flops = models::qwen3_5::training_flops_per_token(
      bench.model->config(), static_cast<double>(options.length), bench.adapters ? 2.0 / 3 : 1);
  nlohmann::ordered_json result;
  result["preset"] = options.preset;
  result["batch"] = options.batch;
  result["length"] = options.length;
  result["overrides"] = options.overrides;
  result["device"] = properties.name;
  result["tokens_per_s"] = rate;
  result["step_ms"] = median * 1e3;
  result["step_ms_min"] = seconds.front() * 1e3;
  result["step_ms_max"] = seconds.back() * 1e3;
  result["tflops"] = flops * rate * 1e-12;
  result["peak_gib"] =
      static_cast<double>(device::memory(bench.context.device).peak_bytes) / (1u << 30);
  result["loss"] = {first_loss, last_loss};
  result["kernels"] = bench.model->kernels().lines();
  return result;
}

std::string as_table(const nlohmann::ordered_json& result) {
  ui::Table table;
  const auto number = [&](const char* key) { return result[key].get<double>(); };
  table.row({"work",
             fmt::format("{}, {} x {} tokens, {}", result["preset"].get<std::string>(),
                         result["batch"].get<std::int64_t>(), result["length"].get<std::int64_t>(),
                         text::join(result["overrides"].get<std::vector<std::string>>(), " "))});
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

int run(const BenchOptions& options, const Session& session) {
  if (options.work != "step")
    throw_error<ConfigError>("bench: expected step, found '{}'", options.work);
  std::vector<std::string> overrides = {"model.dtype=bfloat16"};
  overrides.insert(overrides.end(), options.overrides.begin(), options.overrides.end());
  const config::RunConfig config =
      config::parse("", "command line", overrides, config::Completeness::kPartial);
  const nlohmann::ordered_json result = measure(options, config);
  if (options.json) {
    session.out << result.dump() << "\n";
  } else {
    session.out << as_table(result);
  }
  return 0;
}

}  // namespace

void add_bench_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Time training steps on random weights and tokens");
  command->add_option("work", options->work, "What is timed")->required()->type_name("step");
  command->add_option("overrides", options->overrides, "Configuration, such as train.method=lora")
      ->type_name("[key=value ...]");
  command->add_option("--preset", options->preset, "A named shape (see heddle init --help)")
      ->required()
      ->type_name("NAME");
  command->add_option("--batch", options->batch, "Sequences of a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--length", options->length, "Tokens of a sequence")
      ->check(CLI::Range(2, 1 << 24))
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
  command->add_flag("--json", options->json, "One JSON object instead of a table");
  command->footer(
      "One micro-batch a step, model.dtype bfloat16 unless given, optimizer and clipping "
      "included.\n"
      "\n"
      "Example:\n"
      "  heddle bench step --preset qwen3.5-0.8b --batch 8 --length 4096 device=cuda "
      "train.method=lora");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
