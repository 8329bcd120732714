#include "cli/bench_generate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <set>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/rng.h"
#include "base/text.h"
#include "ckpt/hf_adapter.h"
#include "device/device.h"
#include "models/registry.h"
#include "rollout/adapter_slots.h"
#include "rollout/engine.h"
#include "rollout/pool_size.h"
#include "train/step_profile.h"
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
  std::int64_t rest_tokens = 0, rest_steps = 0;
};

std::vector<std::int32_t> random_prompt(std::int64_t length, std::int64_t vocabulary,
                                        std::uint64_t seed) {
  const CounterRng rng(seed, "bench generate");
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::int32_t>(rng.below(i, static_cast<std::uint64_t>(vocabulary)));
  return tokens;
}

using Adapters = std::vector<std::shared_ptr<const rollout::Adapter>>;

/// Copies of the model's adapters.
Adapters adapters_of(assembly::ModelOnRanks& placed, std::int64_t count) {
  Adapters all;
  if (count == 0) return all;
  if (placed.adapters == nullptr)
    throw ConfigError("--sets: the model has no adapters; give train.method=lora");
  std::vector<adapters::LoraSet::Module> modules;
  for (const auto& lora : placed.adapters->adapters())
    modules.push_back({lora->module(), lora->rank(), lora->scaling()});
  for (std::int64_t i = 0; i < count; ++i) {
    auto set = std::make_shared<adapters::LoraSet>(ckpt::adaptable(*placed.model), modules,
                                                   placed.adapters->options(), placed.context);
    rollout::copy_factors(*placed.adapters, *set);
    all.push_back(std::make_shared<const rollout::Adapter>(
        rollout::Adapter{std::to_string(i), 0, std::move(set)}));
  }
  return all;
}

void submit(rollout::Engine& engine, const GenerateBench& bench, const GeneratePoint& point,
            const Adapters& adapters, std::int64_t vocabulary) {
  for (std::int64_t i = 0; i < point.batch; i += bench.samples) {
    const auto seed = static_cast<std::uint64_t>(i);
    rollout::Request request;
    request.prompt = random_prompt(point.length, vocabulary, seed);
    request.max_new_tokens = point.new_tokens;
    request.samples = std::min(bench.samples, point.batch - i);
    request.sampling.seed = seed;
    request.sampling.top_k = bench.top_k;
    request.sampling.top_p = bench.top_p;
    if (!adapters.empty())
      request.adapter = adapters[static_cast<std::size_t>(i) % adapters.size()];
    engine.submit(std::move(request));
  }
}

Times generate(rollout::Engine& engine, const GenerateBench& bench, const GeneratePoint& point,
               const Adapters& adapters, std::int64_t vocabulary) {
  const auto start = Clock::now();
  submit(engine, bench, point, adapters, vocabulary);
  Times times;
  std::set<rollout::RequestId> begun;
  while (!engine.is_idle()) {
    const std::vector<rollout::Progress> progress = engine.step();
    if (times.first_token_s > 0) {
      times.rest_tokens += static_cast<std::int64_t>(progress.size());
      ++times.rest_steps;
      continue;
    }
    for (const rollout::Progress& one : progress) begun.insert(one.id);
    if (static_cast<std::int64_t>(begun.size()) >= point.batch)
      times.first_token_s = seconds_since(start);
  }
  times.rest_s = seconds_since(start) - times.first_token_s;
  return times;
}

/// Times the kernels of some steps that continue all sequences.
void profile(rollout::Engine& engine, const GenerateBench& bench, const GeneratePoint& point,
             const Adapters& adapters, const assembly::ModelOnRanks& placed) {
  constexpr int kSteps = 8;
  submit(engine, bench, point, adapters, placed.model->config().vocab_size);
  std::set<rollout::RequestId> begun;
  while (!engine.is_idle() && static_cast<std::int64_t>(begun.size()) < point.batch) {
    for (const rollout::Progress& one : engine.step()) begun.insert(one.id);
  }
  files::make_writable_directory(bench.profile);
  train::StepProfile watched(placed.context.device);
  for (int i = 0; i < kSteps && !engine.is_idle(); ++i) engine.step();
  watched.finish(bench.profile);
}

/// Bytes that a step of all sequences reads and writes at least: the weights of every layer and of
/// the head, recurrent states twice, keys and values once, halfway through the new tokens. Of
/// routed experts those that somebody chooses, on average, if all are chosen equally often.
double traffic_bytes(models::Model& model, const GeneratePoint& point,
                     rollout::StateDtype state_dtype) {
  double weights = 0, rows = 0, chosen = 1;
  if (const nn::MoeDims* const moe = model.config().moe()) {
    const double share =
        static_cast<double>(moe->num_experts_per_tok) / static_cast<double>(moe->num_experts);
    chosen = 1 - std::pow(1 - share, static_cast<double>(point.batch));
  }
  model.visit_parameters([&](nn::Parameter& parameter) {
    const bool is_table = &parameter == &model.embedding_weight() && !model.tied();
    const double share = is_table ? 0 : parameter.is_expert() ? chosen : 1;
    weights += share * static_cast<double>(parameter.data().nbytes());
  });
  const double length =
      static_cast<double>(point.length) + static_cast<double>(point.new_tokens) / 2;
  for (const nn::LayerCache& layer : model.make_cache(
           {.slots = 1, .pages = 1, .page_tokens = 1, .state_dtype = stored_as(state_dtype)})) {
    for (const at::Tensor& state : {layer.conv, layer.state})
      rows += state.defined() ? 2 * static_cast<double>(state.nbytes()) : 0;
    for (const at::Tensor& token : {layer.keys, layer.values})
      rows += token.defined() ? length * static_cast<double>(token.nbytes()) : 0;
  }
  return weights + static_cast<double>(point.batch) * rows;
}

/// Bytes that copies read and write in a second: what no step reaches.
double copy_rate(c10::Device device) {
  const std::int64_t bytes = std::int64_t{1} << (device.is_cuda() ? 30 : 26);
  constexpr int kCopies = 5;
  at::Tensor from = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  from.random_();  // zeros are copied faster than other numbers
  const at::Tensor to = at::zeros_like(from);
  const auto wait = [&] { (void)to.narrow(0, 0, 1).cpu(); };
  to.copy_(from);
  wait();
  const auto start = Clock::now();
  for (int i = 0; i < kCopies; ++i) to.copy_(from);
  wait();
  return 2.0 * kCopies * static_cast<double>(bytes) / seconds_since(start);
}

nlohmann::ordered_json measure(assembly::ModelOnRanks& placed, const GenerateBench& bench,
                               const GeneratePoint& point, const Adapters& adapters,
                               const config::RolloutSection& rollout, double ceiling) {
  models::Model& model = *placed.model;
  const std::int64_t vocabulary = model.config().vocab_size;
  rollout::EngineOptions options;
  options.max_sequences = point.batch;
  options.capacity = point.length + point.new_tokens;
  options.record_steps = bench.records;
  options.merge_adapter = rollout.merge_adapter;
  options.caches = rollout.caches;
  rollout::Engine engine(placed, nullptr, options);
  // The first run records what the second replays.
  generate(engine, bench, point, adapters, vocabulary);
  const Times times = generate(engine, bench, point, adapters, vocabulary);

  if (!bench.profile.empty() && &point == &bench.points.back())
    profile(engine, bench, point, adapters, placed);

  const auto steps = static_cast<double>(times.rest_steps),
             tokens = static_cast<double>(times.rest_tokens);
  const double bytes = traffic_bytes(model, point, rollout.caches.state_dtype),
               rate = bytes / (times.rest_s / steps);
  nlohmann::ordered_json json;
  json["batch"] = point.batch;
  json["length"] = point.length;
  json["new_tokens"] = point.new_tokens;
  json["samples"] = bench.samples;
  json["first_token_ms"] = times.first_token_s * 1e3;
  json["prompt_tokens_per_s"] =
      static_cast<double>(point.batch * point.length) / times.first_token_s;
  json["step_ms"] = times.rest_s / steps * 1e3;
  json["tokens_per_s"] = tokens / times.rest_s;
  json["traffic_gb"] = bytes * 1e-9;
  json["traffic_gb_per_s"] = rate * 1e-9;
  json["share_of_copy"] = rate / ceiling;
  return json;
}

}  // namespace

GeneratePoint parse_point(const std::string& text) {
  const std::vector<std::string> parts = text::split(text, 'x');
  std::vector<std::int64_t> numbers;
  for (const std::string& part : parts) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    if (error == std::errc() && end == part.data() + part.size()) numbers.push_back(number);
  }
  if (numbers.size() != 3 || parts.size() != 3 || numbers[0] < 1 || numbers[1] < 1 ||
      numbers[2] < 2) {
    throw_error<ConfigError>(
        "--sweep: '{}' is no point: expected BATCHxLENGTHxNEW, such as 64x1024x128, with 2 new "
        "tokens or more",
        text);
  }
  return {numbers[0], numbers[1], numbers[2]};
}

nlohmann::ordered_json run_generate_bench(const GenerateBench& bench,
                                          const config::RunConfig& config) {
  assembly::ModelRecipe recipe = assembly::recipe_of_run(config, models::preset(bench.preset));
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandomOnDevice;
  assembly::ModelOnRanks placed = assembly::place(recipe, assembly::make_context(config, nullptr));
  const std::string obstacle =
      rollout::RecordedDecoding::why_not(placed, config.rollout.gather_weights);
  const double ceiling = copy_rate(placed.context.device);
  nlohmann::ordered_json json;
  json["preset"] = bench.preset;
  json["device"] = device::properties(placed.context.device).name;
  const bool merges = config.rollout.merge_adapter;
  if (merges && bench.sets > 0)
    throw ConfigError("--sets: rollout.merge_adapter has one set, in the matrices");
  json["adapters"] = placed.adapters != nullptr;
  json["merged"] = merges;
  json["sets"] = bench.sets;
  json["state_dtype"] = to_string(config.rollout.caches.state_dtype);
  json["steps"] = !bench.records     ? "launched one by one, as asked"
                  : obstacle.empty() ? "recorded"
                                     : "launched: " + obstacle;
  json["copy_gb_per_s"] = ceiling * 1e-9;
  json["points"] = nlohmann::ordered_json::array();
  const Adapters adapters = adapters_of(placed, bench.sets);
  for (const GeneratePoint& point : bench.points)
    json["points"].push_back(measure(placed, bench, point, adapters, config.rollout, ceiling));
  json["kernels"] = placed.model->kernels().lines();
  return json;
}

std::string generate_bench_table(const nlohmann::ordered_json& result) {
  ui::Table about;
  const auto word = [&](const char* key) { return result[key].get<std::string>(); };
  const auto sets = result["sets"].get<std::int64_t>();
  about.row({"model", word("preset") + (sets > 0 ? fmt::format(", with {} sets of adapters", sets)
                                        : result["merged"].get<bool>()   ? ", with a merged adapter"
                                        : result["adapters"].get<bool>() ? ", with adapters"
                                                                         : "")});
  about.row({"device", fmt::format("{}, a copy {:.0f} GB/s", word("device"),
                                   result["copy_gb_per_s"].get<double>())});
  about.row({"states", word("state_dtype")});
  about.row({"steps", word("steps")});
  about.row({"kernels", text::join(result["kernels"].get<std::vector<std::string>>(), "\n")});
  ui::Table table;
  table.row({"sequences", "prompt", "new", "first token", "prompts", "a step", "new tokens",
             "must move", "of a copy"});
  for (const nlohmann::ordered_json& point : result["points"]) {
    const auto count = [&](const char* key) {
      return std::to_string(point[key].get<std::int64_t>());
    };
    const auto number = [&](const char* key) { return point[key].get<double>(); };
    const std::int64_t samples = point["samples"].get<std::int64_t>();
    table.row(
        {samples > 1 ? fmt::format("{}, {} a prompt", count("batch"), samples) : count("batch"),
         count("length"), count("new_tokens"), fmt::format("{:.1f} ms", number("first_token_ms")),
         fmt::format("{:.0f} tokens/s", number("prompt_tokens_per_s")),
         fmt::format("{:.2f} ms", number("step_ms")),
         fmt::format("{:.0f} tokens/s", number("tokens_per_s")),
         fmt::format("{:.2f} GB", number("traffic_gb")),
         fmt::format("{:.0f} %", 100 * number("share_of_copy"))});
  }
  return about.render(ui::TableStyle::kPlain) + "\n" + table.render(ui::TableStyle::kPlain);
}

}  // namespace heddle::cli
