#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::cli {

/// Means of metrics over the rows of groups, in the order in which metrics and
/// groups came first. The group "" holds all rows.
class MetricTable {
 public:
  /// One row's value of a metric.
  void add(const std::string& group, const std::string& metric, double value, double weight = 1);
  /// Replaces the mean of a metric by what it becomes, such as exp() of a loss, or gives a figure
  /// of all rows together.
  void set(const std::string& group, const std::string& metric, double value);

  /// Names of the metrics, and the mean of one over all rows.
  const std::vector<std::string>& metrics() const { return metrics_; }
  double mean(const std::string& metric) const;

  std::string to_json() const;
  /// A table with a line for each group and a column for each metric.
  std::string to_text(bool has_color, int width) const;

 private:
  struct Mean {
    double sum = 0, weight = 0;
    std::int64_t rows = 0;
    double value() const { return weight > 0 ? sum / weight : 0; }
  };
  /// Rows of a group: of the metric that has a value for most of them.
  std::int64_t rows(const std::string& group) const;
  Mean& at(const std::string& group, const std::string& metric);

  std::vector<std::string> groups_ = {""}, metrics_;
  std::map<std::pair<std::string, std::string>, Mean> means_;
};

/// Overlap of the words of two texts as SQuAD counts it, 0 to 1: without case,
/// punctuation and English articles.
double word_f1(const std::string& answer, const std::string& truth);
/// word_f1() of the right answer, or of the best of a list of right answers.
double best_word_f1(const std::string& answer, const nlohmann::ordered_json& truth);

}  // namespace heddle::cli
