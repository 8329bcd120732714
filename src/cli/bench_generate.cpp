#include "cli/bench_generate.h"

#include <fmt/format.h>

#include <chrono>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "base/rng.h"
#include "base/text.h"
#include "device/device.h"
#include "models/registry.h"
#include "rollout/engine.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Times {
  double first_token_s = 0;  ///< Until every sequence has one.
  double rest_s = 0;         ///< From there to the end.
};

std::vector<std::int32_t> random_prompt(std::int64_t length, std::int64_t vocabulary,
                                        std::uint64_t seed) {
  const CounterRng rng(seed, "bench generate");
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::int32_t>(rng.below(i, static_cast<std::uint64_t>(vocabulary)));
  return tokens;
}

Times generate(rollout::Engine& engine, const GenerateBench& bench, std::int64_t vocabulary) {
  const auto start = Clock::now();
  for (std::int64_t i = 0; i < bench.batch; ++i) {
    const auto seed = static_cast<std::uint64_t>(i);
    rollout::Request request;
    request.prompt = random_prompt(bench.length, vocabulary, seed);
    request.max_new_tokens = bench.new_tokens;
    request.sampling.seed = seed;
    engine.submit(std::move(request));
  }
  Times times;
  std::int64_t begun = 0;
  while (!engine.is_idle()) {
    begun += static_cast<std::int64_t>(engine.step().size());
    if (times.first_token_s == 0 && begun >= bench.batch)
      times.first_token_s = seconds_since(start);
  }
  times.rest_s = seconds_since(start) - times.first_token_s;
  return times;
}

/// Bytes that a step of all sequences reads and writes at least: the weights of every layer and of
/// the head, recurrent states twice, keys and values once, halfway through the new tokens.
double traffic_bytes(models::Model& model, const GenerateBench& bench) {
  double weights = 0, rows = 0;
  model.visit_parameters([&](nn::Parameter& parameter) {
    const bool is_table = &parameter == &model.embedding_weight() && !model.tied();
    if (!is_table) weights += static_cast<double>(parameter.data().nbytes());
  });
  const double length =
      static_cast<double>(bench.length) + static_cast<double>(bench.new_tokens) / 2;
  for (const nn::LayerCache& layer : model.make_cache(1, 1)) {
    for (const at::Tensor& state : {layer.conv, layer.state})
      rows += state.defined() ? 2 * static_cast<double>(state.nbytes()) : 0;
    for (const at::Tensor& token : {layer.keys, layer.values})
      rows += token.defined() ? length * static_cast<double>(token.nbytes()) : 0;
  }
  return weights + static_cast<double>(bench.batch) * rows;
}

}  // namespace

nlohmann::ordered_json run_generate_bench(const GenerateBench& bench,
                                          const config::RunConfig& config) {
  assembly::ModelRecipe recipe = assembly::recipe_of_run(config, models::preset(bench.preset));
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandomOnDevice;
  assembly::ModelOnRanks placed = assembly::place(recipe, assembly::make_context(config, nullptr));
  models::Model& model = *placed.model;
  const std::int64_t vocabulary = model.config().vocab_size;
  rollout::EngineOptions options;
  options.max_sequences = bench.batch;
  options.capacity = bench.length + bench.new_tokens;
  rollout::Engine engine(placed, nullptr, options);
  // The first run records what the second replays.
  generate(engine, bench, vocabulary);
  const Times times = generate(engine, bench, vocabulary);

  const double steps = static_cast<double>(bench.new_tokens - 1);
  const double tokens = static_cast<double>(bench.batch) * steps;
  const double bytes = traffic_bytes(model, bench);
  nlohmann::ordered_json json;
  json["preset"] = bench.preset;
  json["batch"] = bench.batch;
  json["length"] = bench.length;
  json["new_tokens"] = bench.new_tokens;
  json["device"] = device::properties(placed.context.device, 16).name;
  json["steps"] = rollout::RecordedDecoding::why_not(placed).empty()
                      ? "recorded"
                      : "launched: " + rollout::RecordedDecoding::why_not(placed);
  json["first_token_ms"] = times.first_token_s * 1e3;
  json["prompt_tokens_per_s"] =
      static_cast<double>(bench.batch * bench.length) / times.first_token_s;
  json["step_ms"] = times.rest_s / steps * 1e3;
  json["tokens_per_s"] = tokens / times.rest_s;
  json["traffic_gb"] = bytes * 1e-9;
  json["traffic_gb_per_s"] = bytes * 1e-9 / (times.rest_s / steps);
  json["kernels"] = model.kernels().lines();
  return json;
}

std::string generate_bench_table(const nlohmann::ordered_json& result) {
  ui::Table table;
  const auto number = [&](const char* key) { return result[key].get<double>(); };
  const auto word = [&](const char* key) { return result[key].get<std::string>(); };
  table.row({"work",
             fmt::format("{}, {} sequences of {} tokens and {} new ones", word("preset"),
                         result["batch"].get<std::int64_t>(), result["length"].get<std::int64_t>(),
                         result["new_tokens"].get<std::int64_t>())});
  table.row({"device", word("device")});
  table.row({"first token", fmt::format("{:.1f} ms, {:.0f} tokens/s of prompts",
                                        number("first_token_ms"), number("prompt_tokens_per_s"))});
  table.row({"then", fmt::format("{:.2f} ms a step, {:.0f} tokens/s", number("step_ms"),
                                 number("tokens_per_s"))});
  table.row({"steps", word("steps")});
  table.row({"traffic", fmt::format("{:.2f} GB a step at least, {:.0f} GB/s", number("traffic_gb"),
                                    number("traffic_gb_per_s"))});
  table.row({"kernels", text::join(result["kernels"].get<std::vector<std::string>>(), "\n")});
  return table.render(ui::TableStyle::kPlain);
}

}  // namespace heddle::cli
