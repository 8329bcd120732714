#pragma once

// Inside src/config only: how each C++ type of a key is read from YAML, written as JSON and named
// to the user.

#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/text.h"
#include "config/field.h"

namespace heddle::config {

[[noreturn]] inline void mismatch(std::string expected, const YAML::Node& node,
                                  std::string hint = {}) {
  throw BadValue{std::move(expected), describe(node), std::move(hint)};
}

/// The number a scalar spells, all of it; false if it does not.
template <class T>
bool parse_number(const YAML::Node& node, T& value) {
  if (!node.IsScalar()) return false;
  const std::string& text = node.Scalar();
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

/// Bounds of a number. An open bound excludes the value itself.
struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;
  bool high_open = false;

  bool holds(double x) const {
    return (low_open ? x > low : x >= low) && (high_open ? x < high : x <= high);
  }
  /// " >= 0", " in [0, 1)", or "" without bounds.
  std::string text() const {
    if (std::isfinite(low) && std::isfinite(high)) {
      return fmt::format(" in {}{}, {}{}", low_open ? '(' : '[', low, high, high_open ? ')' : ']');
    }
    if (std::isfinite(low)) return fmt::format(" {} {}", low_open ? ">" : ">=", low);
    if (std::isfinite(high)) return fmt::format(" {} {}", high_open ? "<" : "<=", high);
    return "";
  }
};
inline Range at_least(double low) { return {.low = low}; }
inline Range above(double low) { return {.low = low, .low_open = true}; }
inline Range within(double low, double high) { return {.low = low, .high = high}; }
inline Range from_up_to(double low, double high) {
  return {.low = low, .high = high, .high_open = true};
}

template <class T>
struct Codec;

template <>
struct Codec<bool> {
  static std::string type(const Range&) { return "true|false"; }
  static bool read(const YAML::Node& node, const Range& range) {
    if (node.IsScalar()) {
      const std::string& text = node.Scalar();
      if (text == "true" || text == "True") return true;
      if (text == "false" || text == "False") return false;
    }
    mismatch(type(range), node);
  }
  static Json write(bool value) { return value; }
};

template <std::integral T>
requires(!std::same_as<T, bool>) struct Codec<T> {
  static std::string type(const Range& range) { return "integer" + range.text(); }
  static T read(const YAML::Node& node, const Range& range) {
    T value{};
    if (!parse_number(node, value) || !range.holds(static_cast<double>(value))) {
      mismatch("an " + type(range), node);
    }
    return value;
  }
  static Json write(T value) { return value; }
};

template <>
struct Codec<double> {
  static std::string type(const Range& range) { return "number" + range.text(); }
  static double read(const YAML::Node& node, const Range& range) {
    double value{};
    if (!parse_number(node, value) || !std::isfinite(value) || !range.holds(value)) {
      mismatch("a " + type(range), node);
    }
    return value;
  }
  static Json write(double value) { return value; }
};

template <>
struct Codec<std::string> {
  static std::string type(const Range&) { return "text"; }
  static std::string read(const YAML::Node& node, const Range&) {
    if (node.IsNull()) return "";
    if (!node.IsScalar()) mismatch("text", node);
    return node.Scalar();
  }
  static Json write(const std::string& value) { return value; }
};

/// Advice for a value that other programs have, "" if it is none that is known.
std::string hint_for_foreign_value(std::string_view value);

template <NamedEnum E>
struct Codec<E> {
  static std::string type(const Range&) { return fmt::format("{}", fmt::join(kNames<E>, "|")); }
  static E read(const YAML::Node& node, const Range& range) {
    std::string hint;
    if (node.IsScalar()) {
      for (std::size_t i = 0; i < kNames<E>.size(); ++i) {
        if (kNames<E>[i] == node.Scalar()) return static_cast<E>(i);
      }
      hint = hint_for_foreign_value(node.Scalar());
      if (hint.empty()) {
        hint = text::nearest(node.Scalar(), {kNames<E>.begin(), kNames<E>.end()});
        if (!hint.empty()) hint = fmt::format("did you mean '{}'?", hint);
      }
    }
    mismatch(type(range), node, hint);
  }
  static Json write(E value) { return std::string(to_string(value)); }
};

/// None: auto.
template <NamedEnum E>
struct Codec<std::optional<E>> {
  static std::string type(const Range& range) { return Codec<E>::type(range) + "|auto"; }
  static std::optional<E> read(const YAML::Node& node, const Range& range) {
    if (node.IsScalar() && node.Scalar() == "auto") return std::nullopt;
    try {
      return Codec<E>::read(node, range);
    } catch (BadValue& bad) {
      bad.expected = type(range);
      throw;
    }
  }
  static Json write(std::optional<E> value) {
    return value ? Codec<E>::write(*value) : Json("auto");
  }
};

template <>
struct Codec<std::optional<double>> {
  static std::string type(const Range& range) { return Codec<double>::type(range) + "|none"; }
  static std::optional<double> read(const YAML::Node& node, const Range& range) {
    if (node.IsNull() || (node.IsScalar() && node.Scalar() == "none")) return std::nullopt;
    try {
      return Codec<double>::read(node, range);
    } catch (BadValue& bad) {
      bad.expected = "a " + type(range);
      throw;
    }
  }
  static Json write(std::optional<double> value) { return value ? Json(*value) : Json("none"); }
};

template <>
struct Codec<std::array<double, 2>> {
  static std::string type(const Range& range) { return "[number, number]" + range.text(); }
  static std::array<double, 2> read(const YAML::Node& node, const Range& range) {
    std::array<double, 2> pair{};
    bool fits = node.IsSequence() && node.size() == 2;
    for (std::size_t i = 0; fits && i < 2; ++i) {
      fits = parse_number(node[i], pair[i]) && range.holds(pair[i]);
    }
    if (!fits) mismatch(fmt::format("two numbers{}, as in [0.9, 0.999]", range.text()), node);
    return pair;
  }
  static Json write(const std::array<double, 2>& value) { return value; }
};

template <>
struct Codec<std::vector<std::int64_t>> {
  static std::string type(const Range& range) { return "list of integers" + range.text(); }
  static std::vector<std::int64_t> read(const YAML::Node& node, const Range& range) {
    std::vector<std::int64_t> list;
    if (node.IsNull()) return list;
    if (!node.IsSequence()) return {Codec<std::int64_t>::read(node, range)};
    for (const YAML::Node& item : node) list.push_back(Codec<std::int64_t>::read(item, range));
    return list;
  }
  static Json write(const std::vector<std::int64_t>& value) { return value; }
};

template <>
struct Codec<std::vector<std::string>> {
  static std::string type(const Range&) { return "list of texts"; }
  static std::vector<std::string> read(const YAML::Node& node, const Range&) {
    std::vector<std::string> list;
    if (node.IsNull()) return list;
    if (node.IsScalar()) return {node.Scalar()};
    if (!node.IsSequence()) mismatch("a list of texts", node);
    for (const YAML::Node& item : node) {
      if (!item.IsScalar()) mismatch("texts in the list", item);
      list.push_back(item.Scalar());
    }
    return list;
  }
  static Json write(const std::vector<std::string>& value) { return value; }
};

template <>
struct Codec<std::vector<DataSource>> {
  static std::string type(const Range&) { return "path, list of paths or of {path, weight}"; }
  static std::vector<DataSource> read(const YAML::Node& node, const Range& range) {
    std::vector<DataSource> list;
    if (node.IsNull()) return list;
    if (!node.IsSequence()) return {read_one(node, range)};
    for (const YAML::Node& item : node) list.push_back(read_one(item, range));
    return list;
  }
  /// Plain paths where no weight says otherwise, so that a dump reads as the user would write it.
  static Json write(const std::vector<DataSource>& value) {
    Json list = Json::array();
    for (const DataSource& source : value) {
      if (source.weight == 1) {
        list.push_back(source.path);
      } else {
        list.push_back({{"path", source.path}, {"weight", source.weight}});
      }
    }
    return list;
  }

 private:
  static DataSource read_one(const YAML::Node& node, const Range& range) {
    DataSource source;
    if (node.IsScalar()) {
      source.path = node.Scalar();
    } else if (node.IsMap()) {
      for (const auto& entry : node) {
        const std::string key = entry.first.Scalar();
        if (key == "path" && entry.second.IsScalar()) {
          source.path = entry.second.Scalar();
        } else if (key == "weight") {
          source.weight = Codec<double>::read(entry.second, at_least(0));
        } else {
          throw BadValue{"{path: text, weight: number >= 0}", "'" + key + "' in the mapping", ""};
        }
      }
    }
    if (source.path.empty()) mismatch("a " + type(range), node);
    return source;
  }
};

template <>
struct Codec<DeviceName> {
  static std::string type(const Range&) { return "cpu|cuda[:N]|npu[:N]"; }
  static DeviceName read(const YAML::Node& node, const Range& range) {
    DeviceName device;
    if (!node.IsScalar() || !parse(node.Scalar(), device)) mismatch(type(range), node);
    return device;
  }
  static Json write(const DeviceName& value) { return to_string(value); }
  static bool parse(std::string_view text, DeviceName& device);
};

template <>
struct Codec<Degree> {
  static std::string type(const Range& range) {
    return Codec<std::int64_t>::type(range) + " or auto";
  }
  static Degree read(const YAML::Node& node, const Range& range) {
    if (node.IsScalar() && node.Scalar() == "auto") return {0};
    Degree degree;
    if (!parse_number(node, degree.value) || !range.holds(static_cast<double>(degree.value))) {
      mismatch("an " + type(range), node);
    }
    return degree;
  }
  static Json write(const Degree& value) {
    return value.is_auto() ? Json("auto") : Json(value.value);
  }
};

/// A count of bytes: an integer, or a number with a unit (5GB, 512MiB).
struct Bytes {
  std::int64_t count = 0;
};
template <>
struct Codec<Bytes> {
  static std::string type(const Range&) { return "bytes, as 5GB or 512MiB"; }
  static Bytes read(const YAML::Node& node, const Range& range);
  static Json write(Bytes value);
};

template <>
struct Codec<Scalar> {
  static std::string type(const Range&) { return "text, number or true|false"; }
  static Scalar read(const YAML::Node& node, const Range& range);
  static Json write(const Scalar& value);
};

}  // namespace heddle::config
