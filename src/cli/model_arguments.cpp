#include "cli/model_arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <optional>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/file_hash.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/model_directory.h"
#include "cli/names.h"
#include "comm/launch_environment.h"
#include "comm/refusal.h"
#include "config/config.h"
#include "device/device.h"
#include "device/require.h"

namespace heddle::cli {

void add_model_arguments(CLI::App& command, ModelArguments& arguments) {
  command.add_option("model_dir", arguments.directory, "A Hugging Face model directory")
      ->required()
      ->type_name("MODEL_DIR");
  command.add_option("--adapter", arguments.adapter, "A PEFT adapter directory to put on it")
      ->type_name("DIR");
  command.add_option("--dtype", arguments.dtype,
                     "float32, bfloat16 or float64; default float32 on the CPU, else bfloat16");
  command.add_option("--device", arguments.device,
                     "cpu, cuda[:N] or npu[:N]; default the first accelerator, else cpu");
  command.add_option("--threads", arguments.threads,
                     "CPU threads; 0: the cores this process may use");
}

runtime::Context context_of(const ModelArguments& arguments) {
  runtime::Context context;
  device::set_cpu_threads(arguments.threads);
  context.device = device::parse(
      arguments.device.empty() ? config::to_string(assembly::usual_device()) : arguments.device);
  const std::string usual = context.device.is_cpu() ? "float32" : "bfloat16";
  context.dtype =
      runtime::parse_dtype(arguments.dtype.empty() ? usual : arguments.dtype, "--dtype");
  device::start(context.device);
  device::require_dtype(context.device, context.dtype, "--dtype");
  return context;
}

void add_layout_argument(CLI::App& command, ModelArguments& arguments) {
  command
      .add_option("layout", arguments.layout,
                  "How several ranks divide the model; kernels.*=... as in a configuration")
      ->type_name("[parallel.*=N ...]");
}

void add_kernel_argument(CLI::App& command, ModelArguments& arguments) {
  command
      .add_option("kernels", arguments.layout,
                  "Kernels, as in a configuration: kernels.fallback=allow")
      ->type_name("[kernels.*=NAME ...]");
}

namespace {

constexpr std::array kCacheKeys = {"rollout.state_dtype=", "rollout.kv_page=",
                                   "rollout.memory_fraction=", "rollout.graph_batches="};

/// How the ranks divide the model, and by which kernels it runs.
config::RunConfig layout_of(const ModelArguments& arguments) {
  std::vector<std::string> settings = {"device.threads=" + std::to_string(arguments.threads)};
  if (!arguments.device.empty()) settings.push_back("device.name=" + arguments.device);
  if (!arguments.dtype.empty()) settings.push_back("model.dtype=" + arguments.dtype);
  for (const std::string& setting : arguments.layout) {
    const bool is_of_caches =
        std::ranges::any_of(kCacheKeys, [&](const char* key) { return setting.starts_with(key); });
    if (!setting.starts_with("parallel.") && !setting.starts_with("kernels.") &&
        !(is_of_caches && arguments.takes_caches)) {
      throw_error<ConfigError>(
          "'{}': of a configuration, parallel.*{} kernels.* alone can be set here", setting,
          arguments.takes_caches ? ", rollout.state_dtype, kv_page, memory_fraction, "
                                   "graph_batches and"
                                 : " and");
    }
    settings.push_back(setting);
  }
  return config::parse("", "command line", settings, config::Completeness::kPartial,
                       assembly::usual_device());
}

}  // namespace

rollout::CacheOptions caches_of(const ModelArguments& arguments) {
  return layout_of(arguments).rollout.caches;
}

namespace {

bool is_classifier_directory(const std::string& directory) {
  const ckpt::Path file = find_model(directory) / "config.json";
  if (!std::filesystem::exists(file)) return false;
  const auto config = ckpt::read_json_object(file);
  const auto found = config.find("architectures");
  return found != config.end() && found->is_array() &&
         std::any_of(found->begin(), found->end(), [](const auto& name) {
           return name.is_string() &&
                  name.template get<std::string>().ends_with("ForSequenceClassification");
         });
}

/// The head that an adapter was trained with, by PEFT's task_type and the head that lies in it;
/// empty: that of its base model.
std::string head_of_adapter(const std::string& adapter) {
  const ckpt::AdapterDirectory directory = ckpt::AdapterDirectory::open(find_model(adapter));
  if (directory.config().task_type == "SEQ_CLS" || ckpt::label_rows(directory) > 0)
    return "classify";
  return directory.config().task_type == "FEATURE_EXTRACTION" ? "embed" : "";
}

}  // namespace

std::string head_name(const std::string& directory, const std::string& adapter,
                      const std::string& asked) {
  const std::string of_adapter = adapter.empty() ? "" : head_of_adapter(adapter);
  const bool is_classifier = of_adapter == "classify" || is_classifier_directory(directory);
  if (is_classifier && asked == "lm") {
    throw_error<ConfigError>(
        "{} is a classifier: it has no language-model head; use score --head classify",
        of_adapter.empty() ? directory : adapter);
  }
  if (!asked.empty()) return asked;
  if (!of_adapter.empty()) return of_adapter;
  return is_classifier ? "classify" : "lm";
}

std::shared_ptr<const data::Tokenizer> load_tokenizer(const ModelArguments& arguments,
                                                      const assembly::ModelOnRanks& model) {
  return data::Tokenizer::load_if_there(tokenizer_directory(arguments),
                                        model.model->config().vocab_size);
}

std::string input_file(const std::string& argument) {
  return argument == "-" ? "/dev/stdin" : argument;
}

comm::Fact input_fact(const std::string& path) {
  if (std::filesystem::is_regular_file(path))
    return comm::content_fact("--input", hash::of_file(path), path);
  return {"--input", "not there", path + " (not there)"};
}

std::shared_ptr<comm::World> join_others(const std::string& command,
                                         const ModelArguments& arguments,
                                         const std::vector<comm::Fact>& facts) {
  const auto launched = comm::read_launch_environment();
  if (!launched || launched->world == 1) return nullptr;
  const config::RunConfig layout = comm::before_joining([&] { return layout_of(arguments); });
  std::vector<comm::Fact> all = facts;
  all.push_back({"--adapter", arguments.adapter.empty() ? "not given" : "given"});
  return assembly::join_world(layout, command, all);
}

assembly::ModelOnRanks load(const ModelArguments& arguments, assembly::Head head,
                            assembly::Purpose purpose, const std::shared_ptr<comm::World>& world) {
  const bool has_settings = world || !arguments.layout.empty();
  const auto layout = has_settings ? std::optional(layout_of(arguments)) : std::nullopt;
  const runtime::Context context =
      layout ? assembly::make_context(*layout, world) : context_of(arguments);
  assembly::ModelRecipe recipe = assembly::recipe_of_directory(
      find_model(arguments.directory), find_model(arguments.adapter), head, purpose);
  if (layout) {
    recipe.context_method = layout->parallel.cp_method;
    recipe.kernels = assembly::kernel_policy(*layout);
  }
  return assembly::place(recipe, context);
}

std::filesystem::path tokenizer_directory(const ModelArguments& arguments) {
  const std::filesystem::path adapter = find_model(arguments.adapter);
  return !adapter.empty() && std::filesystem::exists(adapter / "tokenizer.json")
             ? adapter
             : find_model(arguments.directory);
}

}  // namespace heddle::cli
