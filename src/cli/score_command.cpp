#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <ostream>

#include <nlohmann/json.hpp>

#include "assembly/not_finite.h"
#include "base/errors.h"
#include "base/log.h"
#include "base/output_file.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/score_totals.h"
#include "cli/template_arguments.h"
#include "comm/refusal.h"
#include "comm/world.h"
#include "data/batch.h"
#include "data/json/json_text.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "train/scorer.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;
using assembly::Head;

struct ScoreOptions {
  ModelArguments model;
  std::string input, output;
  std::vector<std::string> template_arguments;
  std::string head;  ///< Empty until run(): that of the directory.
  std::int64_t batch_tokens = 8192;
  bool normalize = true;
  bool entropy = false;
  bool json = false;
  bool answers = false;
  bool keep_not_finite = false;
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

/// Facts that the ranks must have alike besides model and layout.
std::vector<comm::Fact> facts_of(const ScoreOptions& options) {
  return {input_fact(options.input),
          {"--head", options.head},
          {"--batch-tokens", std::to_string(options.batch_tokens)},
          {"--no-normalize", options.normalize ? "not given" : "given"},
          {"--entropy", options.entropy ? "given" : "not given"},
          {"--answers", options.answers ? "given" : "not given"},
          {"--keep-not-finite", options.keep_not_finite ? "given" : "not given"},
          {"--template-arg", text::join(options.template_arguments, " ")}};
}

class Scoring {
 public:
  Scoring(const ScoreOptions& options, const std::shared_ptr<comm::World>& world)
      : options_(options),
        head_(parse_head(options.head)),
        model_(load(options.model, head_, assembly::Purpose::kScore, world)),
        tokenizer_(load_tokenizer(options.model, model_)),
        renderer_(*tokenizer_, render_options(options)),
        scorer_(model_) {
    const comm::Mesh& mesh = model_.context.mesh;
    tokens_at_once_ = options.batch_tokens * mesh.data_size() * mesh.size(comm::Dim::kCp);
    totals_.has_tokens = head_ == Head::kLanguageModel;
    totals_.has_answers = options.answers;
    totals_.has_entropy = options.entropy;
    if (head_ == Head::kClassify && model_.model->num_labels() > 1)
      class_names_ = model_.label_names;
    if (mesh.rank() == 0) output_.emplace(options.output);
  }

  ScoreTotals run() {
    data::ReaderOptions reader_options;
    // Without --answers nothing is to be learned from the rows.
    reader_options.task = options_.answers ? data::Task::kLanguageModel : data::Task::kEmbedding;
    data::JsonlReader reader(input_file(options_.input), reader_options);
    while (auto item = reader.next()) {
      data::TokenizedRow row = tokenize(item->row, item->line);
      drop_other_lengths(item->row, item->value);
      if (waiting_tokens_ > 0 &&
          waiting_tokens_ + static_cast<std::int64_t>(row.tokens.size()) > tokens_at_once_) {
        flush();
      }
      waiting_tokens_ += static_cast<std::int64_t>(row.tokens.size());
      values_.push_back(std::move(item->value));
      rows_.push_back(row.tokens);
      tokenized_.push_back(std::move(row));
      lines_.push_back(item->line);
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
    // The answers alone as training has them, which learns their end too.
    rendering.loss_on = options.answers ? data::LossOn::kAssistant : data::LossOn::kAll;
    rendering.append_eos = options.answers;
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

  data::TokenizedRow tokenize(const data::Row& row, std::int64_t line) {
    try {
      if (!row.sequence_lengths.empty())
        throw DataError("the row holds several sequences; make a row of each");
      data::TokenizedRow tokenized = renderer_.tokenize(row);
      if (tokenized.tokens.empty()) throw DataError("the row has no token");
      for (const std::int32_t id : tokenized.tokens) {
        if (id < 0 || id >= model_.model->config().vocab_size) {
          throw_error<DataError>("token id {} is outside the model's vocabulary of {}", id,
                                 model_.model->config().vocab_size);
        }
      }
      return tokenized;
    } catch (const DataError& e) {
      throw_error<DataError>("{}:{}: {}", options_.input, line, e.what());
    }
  }

  void flush() {
    if (rows_.empty()) return;
    const auto scores = scorer_.score(rows_, {options_.normalize, /*entropy=*/options_.entropy});
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      if (!options_.keep_not_finite) check_finite(r, scores[r]);
      Json& value = values_[r];
      value["input_ids"] = rows_[r];
      if (head_ == Head::kLanguageModel) {
        value["logprobs"] = to_json(scores[r].logprobs);
        for (std::size_t i = 1; i < scores[r].logprobs.size(); ++i)
          totals_.logprob_sum += scores[r].logprobs[i];
        if (options_.entropy) value["entropies"] = to_json(scores[r].entropies);
        for (std::size_t i = 1; i < scores[r].entropies.size(); ++i)
          totals_.entropy_sum += scores[r].entropies[i];
        if (options_.answers) count_answers(tokenized_[r], scores[r].logprobs);
        totals_.scored += static_cast<std::int64_t>(rows_[r].size()) - 1;
      } else {
        value[head_ == Head::kClassify ? "logits" : "embedding"] = to_json(scores[r].outputs);
        if (!class_names_.empty()) value["predicted_label"] = class_names_[best(scores[r].outputs)];
      }
      totals_.tokens += static_cast<std::int64_t>(rows_[r].size());
      ++totals_.rows;
      if (output_) output_->write(data::json_text::dump(value) + "\n");
    }
    rows_.clear();
    tokenized_.clear();
    lines_.clear();
    values_.clear();
    waiting_tokens_ = 0;
  }

  static std::size_t best(const std::vector<double>& logits) {
    return static_cast<std::size_t>(std::max_element(logits.begin(), logits.end()) -
                                    logits.begin());
  }

  void count_answers(const data::TokenizedRow& row, const std::vector<double>& logprobs) {
    for (std::size_t i = 0; i + 1 < logprobs.size(); ++i) {
      if (row.labels[i] == data::kIgnoredLabel || row.weights[i] == 0) continue;
      ++totals_.answer_tokens;
      totals_.answer_weight += row.weights[i];
      totals_.answer_logprob_sum += row.weights[i] * logprobs[i + 1];
    }
  }

  /// All ranks see the same scores, so that all of them stop.
  void check_finite(std::size_t r, const train::RowScore& score) {
    const auto is_finite = [](double value) { return std::isfinite(value); };
    const auto& logprobs = score.logprobs;  // the first is none
    if (std::all_of(logprobs.begin() + (logprobs.empty() ? 0 : 1), logprobs.end(), is_finite) &&
        std::all_of(score.outputs.begin(), score.outputs.end(), is_finite)) {
      return;
    }
    throw_error<ModelError>("{}:{}: the model's output is not finite, first in {}", options_.input,
                            lines_[r],
                            assembly::find_not_finite(model_, rows_[r], model_.adapters.get()));
  }

  const ScoreOptions& options_;
  Head head_;
  assembly::ModelOnRanks model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  data::Renderer renderer_;
  std::vector<std::string> class_names_;
  train::Scorer scorer_;
  std::optional<files::OutputFile> output_;  ///< Rank 0 alone writes.
  std::int64_t tokens_at_once_ = 0;
  std::vector<Json> values_;
  std::vector<std::vector<std::int32_t>> rows_;
  std::vector<data::TokenizedRow> tokenized_;
  std::vector<std::int64_t> lines_;
  std::int64_t waiting_tokens_ = 0;
  ScoreTotals totals_;
};

ScoreTotals score_as_rank(const ScoreOptions& options, const std::shared_ptr<comm::World>& world) {
  return comm::announcing_failure(world.get(), [&] {
    Scoring scoring(options, world);
    return comm::announcing_failure(world.get(), [&] { return scoring.run(); });
  });
}

int run(ScoreOptions options, const Session& session) {
  options.head = head_name(options.model.directory, options.model.adapter, options.head);
  const auto start = std::chrono::steady_clock::now();
  if (options.entropy && options.head != "lm") {
    throw_error<ConfigError>(
        "--entropy is of the distribution of tokens: expected --head lm, not {}", options.head);
  }
  if (options.answers && options.head != "lm")
    throw_error<ConfigError>("--answers: only --head lm has a loss of tokens, not {}",
                             options.head);
  const std::shared_ptr<comm::World> world = join_others("score", options.model, facts_of(options));
  const ScoreTotals totals = score_as_rank(options, world);
  if (world) world->leave();
  if (world && world->rank() > 0) return 0;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string summary = options.json ? totals.to_json(seconds) : totals.to_text(seconds);
  // Rows on the standard output stand there alone.
  if (files::is_standard_output(options.output)) {
    log::info("{}", summary);
  } else {
    session.out << summary << "\n";
  }
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
  command->add_option("--head", options->head,
                      "lm, classify (logits) or embed (last token); default as the adapter or "
                      "config.json has it");
  command->add_flag("!--no-normalize", options->normalize,
                    "embed: do not scale vectors to length 1");
  command->add_flag("--entropy", options->entropy,
                    "lm: entropies too, of the distribution that each token is judged by");
  command->add_flag("--answers", options->answers,
                    "lm: also the mean over the tokens that training learns (eval_loss)");
  command->add_flag("--keep-not-finite", options->keep_not_finite,
                    "Write null where the model's output is not finite instead of ending there");
  command->add_option("--batch-tokens", options->batch_tokens, "Tokens scored together")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print the summary as one JSON document");
  add_layout_argument(*command, options->model);
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
