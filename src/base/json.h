#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"

/// JSON of strangers: model configurations, indices, tokenizers, rows, checkpoints.
namespace heddle::json {

/// Bounds of a text. Nothing real comes near; recursive code that prints or copies a value
/// relies on the depth.
struct Limits {
  std::size_t depth = 64;          ///< of lists and objects in each other
  std::size_t values = 8'000'000;  ///< of all kinds together
  std::size_t key_bytes = 1 << 16;
  std::size_t digits = 4300;  ///< of one number; Python's limit
  /// An integer beyond 64 bits becomes a binary value with its digits and subtype kDigits; without,
  /// the nearest float.
  bool keeps_big_integers = false;
};
inline constexpr std::uint64_t kDigits = 1;

/// The value of a text (Json: nlohmann::ordered_json, or nlohmann::json where keys are looked up by
/// the thousand). Linear in the text. Throws DataError with reason and place in the text ("column
/// 7", or "line 2, column 7"), for an object that has a key twice and for what exceeds the limits
/// too.
template <class Json = nlohmann::ordered_json>
Json parse(std::string_view text, const Limits& limits = {});

/// As parse(), with the reader's class of error and `where` (a file) before the reason.
template <class E, class Json = nlohmann::ordered_json>
Json parse_as(std::string_view text, const std::string& where, const Limits& limits = {}) {
  try {
    return parse<Json>(text, limits);
  } catch (const DataError& error) {
    throw_error<E>("{}: {}", where, error.what());
  }
}

/// The object that a file holds. Throws E, and as files::read().
template <class E, class Json = nlohmann::ordered_json>
Json read_object(const files::Path& path, const files::Limit& limit = files::kJsonLimit,
                 const files::Path& folder = {}) {
  Json value = parse_as<E, Json>(files::read(path, limit, folder), path.string());
  if (!value.is_object()) throw_error<E>("{}: must hold a JSON object", path.string());
  return value;
}

/// A value as part of a message: its text, quoted and cut as text::shown() does.
std::string shown(const nlohmann::ordered_json& value);

}  // namespace heddle::json
