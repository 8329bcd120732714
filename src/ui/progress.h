#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ui/metrics.h"

namespace heddle::ui {

/// How and how often progress is shown.
struct ProgressStyle {
  bool is_live = false;  ///< one line that is drawn again; else plain lines
  bool has_color = false;
  int width = 0;          ///< columns of a live line; 0 asks the terminal each time
  double interval_s = 1;  ///< least time between two showings
  std::int64_t every =
      1;  ///< plain lines: only steps that are a multiple of it, the first and the last

  /// Style that fits the standard error: live, coloured and 10 times a second on a terminal; plain
  /// lines elsewhere.
  static ProgressStyle detect(std::int64_t every = 1);
};

/// Contents of one line. `facts` stand in the order of importance: those that do not fit are left
/// out from the end.
struct ProgressLine {
  std::string label;
  double done = 0;
  double total = 0;  ///< 0: not known, then neither bar nor time left
  std::string unit;  ///< "rows"; "" for training steps; "%" shows the share only
  std::vector<std::string> facts;
  std::optional<double> seconds_left;
};

/// A live line of at most `width` columns: "sft ━━━━╸     120/1000  loss 2.3145  ...  3 min 20 s
/// left".
std::string render_live(const ProgressLine& line, int width, bool has_color);
/// The line for a log file: "sft 120/1000 (12 %)  loss 2.3145  ...".
std::string render_plain(const ProgressLine& line);

/// "loss 2.3145", "lr 1.95e-04", "grad norm 0.83", "12.4 k tokens/s", "41 % of speed of light",
/// "5.2 GiB", ...
std::vector<std::string> facts_of(const StepMetrics& metrics);

/// Shows how far a piece of work is. Messages of heddle::log scroll by above the live line. Not for
/// several threads.
class Progress {
 public:
  /// `total` 0 where it is not known. `start` is what an earlier run had done, for the time left.
  Progress(std::string label, std::int64_t total, ProgressStyle style, std::string unit = {},
           std::int64_t start = 0);
  /// Takes the live line away.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows the state if the style's interval has passed, and always the last one.
  void update(std::int64_t done, std::vector<std::string> facts = {});
  void update(const StepMetrics& metrics) { update(metrics.step, facts_of(metrics)); }
  /// Leaves the last state as a plain line and ends the display.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  ProgressLine line_of(std::int64_t done, std::vector<std::string> facts) const;

  std::string label_;
  std::int64_t total_;
  ProgressStyle style_;
  std::string unit_;
  std::int64_t start_;
  Clock::time_point began_ = Clock::now();
  std::optional<Clock::time_point> shown_;
  std::optional<ProgressLine> pending_;  // the newest state, not yet shown as a plain line
};

}  // namespace heddle::ui
