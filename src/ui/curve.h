#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ui/metrics.h"

namespace heddle::ui {

/// How the points of a series are drawn: noisy ones faint under their moving mean, exact ones as
/// they are, sparse ones (evaluations) with dots.
enum class Drawing { kNoisy, kExact, kSparse };

/// One line of a chart. Not-finite values leave a gap.
struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points = {};  ///< x ascending
  Drawing drawing = Drawing::kNoisy;
};

struct Curve {
  std::string title;
  std::string unit;
  std::vector<Series> series;
};

/// Loss with evaluation loss, learning rate, gradient norm, tokens/s, and one chart for each
/// further extra.
std::vector<Curve> curves_of(std::span<const StepMetrics> rows);

/// At most `columns` buckets, each as its least and its greatest point, so that peaks stay visible.
std::vector<std::pair<double, double>> thin_out(std::span<const std::pair<double, double>> points,
                                                std::size_t columns);
/// Centred moving mean over up to `window` points each side, fewer near the ends so that it never
/// lags.
std::vector<std::pair<double, double>> smooth(std::span<const std::pair<double, double>> points,
                                              std::size_t window);
/// About `count` round values (1, 2 or 5 times a power of ten) that cover [low, high].
std::vector<double> round_ticks(double low, double high, int count);

/// The chart as an SVG element, coloured by the page's style sheet; its points also as data-* for
/// the page's script.
std::string render_svg(const Curve& curve);

}  // namespace heddle::ui
