#include "ui/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/html.h"
#include "base/text.h"
#include "ui/curve.h"
#include "ui/report_page.h"

namespace heddle::ui {
namespace {

std::string tile(const std::string& name, const std::string& value) {
  return fmt::format(
      "<div class='card tile'><div class='soft'>{}</div><div class='value'>{}</div></div>\n",
      escape_html(name), escape_html(value));
}

/// The mean of the last tenth (at least one) of the losses: one noisy step says little.
double last_loss(std::span<const StepMetrics> rows) {
  const std::size_t count = std::max<std::size_t>(1, rows.size() / 10);
  double sum = 0;
  for (const StepMetrics& row : rows.last(count)) sum += row.loss;
  return sum / static_cast<double>(count);
}

std::string tiles(const ReportFacts& facts, std::span<const StepMetrics> rows) {
  std::string out = "<div class='grid tiles'>\n";
  // Step 0 is an evaluation before training.
  const std::span<const StepMetrics> steps =
      !rows.empty() && rows.front().step == 0 ? rows.subspan(1) : rows;
  if (!steps.empty()) {
    double seconds = 0, tokens = 0, best_eval = std::nan("");
    for (const StepMetrics& row : rows) {
      seconds += row.step_s;
      tokens += static_cast<double>(row.tokens);
      if (const double* eval = row.extra(metric::kEvalLoss))
        best_eval = std::fmin(best_eval, *eval);
    }
    out += tile("Steps", fmt::format("{}", steps.back().step));
    out += tile("Loss, first → last",
                fmt::format("{:.3f} → {:.3f}", steps.front().loss, last_loss(steps)));
    if (!std::isnan(best_eval))
      out += tile("Best evaluation loss", fmt::format("{:.4f}", best_eval));
    out += tile("Tokens", text::format_count(tokens));
    if (seconds > 0) {
      out += tile("Tokens/s, mean", text::format_count(tokens / seconds));
      out += tile("Time in steps", text::format_duration(seconds));
    }
  }
  for (const auto& [name, value] : facts.figures) out += tile(name, value);
  return out + "</div>\n";
}

std::string charts(std::span<const StepMetrics> rows) {
  const std::vector<Curve> curves = curves_of(rows);
  if (curves.empty()) return "<p class='soft'>No step has been recorded yet.</p>\n";
  std::string out = "<div class='grid charts'>\n";
  for (const Curve& curve : curves) {
    std::string key;
    for (std::size_t i = 0; curve.series.size() > 1 && i < curve.series.size(); ++i) {
      key +=
          fmt::format("<span class='key s{}'></span>{}", i + 1, escape_html(curve.series[i].name));
    }
    if (key.empty()) key = escape_html(curve.unit);
    out += fmt::format(
        "<div class='card'><div class='head'><h3>{}</h3><span class='soft "
        "readout'>{}</span></div>{}"
        "</div>\n",
        escape_html(curve.title), key, render_svg(curve));
  }
  return out + "</div>\n";
}

std::string samples(const ReportFacts& facts) {
  std::string out;
  for (const ReportSample& sample : facts.samples) {
    out += fmt::format(
        "<div class='card block'><div class='label'>Prompt</div><pre>{}</pre>"
        "<div class='grid pair'><div><div class='label'>Before</div><pre>{}</pre></div>"
        "<div class='after'><div class='label'>After</div><pre>{}</pre></div></div></div>\n",
        escape_html(sample.prompt), escape_html(sample.before), escape_html(sample.after));
  }
  return out;
}

std::string table_html(const ReportTable& table) {
  std::string body =
      table.is_drawing ? "<div class='scroll'><table style='font-family:monospace;white-space:pre'>"
                       : "<div class='scroll'><table>";
  const auto row = [&](const std::vector<std::string>& cells, const char* tag) {
    body += "<tr>";
    for (const std::string& cell : cells)
      body += fmt::format("<{0}>{1}</{0}>", tag, escape_html(cell));
    body += "</tr>\n";
  };
  if (!table.headers.empty()) row(table.headers, "th");
  for (const auto& cells : table.rows) row(cells, "td");
  body += "</table></div>";
  const std::string title = escape_html(table.title);
  if (table.is_folded) {
    return fmt::format("<details class='card'><summary>{}</summary>{}</details>\n", title, body);
  }
  return fmt::format("<div class='card block'><h3>{}</h3>{}</div>\n", title, body);
}

}  // namespace

std::string render_report(const ReportFacts& facts, std::span<const StepMetrics> rows,
                          const GroupSamples& groups) {
  const std::string title = escape_html(facts.title.empty() ? "Heddle run" : facts.title);
  std::string out = fmt::format(
      "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
      "<meta name='viewport' content='width=device-width, initial-scale=1'>\n<title>{}</title>\n"
      "<style>{}</style>\n</head>\n<body>\n<main>\n<h1>{}</h1>\n<div class='soft'>{}</div>\n",
      title, kReportStyle, title, escape_html(facts.status));
  if (!facts.command.empty()) {
    out += fmt::format("<div class='soft'><code>{}</code></div>\n", escape_html(facts.command));
  }
  for (const std::string& warning : facts.warnings) {
    out += fmt::format("<div class='warning'>{}</div>\n", escape_html(warning));
  }
  out += tiles(facts, rows);
  out += "<h2>Curves</h2>\n" + charts(rows);
  if (!facts.samples.empty()) out += "<h2>Generated text</h2>\n" + samples(facts);
  out += render_groups(groups);
  if (!facts.tables.empty()) out += "<h2>Details</h2>\n";
  for (const ReportTable& table : facts.tables) out += table_html(table);
  return out + fmt::format("</main>\n<script>{}</script>\n</body>\n</html>\n", kReportScript);
}

}  // namespace heddle::ui
