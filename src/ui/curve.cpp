#include "ui/curve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/html.h"

namespace heddle::ui {
namespace {

using Point = std::pair<double, double>;

// The drawing area in units of the view box; the page scales it to the width it has.
constexpr double kWidth = 640, kHeight = 250, kLeft = 62, kRight = 14, kTop = 12, kBottom = 30;
constexpr std::size_t kColumns = 280;     // two points each: about one a unit
constexpr std::size_t kSmoothFrom = 60;   // fewer points are readable as they are
constexpr std::size_t kSmoothShare = 80;  // of the points, on each side

struct Bounds {
  double x_low = std::numeric_limits<double>::infinity();
  double x_high = -std::numeric_limits<double>::infinity();
  double y_low = std::numeric_limits<double>::infinity();
  double y_high = -std::numeric_limits<double>::infinity();

  bool is_empty() const { return !(x_low <= x_high && y_low <= y_high); }
  double x(double value) const {
    return kLeft + (value - x_low) / (x_high - x_low) * (kWidth - kLeft - kRight);
  }
  double y(double value) const {
    return kTop + (y_high - value) / (y_high - y_low) * (kHeight - kTop - kBottom);
  }
};

Bounds bounds_of(const Curve& curve) {
  Bounds b;
  for (const Series& series : curve.series) {
    for (const auto& [x, y] : series.points) {
      if (!std::isfinite(y)) continue;
      b.x_low = std::min(b.x_low, x);
      b.x_high = std::max(b.x_high, x);
      b.y_low = std::min(b.y_low, y);
      b.y_high = std::max(b.y_high, y);
    }
  }
  if (b.is_empty()) return b;
  if (b.x_low == b.x_high) b.x_high = b.x_low + 1;
  // A flat curve lies in the middle; others touch the frame with a little air.
  const double air =
      b.y_high > b.y_low ? 0.05 * (b.y_high - b.y_low) : std::max(std::abs(b.y_low) * 0.1, 1e-12);
  if (b.y_low < 0 || b.y_low - air >= 0) b.y_low -= air;
  b.y_high += air;
  return b;
}

std::string path_of(std::span<const Point> points, const Bounds& bounds) {
  std::string out;
  bool is_down = false;
  for (const auto& [x, y] : points) {
    if (!std::isfinite(y)) {
      is_down = false;
      continue;
    }
    out += fmt::format("{}{:.1f} {:.1f}", is_down ? "L" : "M", bounds.x(x), bounds.y(y));
    is_down = true;
  }
  return out;
}

std::string number(double value) {
  const double size = std::abs(value);
  if (size != 0 && (size < 1e-3 || size >= 1e7)) return fmt::format("{:.3g}", value);
  if (size >= 1e4) return fmt::format("{:.4g}k", value / 1e3);
  return fmt::format("{:.4g}", value);
}

std::string axes(const Bounds& bounds) {
  std::string out;
  for (const double tick : round_ticks(bounds.y_low, bounds.y_high, 5)) {
    if (tick < bounds.y_low || tick > bounds.y_high) continue;
    const double y = bounds.y(tick);
    out += fmt::format(
        "<line class='grid' x1='{:.1f}' x2='{:.1f}' y1='{:.1f}' y2='{:.1f}'/>"
        "<text x='{:.1f}' y='{:.1f}' text-anchor='end'>{}</text>",
        kLeft, kWidth - kRight, y, y, kLeft - 8, y + 4, number(tick));
  }
  for (const double tick : round_ticks(bounds.x_low, bounds.x_high, 6)) {
    if (tick < bounds.x_low || tick > bounds.x_high) continue;
    out += fmt::format("<text x='{:.1f}' y='{:.1f}' text-anchor='middle'>{}</text>", bounds.x(tick),
                       kHeight - kBottom + 18, number(tick));
  }
  return out;
}

/// [[x, y], ...] of the drawn points for the script that shows the value under the pointer.
std::string data_of(std::span<const Point> points) {
  std::string out = "[";
  for (const auto& [x, y] : points) {
    if (!std::isfinite(y)) continue;
    out += fmt::format("{}[{},{:.6g}]", out.size() > 1 ? "," : "", x, y);
  }
  return out + "]";
}

void add(std::vector<Curve>& curves, Curve curve) {
  std::erase_if(curve.series, [](const Series& s) { return s.points.empty(); });
  if (!curve.series.empty()) curves.push_back(std::move(curve));
}

}  // namespace

std::vector<Point> thin_out(std::span<const Point> points, std::size_t columns) {
  if (points.size() <= 2 * columns) return {points.begin(), points.end()};
  std::vector<Point> out;
  for (std::size_t i = 0; i < columns; ++i) {
    const auto bucket =
        points.subspan(points.size() * i / columns,
                       points.size() * (i + 1) / columns - points.size() * i / columns);
    const auto [low, high] = std::ranges::minmax_element(bucket, {}, &Point::second);
    out.push_back(low <= high ? *low : *high);
    out.push_back(low <= high ? *high : *low);
  }
  return out;
}

std::vector<Point> smooth(std::span<const Point> points, std::size_t window) {
  // Prefix sums over the finite values.
  std::vector<std::pair<double, double>> sums = {{0, 0}};  // sum, count
  for (const auto& [x, y] : points) {
    const bool is_finite = std::isfinite(y);
    sums.emplace_back(sums.back().first + (is_finite ? y : 0),
                      sums.back().second + (is_finite ? 1 : 0));
  }
  std::vector<Point> out;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const auto& [low_sum, low_count] = sums[i - std::min(window, i)];
    const auto& [high_sum, high_count] = sums[std::min(i + window + 1, points.size())];
    const auto& [x, y] = points[i];
    out.emplace_back(x, std::isfinite(y) ? (high_sum - low_sum) / (high_count - low_count) : y);
  }
  return out;
}

std::vector<double> round_ticks(double low, double high, int count) {
  if (!(high > low) || count < 1) return {low};
  const double raw = (high - low) / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {1., 2., 5.}) {
    if (factor * power >= raw) {
      step = factor * power;
      break;
    }
  }
  if (!(step > 0)) return {low};  // less than the smallest number
  std::vector<double> ticks;
  const double first = std::ceil(low / step - 1e-9);
  // Neighbours among the numbers have none between them, and adding 1 may change nothing.
  for (int n = 0; n <= count + 1; ++n) {
    const double i = first + n, tick = i == 0 ? 0. : i * step;
    if (tick > high + 1e-9 * step || (!ticks.empty() && tick <= ticks.back())) break;
    ticks.push_back(tick);
  }
  return ticks;
}

std::vector<Curve> curves_of(std::span<const StepMetrics> rows) {
  Curve loss{"Loss", "", {{"training"}, {"evaluation", {}, Drawing::kSparse}}};
  Curve lr{"Learning rate", "", {{"lr", {}, Drawing::kExact}}};
  Curve norm{"Gradient norm", "before clipping", {{"grad norm"}}};
  Curve speed{"Speed", "tokens/s", {{"tokens/s"}}};
  std::vector<Curve> others;
  for (const StepMetrics& row : rows) {
    const auto x = static_cast<double>(row.step);
    if (row.step > 0) {
      loss.series[0].points.emplace_back(x, row.loss);
      lr.series[0].points.emplace_back(x, row.lr);
      norm.series[0].points.emplace_back(x, row.grad_norm);
      speed.series[0].points.emplace_back(x, row.tokens_per_s);
    }
    for (const auto& [name, value] : row.extras) {
      if (name == "eval_loss") {
        loss.series[1].points.emplace_back(x, value);
        continue;
      }
      auto found = std::ranges::find(others, name, &Curve::title);
      if (found == others.end()) {
        const bool is_eval = name.starts_with("eval_");
        others.push_back({name, "", {{name, {}, is_eval ? Drawing::kSparse : Drawing::kNoisy}}});
        found = others.end() - 1;
      }
      found->series[0].points.emplace_back(x, value);
    }
  }
  std::vector<Curve> curves;
  for (Curve* curve : {&loss, &lr, &norm, &speed}) add(curves, std::move(*curve));
  for (Curve& curve : others) add(curves, std::move(curve));
  return curves;
}

std::string render_svg(const Curve& curve) {
  const Bounds bounds = bounds_of(curve);
  std::string out =
      fmt::format("<svg viewBox='0 0 {} {}' role='img' aria-label='{}' data-x='{},{},{},{}'>",
                  kWidth, kHeight, escape_html(curve.title), kLeft, kWidth - kRight,
                  bounds.is_empty() ? 0 : bounds.x_low, bounds.is_empty() ? 1 : bounds.x_high);
  if (bounds.is_empty()) {
    return out +
           fmt::format("<text x='{}' y='{}' text-anchor='middle'>no finite values</text></svg>",
                       kWidth / 2, kHeight / 2);
  }
  out += axes(bounds);
  for (std::size_t i = 0; i < curve.series.size(); ++i) {
    const Series& series = curve.series[i];
    const auto drawn = thin_out(series.points, kColumns);
    const bool is_smoothed =
        series.drawing == Drawing::kNoisy && series.points.size() >= kSmoothFrom;
    auto line = drawn;
    if (is_smoothed) {
      out += fmt::format("<path class='raw s{}' d='{}'/>", i + 1, path_of(drawn, bounds));
      line = thin_out(smooth(series.points, series.points.size() / kSmoothShare), kColumns);
    }
    out += fmt::format("<path class='line s{}' d='{}' data-name='{}' data-points='{}'/>", i + 1,
                       path_of(line, bounds), escape_html(series.name), data_of(drawn));
    if (series.drawing != Drawing::kSparse && series.points.size() > 1) continue;
    for (const auto& [x, y] : drawn) {
      if (!std::isfinite(y)) continue;
      out += fmt::format("<circle class='s{}' cx='{:.1f}' cy='{:.1f}' r='3.5'/>", i + 1,
                         bounds.x(x), bounds.y(y));
    }
  }
  out += fmt::format("<line class='cursor' y1='{}' y2='{}' x1='-9' x2='-9'/></svg>", kTop,
                     kHeight - kBottom);
  return out;
}

}  // namespace heddle::ui
