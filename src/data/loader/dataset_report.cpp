#include <algorithm>

#include "base/text.h"
#include "data/loader/dataset.h"

namespace heddle::data {
namespace {

constexpr std::size_t kExamples = 5;

}  // namespace

void DatasetReport::add(const DatasetReport& other) {
  lines += other.lines;
  blank_lines += other.blank_lines;
  rows += other.rows;
  tokens += other.tokens;
  loss_tokens += other.loss_tokens;
  longest_row = std::max(longest_row, other.longest_row);
  bad_rows += other.bad_rows;
  dropped_long += other.dropped_long;
  truncated += other.truncated;
  split += other.split;
  dropped_no_loss += other.dropped_no_loss;
  cut_tokens += other.cut_tokens;
  for (const std::string& example : other.bad_examples) {
    if (bad_examples.size() < kExamples) bad_examples.push_back(example);
  }
}

nlohmann::json DatasetReport::to_json() const {
  return {{"lines", lines},
          {"blank_lines", blank_lines},
          {"rows", rows},
          {"tokens", tokens},
          {"loss_tokens", loss_tokens},
          {"longest_row", longest_row},
          {"bad_rows", bad_rows},
          {"dropped_long", dropped_long},
          {"truncated", truncated},
          {"split", split},
          {"dropped_no_loss", dropped_no_loss},
          {"cut_tokens", cut_tokens},
          {"bad_examples", bad_examples}};
}

DatasetReport DatasetReport::from_json(const nlohmann::json& value) {
  DatasetReport report;
  value.at("lines").get_to(report.lines);
  value.at("blank_lines").get_to(report.blank_lines);
  value.at("rows").get_to(report.rows);
  value.at("tokens").get_to(report.tokens);
  value.at("loss_tokens").get_to(report.loss_tokens);
  value.at("longest_row").get_to(report.longest_row);
  value.at("bad_rows").get_to(report.bad_rows);
  value.at("dropped_long").get_to(report.dropped_long);
  value.at("truncated").get_to(report.truncated);
  value.at("split").get_to(report.split);
  value.at("dropped_no_loss").get_to(report.dropped_no_loss);
  value.at("cut_tokens").get_to(report.cut_tokens);
  value.at("bad_examples").get_to(report.bad_examples);
  return report;
}

std::string DatasetReport::summary() const {
  return fmt::format("{} rows, {} tokens ({:.0f} % with loss)", rows,
                     text::format_count(static_cast<double>(tokens)),
                     tokens > 0
                         ? 100.0 * static_cast<double>(loss_tokens) / static_cast<double>(tokens)
                         : 0.0) +
         left_out();
}

std::string DatasetReport::left_out() const {
  std::string line;
  const auto mention = [&](std::int64_t count, const char* what) {
    if (count > 0) line += fmt::format(", {} {}", count, what);
  };
  mention(blank_lines, "blank lines");
  mention(bad_rows, "bad rows skipped");
  mention(dropped_long, "dropped as too long");
  mention(split, "split into several");
  mention(truncated, "cut to max_length");
  mention(dropped_no_loss, "dropped without a loss token");
  return line;
}

}  // namespace heddle::data
