#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/file_hash.h"
#include "base/files.h"
#include "base/log.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/template_arguments.h"
#include "comm/launch_environment.h"
#include "comm/refusal.h"
#include "comm/world.h"
#include "config/config.h"
#include "data/json/json_text.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "train/same_inputs.h"
#include "train/scorer.h"
#include "train/setup.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;
using models::qwen3_5::Head;

struct ScoreOptions {
  ModelArguments model;
  std::string input, output;
  std::vector<std::string> template_arguments;
  std::string head = "lm";
  std::int64_t batch_tokens = 8192;
  bool normalize = true;
  bool entropy = false;
  bool json = false;
  std::vector<std::string> layout;
};

struct Totals {
  std::int64_t rows = 0, tokens = 0, scored = 0;
  double logprob_sum = 0, entropy_sum = 0;

  double mean(double sum) const { return scored > 0 ? sum / static_cast<double>(scored) : 0; }
};

Head parse_head(const std::string& name) {
  if (name == "lm") return Head::kLanguageModel;
  if (name == "classify") return Head::kClassify;
  if (name == "embed") return Head::kEmbed;
  throw_error<ConfigError>("--head is '{}': expected lm, classify or embed", name);
}

Json to_json(const std::vector<double>& values) {
  Json array = Json::array();
  for (const double value : values) array.push_back(std::isnan(value) ? Json() : Json(value));
  return array;
}

/// How the ranks divide the model.
config::RunConfig layout_of(const ScoreOptions& options) {
  std::vector<std::string> settings = {"device.threads=" + std::to_string(options.model.threads)};
  if (!options.model.device.empty()) settings.push_back("device.name=" + options.model.device);
  if (!options.model.dtype.empty()) settings.push_back("model.dtype=" + options.model.dtype);
  for (const std::string& setting : options.layout) {
    if (!setting.starts_with("parallel.")) {
      throw_error<ConfigError>("score: '{}': of a configuration, parallel.* alone can be set here",
                               setting);
    }
    settings.push_back(setting);
  }
  return config::parse("", "command line", settings, config::Completeness::kPartial,
                       train::usual_device());
}

/// What the ranks must have alike beside model and layout.
std::vector<comm::Fact> facts_of(const ScoreOptions& options) {
  std::string input = "not there", shown = options.input + " (not there)";
  if (std::filesystem::is_regular_file(options.input)) {
    input = hash::of_file(options.input);
    shown = fmt::format("{} (content {})", options.input, input.substr(0, 8));
  }
  return {{"--input", input, shown},
          {"--head", options.head},
          {"--batch-tokens", std::to_string(options.batch_tokens)},
          {"--no-normalize", options.normalize ? "not given" : "given"},
          {"--entropy", options.entropy ? "given" : "not given"},
          {"--adapter", options.model.adapter.empty() ? "not given" : "given"},
          {"--template-arg", text::join(options.template_arguments, " ")}};
}

/// Meets the other ranks; null for one process, whose own arguments errors then name.
std::shared_ptr<comm::World> join_others(const ScoreOptions& options) {
  const auto launched = comm::read_launch_environment();
  if (!launched || launched->world == 1) return nullptr;
  const config::RunConfig layout = comm::before_joining([&] { return layout_of(options); });
  return train::join_world(layout, "score", facts_of(options));
}

train::LoadedModel load_divided(const ScoreOptions& options, Head head,
                                const std::shared_ptr<comm::World>& world) {
  if (!world && options.layout.empty()) return load(options.model, head);
  const config::RunConfig layout = layout_of(options);
  return train::load_for_inference(options.model.directory, options.model.adapter,
                                   train::make_context(layout, world), head,
                                   train::context_method(layout));
}

class Scoring {
 public:
  Scoring(const ScoreOptions& options, const std::shared_ptr<comm::World>& world)
      : options_(options),
        head_(parse_head(options.head)),
        model_(load_divided(options, head_, world)),
        tokenizer_(data::Tokenizer::load(model_.tokenizer_directory)),
        renderer_(*tokenizer_, render_options(options)),
        scorer_(model_) {
    const comm::Mesh& mesh = model_.context.mesh;
    tokens_at_once_ = options.batch_tokens * mesh.data_size() * mesh.size(comm::Dim::kCp);
    if (mesh.rank() == 0) output_.emplace(options.output);
  }

  Totals run() {
    data::ReaderOptions reader_options;
    reader_options.task = data::Task::kEmbedding;  // nothing is to be learned from the rows
    data::JsonlReader reader(options_.input, reader_options);
    while (auto item = reader.next()) {
      std::vector<std::int32_t> tokens = tokens_of(item->row, item->line);
      drop_other_lengths(item->row, item->value);
      if (waiting_tokens_ > 0 &&
          waiting_tokens_ + static_cast<std::int64_t>(tokens.size()) > tokens_at_once_) {
        flush();
      }
      waiting_tokens_ += static_cast<std::int64_t>(tokens.size());
      values_.push_back(std::move(item->value));
      rows_.push_back(std::move(tokens));
    }
    flush();
    if (totals_.rows == 0)
      throw_error<DataError>("--input: {}: no row; there is nothing to score", options_.input);
    if (output_) output_->commit();
    return totals_;
  }

 private:
  static data::RenderOptions render_options(const ScoreOptions& options) {
    data::RenderOptions rendering;
    rendering.loss_on = data::LossOn::kAll;
    rendering.append_eos = false;
    rendering.template_variables = template_variables(options.template_arguments);
    return rendering;
  }

  /// input_ids are written without padding: fields with an entry for each token as it was fit them
  /// no longer.
  static void drop_other_lengths(const data::Row& row, Json& value) {
    if (row.form != data::Row::Form::kTokens || !value.contains("input_ids")) return;
    const std::size_t given = value["input_ids"].size();
    if (given == row.input_ids.size()) return;
    std::vector<std::string> fields;
    for (const auto& [name, field] : value.items()) {
      if (field.is_array() && field.size() == given) fields.push_back(name);
    }
    for (const std::string& name : fields) value.erase(name);
  }

  std::vector<std::int32_t> tokens_of(const data::Row& row, std::int64_t line) {
    try {
      if (!row.sequence_lengths.empty()) {
        throw DataError("the row holds several sequences; make a row of each");
      }
      std::vector<std::int32_t> tokens = renderer_.tokenize(row).tokens;
      if (tokens.empty()) throw DataError("the row has no token");
      for (const std::int32_t id : tokens) {
        if (id < 0 || id >= model_.model->config().vocab_size) {
          throw_error<DataError>("token id {} is outside the model's vocabulary of {}", id,
                                 model_.model->config().vocab_size);
        }
      }
      return tokens;
    } catch (const DataError& e) {
      throw_error<DataError>("{}:{}: {}", options_.input, line, e.what());
    }
  }

  void flush() {
    if (rows_.empty()) return;
    const auto scores = scorer_.score(rows_, {options_.normalize, /*entropy=*/options_.entropy});
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      Json& value = values_[r];
      value["input_ids"] = rows_[r];
      if (head_ == Head::kLanguageModel) {
        value["logprobs"] = to_json(scores[r].logprobs);
        for (std::size_t i = 1; i < scores[r].logprobs.size(); ++i)
          totals_.logprob_sum += scores[r].logprobs[i];
        if (options_.entropy) value["entropies"] = to_json(scores[r].entropies);
        for (std::size_t i = 1; i < scores[r].entropies.size(); ++i)
          totals_.entropy_sum += scores[r].entropies[i];
        totals_.scored += static_cast<std::int64_t>(rows_[r].size()) - 1;
      } else {
        value[head_ == Head::kClassify ? "logits" : "embedding"] = to_json(scores[r].outputs);
      }
      totals_.tokens += static_cast<std::int64_t>(rows_[r].size());
      ++totals_.rows;
      if (output_)
        output_->write(data::json_text::dump(value) + "\n");
    }
    rows_.clear();
    values_.clear();
    waiting_tokens_ = 0;
  }

  const ScoreOptions& options_;
  Head head_;
  train::LoadedModel model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  data::Renderer renderer_;
  train::Scorer scorer_;
  std::optional<files::AtomicFile> output_;  ///< Of rank 0.
  std::int64_t tokens_at_once_ = 0;
  std::vector<Json> values_;
  std::vector<std::vector<std::int32_t>> rows_;
  std::int64_t waiting_tokens_ = 0;
  Totals totals_;
};

Totals score_as_rank(const ScoreOptions& options, const std::shared_ptr<comm::World>& world) {
  return comm::announcing_failure(world.get(), [&] {
    Scoring scoring(options, world);
    return comm::announcing_failure(world.get(), [&] { return scoring.run(); });
  });
}

int run(const ScoreOptions& options, const Session& session) {
  const auto start = std::chrono::steady_clock::now();
  if (options.entropy && options.head != "lm") {
    throw_error<ConfigError>(
        "--entropy is of the distribution of tokens: expected --head lm, not {}", options.head);
  }
  const std::shared_ptr<comm::World> world = join_others(options);
  const Totals totals = score_as_rank(options, world);
  if (world) world->leave();
  if (world && world->rank() > 0) return 0;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double mean = totals.mean(-totals.logprob_sum), entropy = totals.mean(totals.entropy_sum);
  Json summary = {{"rows", totals.rows}, {"tokens", totals.tokens}, {"seconds", seconds}};
  if (options.head == "lm") {
    summary["mean_nll"] = mean;
    summary["perplexity"] = std::exp(mean);
  }
  if (options.entropy) summary["mean_entropy"] = entropy;
  if (options.json) {
    session.out << summary.dump() << "\n";
    return 0;
  }
  session.out << fmt::format("{} rows, {} tokens in {:.1f} s", totals.rows, totals.tokens, seconds);
  if (options.head == "lm")
    session.out << fmt::format("; mean loss {:.6f}, perplexity {:.4f}", mean, std::exp(mean));
  if (options.entropy) session.out << fmt::format(", mean entropy {:.6f}", entropy);
  session.out << "\n";
  return 0;
}

}  // namespace

void add_score_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<ScoreOptions>();
  CLI::App* command =
      app.add_subcommand("score", "Log-probabilities, class logits or embeddings of rows");
  add_model_arguments(*command, options->model);
  command->add_option("--input", options->input, "JSONL rows with input_ids, text or messages")
      ->required()
      ->type_name("IN.jsonl");
  command
      ->add_option("--output", options->output,
                   "The same rows, in order, with input_ids and logprobs")
      ->required()
      ->type_name("OUT.jsonl");
  add_template_arguments(*command, options->template_arguments);
  command->add_option("--head", options->head, "lm, classify (logits) or embed (last token)")
      ->capture_default_str();
  command->add_flag("!--no-normalize", options->normalize,
                    "embed: do not scale vectors to length 1");
  command->add_flag("--entropy", options->entropy,
                    "lm: entropies too, of the distribution that each token is judged by");
  command->add_option("--batch-tokens", options->batch_tokens, "Tokens scored together")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print the summary as one JSON document");
  command->add_option("layout", options->layout, "How several ranks divide the model")
      ->type_name("[parallel.*=N ...]");
  command->footer(
      "logprobs[i] is log p(token i | tokens before i); the first is null.\n"
      "Several ranks: heddle launch --nproc 2 -- score MODEL_DIR ... parallel.tp=2\n"
      "\n"
      "Example:\n"
      "  heddle score runs/chat/final --input test.jsonl --output scored.jsonl");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
