#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <optional>
#include <ostream>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/log.h"
#include "base/output_file.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/option_checks.h"
#include "cli/sampling_defaults.h"
#include "cli/template_arguments.h"
#include "comm/refusal.h"
#include "data/json/json_text.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "rollout/answers.h"
#include "rollout/engine.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateOptions {
  ModelArguments model;
  std::string prompt, input, output;
  std::int64_t max_new_tokens = 128;
  SamplingArguments sampling;
  std::vector<std::string> stop, template_arguments;
  bool ignore_eos = false;
  bool raw = false;
  bool continue_final_message = false;
  rollout::EngineOptions engine;
};

/// Facts that the ranks must have alike besides model and layout.
std::vector<comm::Fact> facts_of(const GenerateOptions& options) {
  const SamplingArguments& sampling = options.sampling;
  const auto shown = [](const auto& value) {
    return value ? fmt::format("{}", *value) : std::string("not given");
  };
  return {
      options.input.empty() ? comm::Fact{"--prompt", options.prompt} : input_fact(options.input),
      {"--raw", options.raw ? "given" : "not given"},
      {"--max-new-tokens", std::to_string(options.max_new_tokens)},
      {"--temperature", shown(sampling.temperature)},
      {"--top-p", shown(sampling.top_p)},
      {"--min-p", shown(sampling.min_p)},
      {"--top-k", shown(sampling.top_k)},
      {"--seed", std::to_string(sampling.seed)},
      {"--stop", nlohmann::json(options.stop).dump()},
      {"--ignore-eos", options.ignore_eos ? "given" : "not given"},
      {"--max-sequences", std::to_string(options.engine.max_sequences)},
      {"--merge-adapter", options.engine.merge_adapter ? "given" : "not given"},
      {"--template-arg", text::join(options.template_arguments, " ")}};
}

/// The random stream of a row: its own `seed`, or the command's and its place in the file.
std::uint64_t seed_of(const Json& row, std::uint64_t seed, std::size_t place) {
  const auto own = row.find("seed");
  if (own == row.end() || own->is_null()) return rollout::seed_of_row(seed, place);
  if (!own->is_number_unsigned())
    throw_error<DataError>("field 'seed' is {}: expected a whole number from 0 to 2^64 - 1",
                           data::json_text::dump(*own));
  return own->get<std::uint64_t>();
}

class Generation {
 public:
  Generation(const GenerateOptions& options, const std::shared_ptr<comm::World>& world)
      : options_(options),
        model_(load(options.model, assembly::Head::kLanguageModel, assembly::Purpose::kGenerate,
                    world)),
        tokenizer_(load_tokenizer(options.model, model_)),
        renderer_(*tokenizer_, render_options(options)),
        engine_(options.engine) {
    engine_.caches = caches_of(options.model);
    if (!options.stop.empty()) tokenizer_->require_texts();
    sampling_ = sampling_of(options.sampling, model_.source->generation_config());
    if (!options.ignore_eos) stop_ids_ = rollout::end_tokens(*tokenizer_, model_.source.get());
  }

  void one(const Session& session) {
    const bool is_shown = model_.context.mesh.rank() == 0;
    const auto on_text = [&](std::size_t, const std::string& piece) {
      if (is_shown) session.out << piece << std::flush;
    };
    rollout::generate(model_, tokenizer_,
                      {request(prompt_tokens(options_.prompt), options_.sampling.seed)}, engine_,
                      on_text);
    if (is_shown) session.out << "\n";
  }

  void file() {
    data::ReaderOptions reader_options;
    reader_options.task = data::Task::kEmbedding;  // rows are prompts, nothing is to be learned
    data::JsonlReader reader(input_file(options_.input), reader_options);
    std::optional<files::OutputFile> output;  // of rank 0
    if (model_.context.mesh.rank() == 0) output.emplace(options_.output);
    std::vector<Json> values;
    std::vector<rollout::Request> requests;
    std::int64_t answered = 0;
    while (auto item = reader.next()) {
      const data::Row& row = item->row;
      answered += !row.messages.empty() && row.messages.back()["role"] == "assistant";
      try {
        if (!row.sequence_lengths.empty())
          throw DataError("the row holds several sequences; make a row of each");
        requests.push_back(request(renderer_.tokenize_prompt(row, options_.continue_final_message),
                                   seed_of(item->value, options_.sampling.seed, requests.size())));
      } catch (const DataError& e) {
        throw_error<DataError>("{}:{}: {}", reader.name(), item->line, e.what());
      }
      values.push_back(std::move(item->value));
    }
    if (answered > 0 && !options_.continue_final_message) {
      log::info(
          "{} of {} conversations end with a turn of the assistant, which is left out and "
          "generated "
          "anew; --continue-final-message goes on with it",
          answered, values.size());
    }
    const bool has_texts = tokenizer_->has_texts();
    const auto completions =
        rollout::generate(model_, has_texts ? tokenizer_ : nullptr, requests, engine_);
    if (!output) return;
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i]["output_ids"] = completions[i].output_ids;
      if (has_texts) values[i]["text"] = completions[i].text;
      values[i]["logprobs"] = completions[i].logprobs;
      values[i]["finish_reason"] =
          completions[i].finish_reason == rollout::FinishReason::kStop ? "stop" : "length";
      output->write(data::json_text::dump(values[i]) + "\n");
    }
    output->commit();
  }

 private:
  static data::RenderOptions render_options(const GenerateOptions& options) {
    data::RenderOptions rendering;
    rendering.template_variables = template_variables(options.template_arguments);
    return rendering;
  }

  std::vector<std::int32_t> prompt_tokens(const std::string& prompt) const {
    tokenizer_->require_texts();
    const auto source = tokenizer_->chat_template();
    if (options_.raw || !source) return tokenizer_->encode(prompt);
    data::Row row;
    row.form = data::Row::Form::kConversation;
    row.messages = Json::array({{{"role", "user"}, {"content", prompt}}});
    return renderer_.tokenize_prompt(row);
  }

  rollout::Request request(std::vector<std::int32_t> prompt, std::uint64_t seed) const {
    if (prompt.empty()) throw DataError("the prompt has no token");
    rollout::Request made{std::move(prompt), options_.max_new_tokens, sampling_, stop_ids_,
                          options_.stop};
    made.sampling.seed = seed;
    return made;
  }

  const GenerateOptions& options_;
  assembly::ModelOnRanks model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  data::Renderer renderer_;
  rollout::EngineOptions engine_;
  rollout::SamplingOptions sampling_;
  std::vector<std::int32_t> stop_ids_;
};

int run(const GenerateOptions& options, const Session& session) {
  if (options.prompt.empty() == options.input.empty()) {
    throw ConfigError("give either --prompt TEXT, or --input IN.jsonl with --output OUT.jsonl");
  }
  if (!options.input.empty() && options.output.empty())
    throw ConfigError("--input needs --output OUT.jsonl");
  if (options.input.empty() && !options.output.empty())
    throw ConfigError(
        "--output takes the answers to the rows of --input IN.jsonl; that to --prompt goes to the "
        "standard output");
  if (options.continue_final_message && options.input.empty())
    throw ConfigError("--continue-final-message needs --input with conversations");
  const auto require = [](bool holds, const char* option, auto value, const char* expected) {
    if (!holds) throw_error<ConfigError>("{} is {}: expected {}", option, value, expected);
  };
  check(options.sampling);
  // Far above any context; the pages for so many tokens are reserved before the first one.
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;
  require(options.max_new_tokens >= 1 && options.max_new_tokens <= kMostTokens, "--max-new-tokens",
          options.max_new_tokens, "1 to 16777216");
  require(options.engine.max_sequences >= 1, "--max-sequences", options.engine.max_sequences,
          "1 or more");
  if (options.engine.merge_adapter && options.model.adapter.empty())
    throw ConfigError("--merge-adapter needs --adapter DIR");
  head_name(options.model.directory, options.model.adapter, "lm");
  const std::shared_ptr<comm::World> world =
      join_others("generate", options.model, facts_of(options));
  comm::announcing_failure(world.get(), [&] {
    Generation generation(options, world);
    return comm::announcing_failure(
        world.get(), [&] { options.input.empty() ? generation.one(session) : generation.file(); });
  });
  if (world) world->leave();
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue prompts");
  add_model_arguments(*command, options->model);
  command
      ->add_option("--prompt", options->prompt,
                   "One prompt, streamed (through the chat template if there is one)")
      ->check(not_empty());
  command->add_flag("--raw", options->raw, "Take --prompt as it is, without the chat template");
  add_template_arguments(*command, options->template_arguments);
  command
      ->add_option("--input", options->input,
                   "Rows with messages, text or input_ids; - is standard input")
      ->type_name("IN.jsonl");
  command->add_flag("--continue-final-message", options->continue_final_message,
                    "--input: go on with the assistant's turn that ends a conversation");
  command
      ->add_option("--output", options->output,
                   "Rows with output_ids, text, logprobs, finish_reason")
      ->type_name("OUT.jsonl");
  command->add_option("--max-new-tokens", options->max_new_tokens, "At most so many")
      ->capture_default_str();
  add_sampling_arguments(*command, options->sampling);
  command->add_option("--stop", options->stop, "End where this text begins (repeatable)")
      ->check(not_empty());
  command->add_flag("--ignore-eos", options->ignore_eos, "Do not end at end-of-sequence tokens");
  command->add_option("--max-sequences", options->engine.max_sequences, "Generated at a time")
      ->capture_default_str();
  command->add_flag("--merge-adapter", options->engine.merge_adapter,
                    "Add --adapter to the matrices first: as fast as without it, in more memory");
  add_layout_argument(*command, options->model);
  options->model.takes_caches = true;
  command->footer(
      "A row may carry its own `seed`.\n"
      "Several ranks: heddle launch --nproc 2 -- generate MODEL_DIR ... parallel.tp=2\n"
      "Memory, as in a configuration: rollout.state_dtype, kv_page, memory_fraction, "
      "graph_batches\n"
      "\n"
      "Example:\n"
      "  heddle generate runs/chat/final --prompt 'What is 12 + 30?' --temperature 0 "
      "--max-new-tokens 32");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
