#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>

#include "base/errors.h"
#include "base/files.h"
#include "base/output_file.h"
#include "base/text.h"
#include "cli/command.h"
#include "cli/names.h"
#include "config/config.h"
#include "data/readers/data_files.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "train/class_labels.h"
#include "train/setup.h"
#include "train/vocabulary.h"
#include "ui/token_colors.h"
#include "ui/token_report.h"

namespace heddle::cli {
namespace {

struct TokenizeOptions {
  std::vector<std::string> arguments;
  std::string text, input, report;
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

/// Gives each token of the row as text, one at a time: a row of megabytes has millions. Returns
/// what is to be said of the row.
std::string each_token(const data::Tokenizer& tokenizer, const data::TokenizedRow& row,
                       std::int64_t max_length, bool ids,
                       const std::function<void(ui::TokenText)>& take) {
  std::int64_t with_loss = 0;
  for (std::size_t i = 0; i < row.tokens.size(); ++i) {
    // labels[i - 1] says whether token i is predicted.
    const bool loss =
        i > 0 && i <= row.labels.size() && row.labels[i - 1] >= 0 && row.weights[i - 1] != 0;
    with_loss += loss;
    const std::int32_t id = row.tokens[i];
    std::string text = tokenizer.decode(std::vector<std::int32_t>{id});
    if (ids) text += fmt::format("({})", id);
    take({std::move(text), loss, tokenizer.is_special(id)});
  }
  return fmt::format("{} tokens, {} with loss{}", row.tokens.size(), with_loss,
                     fate_of(row, max_length));
}

/// A row with its tokens as text, and what is to be said of it.
ui::TokenSample sample_of(const data::Tokenizer& tokenizer, const data::TokenizedRow& row,
                          std::int64_t max_length, bool ids) {
  ui::TokenSample sample;
  sample.note = each_token(tokenizer, row, max_length, ids,
                           [&](ui::TokenText token) { sample.tokens.push_back(std::move(token)); });
  return sample;
}

void show(const data::Tokenizer& tokenizer, const data::TokenizedRow& row, std::int64_t max_length,
          bool ids, const Session& session) {
  ui::TokenRenderer renderer(session.out_has_color);
  const std::string note =
      each_token(tokenizer, row, max_length, ids,
                 [&](const ui::TokenText& token) { session.out << renderer.add(token); });
  session.out << renderer.finish() << "\n" << note << "\n\n";
}

/// The rows of one file that a reader of the report wants to see: the first, and the odd ones.
class Selection {
 public:
  explicit Selection(std::int64_t first) : first_(first) {}

  void add(const std::string& place, data::TokenizedRow row) {
    using Fate = data::TokenizedRow::Fate;
    ++rows_;
    tokens_ += std::ssize(row.tokens);
    loss_tokens_ += row.loss_rows;
    if (std::ssize(firsts_) < first_) {
      firsts_.push_back({place, "first rows", std::move(row)});
    } else if (row.fate == Fate::kDroppedNoLoss || row.loss_rows == 0) {
      if (without_loss_.size() < kOdd)
        without_loss_.push_back({place, "without loss", std::move(row)});
    } else if (row.fate != Fate::kKept) {
      if (cut_.size() < kOdd) cut_.push_back({place, "longer than max_length", std::move(row)});
    } else if (longest_.size() < kOdd || row.tokens.size() > longest_.back().row.tokens.size()) {
      longest_.push_back({place, "longest", std::move(row)});
      std::sort(longest_.begin(), longest_.end(), [](const Chosen& a, const Chosen& b) {
        return a.row.tokens.size() > b.row.tokens.size();
      });
      if (longest_.size() > kOdd) longest_.pop_back();
    }
  }
  void add_error(const std::string& message) {
    ++bad_;
    if (first_error_.empty()) first_error_ = message;
  }

  ui::TokenSource source(const std::string& name, const data::Tokenizer& tokenizer,
                         std::int64_t max_length, bool ids) const {
    ui::TokenSource source{
        name,
        fmt::format("{} rows, {} tokens, {} of them with loss", rows_, tokens_, loss_tokens_),
        {}};
    if (bad_ > 0)
      source.summary += fmt::format("; {} rows that cannot be used, first: {}", bad_, first_error_);
    for (const auto* group : {&firsts_, &longest_, &cut_, &without_loss_}) {
      for (const Chosen& chosen : *group) {
        source.samples.push_back(sample_of(tokenizer, chosen.row, max_length, ids));
        source.samples.back().place = chosen.place;
        source.samples.back().why = chosen.why;
      }
    }
    return source;
  }
  std::int64_t rows() const { return rows_ + bad_; }

 private:
  struct Chosen {
    std::string place;
    const char* why;
    data::TokenizedRow row;
  };
  /// Rows shown of each kind besides the first ones.
  static constexpr std::size_t kOdd = 3;

  std::int64_t first_, rows_ = 0, tokens_ = 0, loss_tokens_ = 0, bad_ = 0;
  std::string first_error_;
  std::vector<Chosen> firsts_, longest_, cut_, without_loss_;
};

/// Reads all rows of the files and writes the page. Returns how many rows there are.
std::int64_t write_report(const TokenizeOptions& options, const config::RunConfig& config,
                          const data::Tokenizer& tokenizer, const data::Renderer& renderer,
                          const std::vector<std::string>& files,
                          const data::ReaderOptions& reader_options) {
  std::vector<ui::TokenSource> sources;
  std::int64_t rows = 0;
  for (const std::string& file : files) {
    Selection selection(options.rows);
    data::JsonlReader reader(file, reader_options);
    for (bool more = true; more;) {
      try {
        const auto item = reader.next();
        more = item.has_value();
        if (!more) break;
        for (const data::Row& row : data::sequences(item->row))
          selection.add(fmt::format("{}:{}", reader.name(), item->line), renderer.tokenize(row));
      } catch (const DataError& error) {
        selection.add_error(fmt::format("{}:{}: {}", reader.name(), reader.line(), error.what()));
      }
    }
    rows += selection.rows();
    sources.push_back(selection.source(file, tokenizer, config.data.max_length, options.ids));
  }
  files::OutputFile page(options.report);
  page.write(ui::render_token_report("Rows as the model sees them", sources));
  page.commit();
  return rows;
}

std::vector<std::string> input_files(const std::string& input) {
  std::vector<std::string> files;
  for (const std::string& path : hub::find_data(input, hub::Part::kTrain, data::is_data_file)) {
    for (std::string& file : data::expand_files(path)) files.push_back(std::move(file));
  }
  return files;
}

/// Puts the input in the place of data.train, for the names of classes. False where the rows cannot
/// be read twice, as standard input.
bool take_as_train(const std::vector<std::string>& files, config::RunConfig& config) {
  for (const std::string& file : files) {
    if (!std::filesystem::is_regular_file(file)) return false;
    config.data.train.push_back({file, 1});
  }
  return true;
}

int run(const TokenizeOptions& options, const Session& session) {
  const ConfigArguments split = split_config_arguments(options.arguments);
  config::RunConfig config =
      config::load(split.file, split.overrides, config::Completeness::kPartial);
  if (config.model.path.empty() && config.model.tokenizer.empty())
    throw ConfigError("model.path is needed: it names the tokenizer");
  if (!options.input.empty() || !options.text.empty()) config.data.train.clear();
  resolve_names(config, hub::Need::kTokenizer);
  std::vector<std::string> files;
  if (!options.input.empty() && options.text.empty()) files = input_files(options.input);
  const bool knows_labels = take_as_train(files, config);
  if (knows_labels && !config.data.train.empty())
    train::find_class_labels(config, config::Completeness::kPartial);
  if (!knows_labels) config.data.train.clear();
  const auto tokenizer = train::load_tokenizer(config).tokenizer;
  data::DatasetOptions dataset = train::dataset_options(config, train::DataPart::kTrain);
  if (!knows_labels && dataset.reader.task == data::Task::kClassification &&
      config.data.labels.empty()) {
    dataset.reader.task = data::Task::kEmbedding;  // the same tokens, whatever the label
  }
  const data::Renderer renderer(*tokenizer, dataset.rendering);
  if (options.report.empty()) session.out << ui::token_legend(session.out_has_color) << "\n\n";
  if (!options.text.empty()) {
    data::Row row;
    row.text = options.text;
    show(*tokenizer, renderer.tokenize(row), config.data.max_length, options.ids, session);
    return 0;
  }
  if (files.empty()) {
    for (const data::DataFile& file : dataset.files) files.push_back(file.path);
  }
  if (files.empty()) {
    throw ConfigError(
        "nothing to show: give --text, --input FILE, or data.train in the configuration");
  }
  const std::string names = text::list_some(files, 3);
  std::int64_t rows = 0;
  if (!options.report.empty()) {
    rows = write_report(options, config, *tokenizer, renderer, files, dataset.reader);
    session.out << options.report << "\n";
    files.clear();
  }
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
    throw_error<DataError>("{}: no row; there is nothing to show", names);
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
  command
      ->add_option("--report", options->report,
                   "A page of the first rows of each file and the odd ones")
      ->type_name("OUT.html");
  command->add_flag("--ids", options->ids, "With the id of each token");
  command->footer(
      "Example:\n"
      "  heddle tokenize model.path=models/small --input chat.jsonl --rows 1 --ids");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
