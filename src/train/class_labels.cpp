#include "train/class_labels.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/text.h"
#include "ckpt/label_names.h"
#include "ckpt/model_directory.h"
#include "config/config.h"
#include "config/objective.h"
#include "data/readers/jsonl_reader.h"
#include "train/setup.h"

namespace heddle::train {
namespace {

/// A text, or a number of JSON, which is no class's name.
struct Label {
  std::string text;
  bool is_json_number = false;
};

bool is_all_digits(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

/// Digits say as numbers do that classes are numbers.
bool is_number(const Label& label) { return label.is_json_number || is_all_digits(label.text); }

/// The label of a row's JSON; nothing where the row is to be left out as a bad one, or has none or
/// one that is neither text nor number, which is named when the row is tokenised.
std::optional<Label> label_of(const std::string& row, const data::Place& place,
                              const data::DatasetOptions& rows) {
  try {
    const auto value = data::parse_json_line(row, place, rows.reader);
    const auto label = value.find(rows.reader.fields.label);
    if (label == value.end()) return std::nullopt;
    if (label->is_number()) return Label{label->dump(), true};
    if (!label->is_string()) return std::nullopt;
    auto text = label->get<std::string>();
    if (text.empty()) {
      throw_error<DataError>("{}:{}: field '{}': is empty, expected the label of a class",
                             place.file, place.line, rows.reader.fields.label);
    }
    return Label{std::move(text)};
  } catch (const DataError&) {
    if (rows.bad_rows == data::BadRowPolicy::kError) throw;
    return std::nullopt;
  }
}

/// Calls `use` with each label of the training rows, until it returns false. Rows that cannot be
/// handed over are named, or left out, when they are tokenised.
template <class Use>
void each_label(const data::DatasetOptions& rows, Use use) {
  for (const data::DataFile& file : rows.files) {
    if (file.weight == 0) continue;
    const auto records = data::RecordReader::open(file.path, rows.reader.max_line_bytes);
    std::string row;
    for (;;) {
      try {
        if (!records->next(row)) break;
      } catch (const data::UnusableRow&) {
        continue;
      }
      const data::Place place{records->name(), records->line()};
      const std::optional<Label> label = label_of(row, place, rows);
      if (label && !use(*label, place)) return;
    }
  }
}

std::optional<Label> first_label(const data::DatasetOptions& rows) {
  std::optional<Label> first;
  each_label(rows, [&](const Label& label, const data::Place&) {
    first = label;
    return false;
  });
  return first;
}

/// The labels if they are texts, else nothing. Throws DataError for numbers among texts: the number
/// of a class means nothing before the classes have numbers.
std::vector<std::string> sorted_labels(const data::DatasetOptions& rows) {
  std::set<std::string> labels;
  std::optional<bool> are_numbers;
  each_label(rows, [&](const Label& label, const data::Place& place) {
    if (are_numbers.value_or(label.is_json_number) != label.is_json_number) {
      throw_error<DataError>(
          "{}:{}: field '{}': {} is a {}, but labels before it are {}: write all of one kind, or "
          "name the classes in data.labels",
          place.file, place.line, rows.reader.fields.label, text::shown(label.text),
          label.is_json_number ? "number" : "text", *are_numbers ? "numbers" : "texts");
    }
    are_numbers = label.is_json_number;
    if (label.is_json_number) return true;
    labels.insert(label.text);
    if (labels.size() > kMostClasses) {
      throw_error<DataError>(
          "{}:{}: field '{}': the rows have more than {} different labels; is it the field of the "
          "classes (data.fields.label)? Name them in data.labels if they are so many",
          place.file, place.line, rows.reader.fields.label, kMostClasses);
    }
    return true;
  });
  return {labels.begin(), labels.end()};
}

std::string numbered(const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < names.size(); ++i)
    parts.push_back(fmt::format("{} = {}", i, names[i]));
  return text::list_some(parts, 20);
}

/// The file that names the classes which a model knows already: of the adapter that the run goes on
/// from where it has one, else config.json.
std::filesystem::path file_of_names(const config::RunConfig& config) {
  const std::filesystem::path of_adapter =
      std::filesystem::path(config.adapter.path) / ckpt::kLabelNamesFile;
  if (!config.adapter.path.empty() && std::filesystem::exists(of_adapter)) return of_adapter;
  return std::filesystem::path(config.model.path) / "config.json";
}

/// The model's names of its classes, if there are as many as the run's.
std::vector<std::string> known_labels(const config::RunConfig& config,
                                      const std::filesystem::path& file) {
  if (config.model.path.empty() || !std::filesystem::exists(file)) return {};
  std::vector<std::string> known = ckpt::label_names(ckpt::read_json_object(file), file.string());
  const bool is_of_size =
      config.model.num_labels == 0 || config.model.num_labels == std::ssize(known);
  if (!is_of_size || known.size() < 2) known.clear();
  return known;
}

/// The head's outputs keep their places: the same names in another order would turn them round.
void require_known_order(const config::RunConfig& config) {
  const std::filesystem::path file = file_of_names(config);
  std::vector<std::string> known = known_labels(config, file), given = config.data.labels;
  if (known == given) return;
  std::vector<std::string> sorted = known;
  std::ranges::sort(sorted);
  std::ranges::sort(given);
  if (sorted != given) return;
  throw_error<ConfigError>(
      "{}: has the classes of {} in another order, which would give each the output of another: "
      "leave it out, or write [{}]",
      config::where(config, "data.labels"), file.string(), text::join(known, ", "));
}

/// Whether each class is named as its number: such names say no more than the numbers.
bool are_numbers(const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] != std::to_string(i)) return false;
  }
  return true;
}

void require_different(const std::vector<std::string>& names, const std::string& file) {
  std::set<std::string_view> seen;
  for (const std::string& name : names) {
    if (seen.insert(name).second) continue;
    throw_error<ModelError>(
        "{}: id2label: '{}' is the name of two classes; name the classes in data.labels", file,
        text::shown(name));
  }
}

/// Whether rows whose first label is this one have the model's names. Where names are digits, rows
/// by number have them too, as when a row is read.
bool takes_known(const std::vector<std::string>& known, const Label& first) {
  if (known.empty()) return false;
  if (is_number(first)) return !are_numbers(known) && std::ranges::any_of(known, is_all_digits);
  return std::ranges::find(known, first.text) != known.end() || !ckpt::are_placeholders(known);
}

}  // namespace

void find_class_labels(config::RunConfig& config, config::Completeness completeness) {
  if (config::objective_of(config) != config::Objective::kClassification ||
      config.model.num_labels == 1) {
    return;
  }
  if (!config.data.labels.empty()) return require_known_order(config);
  const bool is_partial = completeness == config::Completeness::kPartial;
  data::DatasetOptions rows = dataset_options(config, DataPart::kTrain);
  if (is_partial) rows.bad_rows = data::BadRowPolicy::kSkip;
  data::require_files(rows);
  const std::filesystem::path file = file_of_names(config);
  std::vector<std::string> known = known_labels(config, file);
  const std::optional<Label> found_first = first_label(rows);
  if (is_partial && !found_first) return;
  const Label first = found_first.value_or(Label{"0", true});
  std::string from;
  if (takes_known(known, first)) {
    require_different(known, file.string());
    from = file.filename() == ckpt::kLabelNamesFile ? "the adapter" : "the model's config.json";
    config.data.labels = std::move(known);
  } else if (is_number(first) && (config.model.num_labels != 0 || !known.empty())) {
    // Rows by number: final/ keeps the names that the model has.
    if (config.model.num_labels == 0) config.model.num_labels = std::ssize(known);
    return;
  } else if (!is_number(first)) {
    from = "data.train, sorted";
    config.data.labels = sorted_labels(rows);
    const std::string found = numbered(config.data.labels);
    const std::int64_t count = std::ssize(config.data.labels);
    const bool fits =
        count >= 2 && (config.model.num_labels == 0 || config.model.num_labels == count);
    if (!fits && !is_partial) {
      throw_error<ConfigError>(
          "{}: data.train has {} different labels ({}), model.num_labels is {}: name all classes "
          "in data.labels",
          config::where(config, "model.head"), count, found, config.model.num_labels);
    }
  } else {
    if (is_partial) return;
    sorted_labels(rows);  // names a text among the numbers
    throw_error<ConfigError>(
        "{}: classify needs model.num_labels >= 1, as the labels of data.train are numbers",
        config::where(config, "model.head"));
  }
  // One class would be regression.
  config.model.num_labels = std::max<std::int64_t>(std::ssize(config.data.labels), 2);
  log::info("labels, from {}: {}", from, numbered(config.data.labels));
}

}  // namespace heddle::train
