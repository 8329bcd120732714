#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "base/json.h"
#include "base/text.h"
#include "ckpt/model_directory.h"
#include "ckpt/model_writer.h"
#include "cli/command.h"
#include "cli/option_checks.h"
#include "data/tokenizer/tokenizer.h"
#include "device/device.h"
#include "models/registry.h"
#include "ui/terminal.h"

namespace heddle::cli {
namespace {

using models::Config;

struct InitOptions {
  std::string preset, config, tokenizer, output;
  std::string dtype = "float32";
  std::uint64_t seed = 0;
  bool overwrite = false;
};

/// The configuration and the JSON that is written for it.
std::pair<Config, nlohmann::ordered_json> read_config(const InitOptions& options,
                                                      const data::Tokenizer& tokenizer) {
  if (options.preset.empty() == options.config.empty()) {
    throw_error<ConfigError>("give either --preset NAME or --config FILE; presets: {}",
                             text::join(models::preset_names(), ", "));
  }
  if (!options.config.empty()) {
    nlohmann::ordered_json json = json::read_object<ModelError>(options.config);
    Config config = models::parse_config(json, options.config);
    if (config.nested) {
      throw_error<ModelError>(
          "{}: random weights for a multimodal model ('{}') are not built; give its text_config",
          options.config, config.model_type);
    }
    return {std::move(config), std::move(json)};
  }
  nlohmann::ordered_json json = models::preset_json(options.preset);
  // Rows are cheap at a multiple of 64, and a small preset follows its tokenizer.
  const std::int64_t needed = (tokenizer.vocab_size() + 63) / 64 * 64;
  if (options.preset.rfind("small-", 0) == 0) json["vocab_size"] = needed;
  if (const auto eos = tokenizer.eos_id()) json["eos_token_id"] = *eos;
  if (const auto pad = tokenizer.pad_id()) json["pad_token_id"] = *pad;
  Config config = models::parse_config(json, options.preset);
  return {std::move(config), std::move(json)};
}

int run(const InitOptions& options, const Session& session) {
  const auto companions = ckpt::find_companions(options.tokenizer, ckpt::Companions::kAll);
  const auto tokenizer = data::Tokenizer::load(options.tokenizer);
  auto [config, json] = read_config(options, *tokenizer);
  if (tokenizer->vocab_size() > config.vocab_size) {
    throw_error<ModelError>("the tokenizer has {} ids, the configuration {} embedding rows",
                            tokenizer->vocab_size(), config.vocab_size);
  }
  runtime::Context context;
  device::set_cpu_threads(0);
  context.dtype = runtime::parse_dtype(options.dtype, "--dtype");
  json["dtype"] = runtime::dtype_name(context.dtype);
  context.seed = options.seed;
  assembly::ModelRecipe recipe;
  recipe.config = std::move(config);
  recipe.weights = assembly::Weights::kRandom;
  recipe.purpose = assembly::Purpose::kStore;
  const assembly::ModelOnRanks made = assembly::place(recipe, context);
  ckpt::ModelWriterOptions writer_options;
  writer_options.overwrite = options.overwrite;
  ckpt::ModelWriter writer(options.output, writer_options);
  std::int64_t count = 0;
  made.model->visit_parameters([&](nn::Parameter& parameter) {
    writer.add(parameter.name(), parameter.data(), context.dtype);
    count += parameter.numel();
  });
  writer.set_config(std::move(json));
  writer.copy_companions(companions);
  writer.commit();
  session.out << text::format_count(static_cast<double>(count)) << " parameters: " << options.output
              << "\n";
  return 0;
}

}  // namespace

void add_init_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<InitOptions>();
  CLI::App* command = app.add_subcommand("init", "Make a model directory with random weights");
  command
      ->add_option("--preset", options->preset,
                   fmt::format("A named shape (small-10m, {}, ...)", models::kSmallExample))
      ->type_name("NAME");
  command->add_option("--config", options->config, "Or a config.json of a text model")
      ->type_name("FILE");
  command->add_option("--tokenizer", options->tokenizer, "Folder with tokenizer.json")
      ->required()
      ->type_name("DIR");
  command->add_option("--output", options->output, "The directory to make")
      ->required()
      ->type_name("DIR");
  command->add_option("--seed", options->seed, "Of the weights")
      ->check(seed_of_64_bits())
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "Of the stored weights")->capture_default_str();
  command->add_flag("--overwrite", options->overwrite, "Replace a model directory that is there");
  const std::string presets = text::join(models::preset_names(), ", ");
  command->footer("Presets:\n  " + text::join(ui::wrap(presets, 78), "\n  ") +
                  "\n\n"
                  "Example:\n"
                  "  heddle init --preset small-10m --tokenizer examples/tokenizer-4k --output "
                  "models/small --seed 1");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
