#include "train/class_labels.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "ckpt/label_names.h"
#include "ckpt/model_directory.h"
#include "config/config.h"
#include "config/objective.h"
#include "data/readers/jsonl_reader.h"
#include "train/setup.h"

namespace heddle::train {
namespace {

bool is_number(const std::string& label) {
  return !label.empty() && label.find_first_not_of("0123456789") == std::string::npos;
}

/// The label of a row's JSON, "0" for a number, which says as digits do that classes are numbers;
/// nothing where the row has none, or is a bad one that is to be left out.
std::optional<std::string> label_of(const std::string& row, const data::Place& place,
                                    const data::DatasetOptions& rows) {
  try {
    const auto value = data::parse_json_line(row, place, rows.reader);
    const auto label = value.find(rows.reader.fields.label);
    if (label == value.end()) return std::nullopt;
    return label->is_string() ? label->get<std::string>() : "0";
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
      const std::optional<std::string> label = label_of(row, place, rows);
      if (label && !use(*label, place)) return;
    }
  }
}

std::optional<std::string> first_label(const data::DatasetOptions& rows) {
  std::optional<std::string> first;
  each_label(rows, [&](const std::string& label, const data::Place&) {
    first = label;
    return false;
  });
  return first;
}

std::vector<std::string> sorted_labels(const data::DatasetOptions& rows) {
  std::set<std::string> labels;
  each_label(rows, [&](const std::string& label, const data::Place& place) {
    labels.insert(label);
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

}  // namespace

void find_class_labels(config::RunConfig& config) {
  if (config::objective_of(config) != config::Objective::kClassification ||
      config.model.num_labels == 1 || !config.data.labels.empty()) {
    return;
  }
  const data::DatasetOptions rows = dataset_options(config, DataPart::kTrain);
  data::require_files(rows);
  const std::filesystem::path file = std::filesystem::path(config.model.path) / "config.json";
  std::vector<std::string> known;
  if (std::filesystem::exists(file))
    known = ckpt::label_names(ckpt::read_json_object(file), file.string());
  const bool is_of_size =
      config.model.num_labels == 0 || config.model.num_labels == std::ssize(known);
  if (!is_of_size || known.size() < 2) known.clear();
  const std::string first = first_label(rows).value_or("0");
  const bool knows_first = std::find(known.begin(), known.end(), first) != known.end();
  std::string from;
  if (knows_first || (!is_number(first) && !known.empty() && !ckpt::are_placeholders(known))) {
    from = "the model's config.json";
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
    if (count < 2 || (config.model.num_labels != 0 && config.model.num_labels != count)) {
      throw_error<ConfigError>(
          "{}: data.train has {} different labels ({}), model.num_labels is {}: name all classes "
          "in data.labels",
          config::where(config, "model.head"), count, found, config.model.num_labels);
    }
  } else {
    throw_error<ConfigError>(
        "{}: classify needs model.num_labels >= 1, as the labels of data.train are numbers",
        config::where(config, "model.head"));
  }
  config.model.num_labels = std::ssize(config.data.labels);
  log::info("labels, from {}: {}", from, numbered(config.data.labels));
}

}  // namespace heddle::train
