#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/names.h"
#include "config/config.h"
#include "data/readers/data_files.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "train/setup.h"
#include "train/vocabulary.h"
#include "ui/token_colors.h"

namespace heddle::cli {
namespace {

struct TokenizeOptions {
  std::vector<std::string> arguments;
  std::string text, input;
  std::int64_t rows = 3;
  bool ids = false;
};

/// Fate of the row under data.max_length; "" where it fits.
std::string fate_of(const data::TokenizedRow& row, std::int64_t max_length) {
  using Fate = data::TokenizedRow::Fate;
  switch (row.fate) {
    case Fate::kKept:
      return "";
    case Fate::kTruncated:
      return fmt::format(", cut from {}", row.full_length);
    case Fate::kSplit:
      return fmt::format(", split into {} rows", data::split(row, max_length).size());
    case Fate::kDroppedLong:
      return fmt::format("; dropped: longer than {}", max_length);
    case Fate::kDroppedNoLoss:
      return "; dropped: no token has loss";
  }
  return "";
}

void show(const data::Tokenizer& tokenizer, const data::TokenizedRow& row, std::int64_t max_length,
          bool ids, const Session& session) {
  std::vector<ui::TokenText> shown;
  std::int64_t with_loss = 0;
  for (std::size_t i = 0; i < row.tokens.size(); ++i) {
    // labels[i - 1] says whether token i is predicted.
    const bool loss =
        i > 0 && i <= row.labels.size() && row.labels[i - 1] >= 0 && row.weights[i - 1] != 0;
    with_loss += loss;
    const std::int32_t id = row.tokens[i];
    std::string text = tokenizer.decode(std::vector<std::int32_t>{id});
    if (ids) text += fmt::format("({})", id);
    shown.push_back({std::move(text), loss, tokenizer.is_special(id)});
  }
  session.out << ui::render_tokens(shown, session.out_has_color)
              << fmt::format("\n{} tokens, {} with loss{}\n\n", row.tokens.size(), with_loss,
                             fate_of(row, max_length));
}

std::vector<std::string> input_files(const std::string& input) {
  std::vector<std::string> files;
  for (const std::string& path : hub::find_data(input, hub::Part::kTrain, data::is_data_file)) {
    for (std::string& file : data::expand_files(path)) files.push_back(std::move(file));
  }
  return files;
}

int run(const TokenizeOptions& options, const Session& session) {
  const ConfigArguments split = split_config_arguments(options.arguments);
  config::RunConfig config =
      config::load(split.file, split.overrides, config::Completeness::kPartial);
  if (config.model.path.empty() && config.model.tokenizer.empty())
    throw ConfigError("model.path is needed: it names the tokenizer");
  if (!options.input.empty() || !options.text.empty()) config.data.train.clear();
  resolve_names(config, hub::Need::kTokenizer);
  const auto tokenizer = train::load_tokenizer(config).tokenizer;
  session.out << ui::token_legend(session.out_has_color) << "\n\n";
  data::DatasetOptions dataset = train::dataset_options(config, train::DataPart::kTrain);
  const data::Renderer renderer(*tokenizer, dataset.rendering);
  if (!options.text.empty()) {
    data::Row row;
    row.text = options.text;
    show(*tokenizer, renderer.tokenize(row), config.data.max_length, options.ids, session);
    return 0;
  }
  std::vector<std::string> files;
  if (!options.input.empty()) files = input_files(options.input);
  if (files.empty()) {
    for (const data::DataFile& file : dataset.files) files.push_back(file.path);
  }
  if (files.empty()) {
    throw ConfigError(
        "nothing to show: give --text, --input FILE, or data.train in the configuration");
  }
  std::int64_t rows = 0;
  for (const std::string& file : files) {
    data::JsonlReader reader(file, dataset.reader);
    while (rows < options.rows) {
      const auto item = reader.next();
      if (!item) break;
      ++rows;
      const std::string place = fmt::format("{}:{}", reader.name(), item->line);
      session.out << place << "\n";
      try {
        for (const data::Row& row : data::sequences(item->row))
          show(*tokenizer, renderer.tokenize(row), config.data.max_length, options.ids, session);
      } catch (const DataError& error) {
        throw_error<DataError>("{}: {}", place, error.what());
      }
    }
  }
  if (rows == 0 && options.rows > 0)
    throw_error<DataError>("{}: no row; there is nothing to show", text::list_some(files, 3));
  return 0;
}

}  // namespace

void add_tokenize_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = app.add_subcommand(
      "tokenize", "Show rows as the model sees them, and which tokens carry loss");
  command
      ->add_option("config", options->arguments,
                   "A YAML file, and overrides such as model.path=DIR")
      ->type_name("[CONFIG.yaml] [key=value ...]");
  command->add_option("--text", options->text, "This text instead of a file");
  command
      ->add_option("--input", options->input,
                   "Rows of a file, folder or pattern, - for standard "
                   "input; default: data.train")
      ->type_name("FILE");
  command->add_option("--rows", options->rows, "How many rows")->capture_default_str();
  command->add_flag("--ids", options->ids, "With the id of each token");
  command->footer(
      "Example:\n"
      "  heddle tokenize model.path=models/small --input chat.jsonl --rows 1 --ids");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
