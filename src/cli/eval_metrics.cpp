#include "cli/eval_metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <set>

#include "data/jinja/python_text.h"
#include "data/json/json_text.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

std::vector<std::string> words_of(const std::string& text) {
  std::string kept;
  std::ranges::copy_if(text, std::back_inserter(kept), [](unsigned char c) {
    return c >= 0x80 || std::ispunct(c) == 0;  // SQuAD's punctuation is ASCII's
  });
  namespace python = data::jinja::python_text;
  std::vector<std::string> words = python::split(python::lower(kept), {}, -1, /*from_right=*/false);
  std::erase_if(
      words, [](const std::string& word) { return word == "a" || word == "an" || word == "the"; });
  return words;
}

double harmonic(double precision, double recall) {
  return precision + recall > 0 ? 2 * precision * recall / (precision + recall) : 0;
}

}  // namespace

MetricTable::Mean& MetricTable::at(const std::string& group, const std::string& metric) {
  const auto note = [](std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  note(groups_, group);
  note(metrics_, metric);
  return means_[{group, metric}];
}

void MetricTable::add(const std::string& group, const std::string& metric, double value,
                      double weight) {
  const auto count = [&](const std::string& name) {
    Mean& mean = at(name, metric);
    mean.sum += value * weight;
    mean.weight += weight;
    ++mean.rows;
  };
  count("");
  if (!group.empty()) count(group);
}

void MetricTable::set(const std::string& group, const std::string& metric, double value) {
  Mean& mean = at(group, metric);
  mean.sum = value;
  mean.weight = 1;
}

double MetricTable::mean(const std::string& metric) const {
  return means_.at({std::string(), metric}).value();
}

std::int64_t MetricTable::rows(const std::string& group) const {
  std::int64_t most = 0;
  for (const std::string& metric : metrics_) {
    const auto found = means_.find({group, metric});
    if (found != means_.end()) most = std::max(most, found->second.rows);
  }
  return most;
}

std::string MetricTable::to_json() const {
  nlohmann::ordered_json json;
  for (const std::string& group : groups_) {
    nlohmann::ordered_json values;
    for (const std::string& metric : metrics_) {
      const auto found = means_.find({group, metric});
      if (found == means_.end()) continue;
      values[metric] = found->second.value();
      values["rows"] = rows(group);
    }
    if (group.empty()) {
      json = values;
    } else {
      json["groups"][group] = values;
    }
  }
  return json.dump(2);
}

std::string MetricTable::to_text(bool has_color, int width) const {
  std::vector<std::string> headers = {"group", "rows"};
  std::vector<ui::Align> alignments = {ui::Align::kLeft, ui::Align::kRight};
  for (const std::string& metric : metrics_) {
    headers.push_back(metric);
    alignments.push_back(ui::Align::kRight);
  }
  ui::Table table(headers, alignments);
  const auto line = [&](const std::string& group) {
    std::vector<std::string> cells = {group.empty() ? "all" : group, ""};
    for (const std::string& metric : metrics_) {
      const auto found = means_.find({group, metric});
      cells.push_back(found == means_.end() ? "" : fmt::format("{:.4f}", found->second.value()));
    }
    cells[1] = std::to_string(rows(group));
    table.row(cells);
  };
  for (std::size_t i = 1; i < groups_.size(); ++i) line(groups_[i]);
  line("");
  return table.render(ui::TableStyle::kPlain, has_color, width);
}

double word_f1(const std::string& answer, const std::string& truth) {
  const std::vector<std::string> said = words_of(answer), right = words_of(truth);
  if (said.empty() || right.empty()) return said.empty() && right.empty() ? 1 : 0;
  std::map<std::string, std::int64_t> left;
  for (const std::string& word : right) ++left[word];
  double shared = 0;
  for (const std::string& word : said) {
    if (auto found = left.find(word); found != left.end() && found->second > 0) {
      --found->second;
      ++shared;
    }
  }
  return harmonic(shared / static_cast<double>(said.size()),
                  shared / static_cast<double>(right.size()));
}

double best_word_f1(const std::string& answer, const nlohmann::ordered_json& truth) {
  if (!truth.is_array()) {
    return word_f1(answer,
                   truth.is_string() ? truth.get<std::string>() : data::json_text::dump(truth));
  }
  double best = 0;
  for (const nlohmann::ordered_json& one : truth) best = std::max(best, best_word_f1(answer, one));
  return best;
}

}  // namespace heddle::cli
