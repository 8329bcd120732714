#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <ostream>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/template_arguments.h"
#include "data/json/json_text.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "rollout/engine.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

struct GenerateOptions {
  ModelArguments model;
  std::string prompt, input, output;
  std::int64_t max_new_tokens = 128;
  rollout::SamplingOptions sampling;
  std::vector<std::string> stop, template_arguments;
  bool ignore_eos = false;
  bool raw = false;
  bool continue_final_message = false;
  rollout::EngineOptions engine;
};

std::vector<std::int64_t> eos_of(const Json& generation_config) {
  if (!generation_config.is_object() || !generation_config.contains("eos_token_id")) return {};
  const Json& eos = generation_config["eos_token_id"];
  if (eos.is_number_integer()) return {eos.get<std::int64_t>()};
  return eos.is_array() ? eos.get<std::vector<std::int64_t>>() : std::vector<std::int64_t>{};
}

class Generation {
 public:
  explicit Generation(const GenerateOptions& options)
      : options_(options),
        model_(load(options.model, models::qwen3_5::Head::kLanguageModel)),
        tokenizer_(data::Tokenizer::load(model_.tokenizer_directory)),
        renderer_(*tokenizer_, render_options(options)) {
    if (!options.ignore_eos)
      stop_ids_ = rollout::end_tokens(tokenizer_, eos_of(model_.source->generation_config()));
  }

  void one(const Session& session) {
    const auto on_text = [&](std::size_t, const std::string& piece) {
      session.out << piece << std::flush;
    };
    rollout::generate(*model_.model, tokenizer_, {request(prompt_tokens(options_.prompt))},
                      options_.engine, on_text);
    session.out << "\n";
  }

  void file() {
    data::ReaderOptions reader_options;
    reader_options.task = data::Task::kEmbedding;  // rows are prompts, nothing is to be learned
    data::JsonlReader reader(options_.input, reader_options);
    files::AtomicFile output(options_.output);
    std::vector<Json> values;
    std::vector<rollout::Request> requests;
    std::int64_t answered = 0;
    while (auto item = reader.next()) {
      const data::Row& row = item->row;
      answered += !row.messages.empty() && row.messages.back()["role"] == "assistant";
      try {
        if (!row.sequence_lengths.empty()) {
          throw DataError("the row holds several sequences; make a row of each");
        }
        requests.push_back(request(renderer_.tokenize_prompt(row, options_.continue_final_message)));
      } catch (const DataError& e) {
        throw_error<DataError>("{}:{}: {}", reader.name(), item->line, e.what());
      }
      values.push_back(std::move(item->value));
    }
    if (answered > 0 && !options_.continue_final_message) {
      log::info(
          "{} of {} conversations end with a turn of the assistant, which is left out and generated "
          "anew; --continue-final-message goes on with it",
          answered, values.size());
    }
    const auto completions =
        rollout::generate(*model_.model, tokenizer_, requests, options_.engine);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i]["output_ids"] = completions[i].output_ids;
      values[i]["text"] = completions[i].text;
      values[i]["logprobs"] = completions[i].logprobs;
      values[i]["finish_reason"] =
          completions[i].finish_reason == rollout::FinishReason::kStop ? "stop" : "length";
      output.write(data::json_text::dump(values[i]) + "\n");
    }
    output.commit();
  }

 private:
  static data::RenderOptions render_options(const GenerateOptions& options) {
    data::RenderOptions rendering;
    rendering.template_variables = template_variables(options.template_arguments);
    return rendering;
  }

  std::vector<std::int32_t> prompt_tokens(const std::string& prompt) const {
    const auto source = tokenizer_->chat_template();
    if (options_.raw || !source) return tokenizer_->encode(prompt);
    data::Row row;
    row.form = data::Row::Form::kConversation;
    row.messages = Json::array({{{"role", "user"}, {"content", prompt}}});
    return renderer_.tokenize_prompt(row);
  }

  rollout::Request request(std::vector<std::int32_t> prompt) const {
    if (prompt.empty()) throw DataError("the prompt has no token");
    return {std::move(prompt), options_.max_new_tokens, options_.sampling, stop_ids_,
            options_.stop};
  }

  const GenerateOptions& options_;
  train::LoadedModel model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  data::Renderer renderer_;
  std::vector<std::int32_t> stop_ids_;
};

int run(const GenerateOptions& options, const Session& session) {
  if (options.prompt.empty() == options.input.empty()) {
    throw ConfigError("give either --prompt TEXT, or --input IN.jsonl with --output OUT.jsonl");
  }
  if (!options.input.empty() && options.output.empty())
    throw ConfigError("--input needs --output OUT.jsonl");
  if (options.continue_final_message && options.input.empty())
    throw ConfigError("--continue-final-message needs --input with conversations");
  if (options.sampling.temperature < 0) throw ConfigError("--temperature must not be negative");
  if (options.sampling.top_p <= 0 || options.sampling.top_p > 1)
    throw ConfigError("--top-p must be in (0, 1]");
  if (options.max_new_tokens < 1) throw ConfigError("--max-new-tokens must be at least 1");
  Generation generation(options);
  if (options.input.empty()) {
    generation.one(session);
  } else {
    generation.file();
  }
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "Continue prompts");
  add_model_arguments(*command, options->model);
  command->add_option("--prompt", options->prompt,
                      "One prompt, streamed (through the chat template if there is one)");
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
  command->add_option("--temperature", options->sampling.temperature, "0: the most likely token")
      ->capture_default_str();
  command->add_option("--top-p", options->sampling.top_p, "Smallest set with this probability")
      ->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "The k most likely; 0: all")
      ->capture_default_str();
  command->add_option("--seed", options->sampling.seed, "Of the sampling")->capture_default_str();
  command->add_option("--stop", options->stop, "End where this text begins (repeatable)");
  command->add_flag("--ignore-eos", options->ignore_eos, "Do not end at end-of-sequence tokens");
  command->add_option("--max-sequences", options->engine.max_sequences, "Generated at a time")
      ->capture_default_str();
  command->footer(
      "Example:\n"
      "  heddle generate runs/chat/final --prompt 'What is 12 + 30?' --temperature 0 "
      "--max-new-tokens 32");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
