#include "serve/metrics/registry.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/errors.h"

namespace heddle::serve {
namespace {

std::string escaped(const std::string& text, bool is_label) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && is_label) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
  return out;
}

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

std::string shown(const Labels& labels) {
  std::string out;
  for (const auto& [name, value] : labels)
    out += fmt::format("{}{}=\"{}\"", out.empty() ? "{" : ",", name, escaped(value, true));
  return out.empty() ? out : out + "}";
}

}  // namespace

void Registry::declare(const std::string& name, Family family) {
  const std::lock_guard lock(mutex_);
  if (!families_.emplace(name, std::move(family)).second)
    throw_error<InternalError>("the metric {} is declared twice", name);
}

void Registry::declare_counter(const std::string& name, const std::string& help) {
  declare(name, {Kind::kCounter, help, {}, {}});
}

void Registry::declare_gauge(const std::string& name, const std::string& help) {
  declare(name, {Kind::kGauge, help, {}, {}});
}

void Registry::declare_histogram(const std::string& name, const std::string& help,
                                 std::vector<double> bounds) {
  declare(name, {Kind::kHistogram, help, std::move(bounds), {}});
}

Registry::Family& Registry::family(const std::string& name, Kind kind) {
  const auto found = families_.find(name);
  if (found == families_.end() || found->second.kind != kind)
    throw_error<InternalError>("the metric {} is not declared so", name);
  return found->second;
}

void Registry::add(const std::string& counter, const Labels& labels, double count) {
  const std::lock_guard lock(mutex_);
  family(counter, Kind::kCounter).series[labels].value += count;
}

void Registry::set(const std::string& gauge, const Labels& labels, double value) {
  const std::lock_guard lock(mutex_);
  family(gauge, Kind::kGauge).series[labels].value = value;
}

void Registry::clear(const std::string& gauge) {
  const std::lock_guard lock(mutex_);
  family(gauge, Kind::kGauge).series.clear();
}

void Registry::observe(const std::string& histogram, const Labels& labels, double value) {
  const std::lock_guard lock(mutex_);
  Family& known = family(histogram, Kind::kHistogram);
  Series& series = known.series[labels];
  series.buckets.resize(known.bounds.size() + 1);
  series.value += value;
  for (std::size_t i = 0; i < known.bounds.size(); ++i)
    series.buckets[i] += value <= known.bounds[i];
  ++series.buckets.back();
}

std::string Registry::text() const {
  const std::lock_guard lock(mutex_);
  std::string out;
  for (const auto& [name, family] : families_) {
    const char* const kind = family.kind == Kind::kCounter ? "counter"
                             : family.kind == Kind::kGauge ? "gauge"
                                                           : "histogram";
    out +=
        fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, escaped(family.help, false), name, kind);
    for (const auto& [labels, series] : family.series) {
      if (family.kind != Kind::kHistogram) {
        out += fmt::format("{}{} {}\n", name, shown(labels), number(series.value));
        continue;
      }
      for (std::size_t i = 0; i < series.buckets.size(); ++i) {
        Labels bucket = labels;
        bucket["le"] = i < family.bounds.size() ? number(family.bounds[i]) : "+Inf";
        out += fmt::format("{}_bucket{} {}\n", name, shown(bucket), series.buckets[i]);
      }
      out += fmt::format("{}_sum{} {}\n{}_count{} {}\n", name, shown(labels), number(series.value),
                         name, shown(labels), series.buckets.back());
    }
  }
  return out;
}

}  // namespace heddle::serve
