#include "ui/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "ui/terminal.h"

namespace heddle::ui {
namespace {

constexpr int kLongestBar = 28;
constexpr int kShortestBar = 8;

double fraction(const ProgressLine& line) {
  return line.total > 0 ? std::clamp(line.done / line.total, 0., 1.) : 0;
}

std::string count_text(const ProgressLine& line) {
  const auto number = [&](double x) {
    return line.unit.empty() || x < 1e5 ? fmt::format("{:.0f}", x) : text::format_count(x);
  };
  if (line.unit == "%") return fmt::format("{:.0f} %", std::floor(100 * fraction(line)));
  std::string out = number(line.done);
  if (line.total > 0) out += "/" + number(line.total);
  return line.unit.empty() ? out : out + " " + line.unit;
}

std::string bar(double part, int width, bool has_color) {
  const int halves = static_cast<int>(part * 2 * width);
  std::string full, rest;
  for (int i = 0; i < halves / 2; ++i) full += "━";
  if (halves % 2 == 1) full += "╸";
  for (int i = (halves + 1) / 2; i < width; ++i) rest += "─";
  return paint(full, Color::kGreen, has_color) + paint(rest, Color::kDim, has_color);
}

/// How far the weights that drew tokens and those in training are apart, by the age of the tokens
/// where they have several.
std::string mismatch_of(const StepMetrics& m) {
  std::string_view name = metric::kMismatchK3OfAge.name;
  name.remove_suffix(1);  // the part's place
  std::vector<std::string> ages;
  for (const char* age : {"0", "1", "2"}) {
    const double* k3 = m.extra(std::string(name) + age);
    if (k3 == nullptr) continue;
    ages.push_back(fmt::format("age {}{} {:.2g}", age, *age == '2' ? "+" : "", *k3));
  }
  if (!ages.empty()) return "mismatch " + text::join(ages, ", ");
  const double* k3 = m.extra(metric::kMismatchK3);
  return k3 != nullptr ? fmt::format("mismatch {:.2g}", *k3) : "";
}

}  // namespace

ProgressStyle ProgressStyle::detect(std::int64_t every) {
  ProgressStyle style;
  style.is_live = is_terminal(STDERR_FILENO);
  style.has_color = uses_color(STDERR_FILENO);
  style.interval_s = style.is_live ? 0.1 : 1;
  style.every = std::max<std::int64_t>(1, every);
  return style;
}

std::vector<std::string> facts_of(const StepMetrics& m) {
  std::vector<std::string> facts;
  if (const double* reward = m.extra(metric::kRewardMean))
    facts.push_back(fmt::format("reward {:.3f}", *reward));
  facts.push_back(fmt::format("loss {:.4f}", m.loss));
  if (const double* length = m.extra(metric::kLengthMean))
    facts.push_back(fmt::format("length {:.1f}", *length));
  if (m.extra(metric::kRewardMean) != nullptr) {
    if (const double* entropy = m.extra(metric::kEntropy))
      facts.push_back(fmt::format("entropy {:.2f}", *entropy));
    if (const double* kl = m.extra(metric::kKl)) facts.push_back(fmt::format("kl {:.2g}", *kl));
    if (const double* oldest = m.extra(metric::kStalenessMax); oldest != nullptr && *oldest > 0)
      facts.push_back(fmt::format("staleness {:.0f}", *oldest));
  }
  if (const double* idle = m.extra(metric::kIdleTrainer))
    facts.push_back(fmt::format("idle {:.0f} %", 100 * *idle));
  if (const double* seconds = m.extra(metric::kSyncSeconds))
    facts.push_back(fmt::format("sync {:.3g} s", *seconds));
  if (const std::string mismatch = mismatch_of(m); !mismatch.empty()) facts.push_back(mismatch);
  if (const double* ranks = m.extra(metric::kRolloutRanks))
    facts.push_back(fmt::format("{:.0f} rollout{}", *ranks, *ranks == 1 ? "" : "s"));
  if (const double* eval = m.extra(metric::kEvalLoss))
    facts.push_back(fmt::format("eval loss {:.4f}", *eval));
  facts.push_back(fmt::format("lr {:.2e}", m.lr));
  facts.push_back(fmt::format("grad norm {:.3g}", m.grad_norm));
  facts.push_back(fmt::format("{} tokens/s", text::format_count(m.tokens_per_s)));
  if (m.mfu > 0) facts.push_back(fmt::format("{:.0f} % of speed of light", 100 * m.mfu));
  if (m.memory_bytes > 0) facts.push_back(text::format_bytes(static_cast<double>(m.memory_bytes)));
  return facts;
}

std::string render_live(const ProgressLine& line, int width, bool has_color) {
  const std::string count = count_text(line);
  const std::string left =
      line.seconds_left ? text::format_duration(*line.seconds_left) + " left" : std::string();
  std::string out = paint(line.label, Color::kBold, has_color);
  int used = display_width(line.label) + 1 + display_width(count);
  const auto fits = [&](const std::string& text) {
    return used + 2 + display_width(text) <= width;
  };
  // Loss and time left come before a long bar, the bar before the remaining facts.
  std::vector<std::string> facts;
  std::size_t next = 0;
  const auto take = [&](std::size_t until) {
    for (; next < std::min(until, line.facts.size()) && fits(line.facts[next]); ++next) {
      used += 2 + display_width(line.facts[next]);
      facts.push_back(line.facts[next]);
    }
  };
  take(1);
  const bool has_left = !left.empty() && fits(left);
  if (has_left) used += 2 + display_width(left);
  const bool has_bar = line.total > 0 && used + 1 + kShortestBar <= width;
  if (has_bar) used += 1 + kShortestBar;
  if (next == 1 || line.facts.empty()) take(line.facts.size());
  if (has_bar) {
    const int bar_width = std::min(kLongestBar, kShortestBar + std::max(0, width - used));
    out += " " + bar(fraction(line), bar_width, has_color);
  }
  out += " " + count;
  for (std::size_t i = 0; i < facts.size(); ++i) {
    out += "  " + paint(facts[i], i == 0 ? Color::kCyan : Color::kNone, has_color);
  }
  if (has_left) out += "  " + paint(left, Color::kDim, has_color);
  return fit(out, width);
}

std::string render_plain(const ProgressLine& line) {
  std::string out = line.label + " " + count_text(line);
  if (line.total > 0 && line.unit != "%")
    out += fmt::format(" ({:.0f} %)", std::floor(100 * fraction(line)));
  for (const std::string& fact : line.facts) out += "  " + fact;
  if (line.seconds_left && line.done < line.total) {
    out += "  " + text::format_duration(*line.seconds_left) + " left";
  }
  return out;
}

Progress::Progress(std::string label, std::int64_t total, ProgressStyle style, std::string unit,
                   std::int64_t start)
    : label_(std::move(label)),
      total_(total),
      style_(style),
      unit_(std::move(unit)),
      start_(start) {}

Progress::~Progress() {
  if (style_.is_live) log::set_live("");
}

ProgressLine Progress::line_of(std::int64_t done, std::vector<std::string> facts) const {
  ProgressLine line{label_, static_cast<double>(done), static_cast<double>(total_),
                    unit_,  std::move(facts),          {}};
  if (total_ > 0 && done > start_) {
    const double seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    line.seconds_left = seconds / static_cast<double>(done - start_) *
                        static_cast<double>(std::max<std::int64_t>(0, total_ - done));
  }
  return line;
}

void Progress::update(std::int64_t done, std::vector<std::string> facts) {
  pending_ = line_of(done, std::move(facts));
  const auto now = Clock::now();
  const bool is_first = !shown_;
  const bool is_last = total_ > 0 && done >= total_;
  const bool is_due =
      is_first || std::chrono::duration<double>(now - *shown_).count() >= style_.interval_s;
  if (style_.is_live) {
    if (!is_due && !is_last) return;
    // The last column stays free: some terminals break the line when it is filled.
    const int width = style_.width > 0 ? style_.width : terminal_width(STDERR_FILENO) - 1;
    log::set_live(render_live(*pending_, width, style_.has_color));
  } else {
    if (!is_first && !is_last && (!is_due || done % style_.every != 0)) return;
    log::info("{}", render_plain(*pending_));
    pending_.reset();
  }
  shown_ = now;
}

void Progress::finish() {
  if (style_.is_live) log::set_live("");
  if (pending_) log::info("{}", render_plain(*pending_));
  pending_.reset();
}

}  // namespace heddle::ui
