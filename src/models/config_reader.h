#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/config.h"

namespace heddle::models {

/// Reads keys of one JSON object, remembers in `defaulted` every value that the file does not give,
/// and throws ModelError that names file and key.
class ConfigReader {
 public:
  /// Above any number of a model; what comes near makes an infinity of a product.
  static constexpr double kLargestNumber = 1e15;

  /// `source` names the file in messages. Both references must outlive the reader.
  ConfigReader(const Json& json, std::string source, std::vector<std::string>& defaulted)
      : json_(json), source_(std::move(source)), defaulted_(defaulted) {}

  const Json& json() const { return json_; }
  const std::string& source() const { return source_; }
  bool has(const char* key) const;
  /// From 1 to a number far above that of any model, by the kind of the key.
  std::int64_t positive(const char* key, std::int64_t fallback);
  double number(const char* key, double fallback);
  /// A number that a computation divides by or takes the root of.
  double above_zero(const char* key, double fallback);
  bool boolean(const char* key, bool fallback);
  /// One integer from 0 on or a list of them; empty if it is missing.
  std::vector<std::int64_t> integers(const char* key) const;
  /// Throws if the file gives another value than the only one that is built.
  void require(const char* key, const Json& built) const;
  [[noreturn]] void fail(const char* key, const std::string& expected) const;

  /// Reads `rope_parameters`, `rope_scaling` or the object itself.
  const Json* rope(const char* key) const;
  /// Above zero, and `most` at most.
  double rope_number(const char* key, double fallback, double most = kLargestNumber);
  /// Works as integers().
  std::vector<std::int64_t> rope_integers(const char* key) const;
  /// Throws if positions are scaled (rope_type yarn, dynamic, ...).
  void require_plain_rope() const;

 private:
  std::vector<std::int64_t> integers_of(const char* key, const Json& value) const;

  const Json& json_;
  std::string source_;
  std::vector<std::string>& defaulted_;
};

/// Reads keys that all families spell alike; `text` is the object of the text model: norms,
/// initialisation and labels.
void read_common(ConfigReader& text, const Json& top, Config& config);

/// The object of the text model: `text_config` of a nested configuration, else `top` itself. Throws
/// ModelError if it is missing.
const Json& text_of(const Json& top, const Config& config, const std::string& source);

/// Reads `mrope_section` where the file gives it, else takes `fallback`.
void read_mrope_section(const ConfigReader& text, std::vector<std::int64_t> fallback,
                        Config& config);

/// By layer, with `decoder_sparse_step` and `mlp_only_layers`: whether it has experts.
std::vector<bool> read_sparse_layers(ConfigReader& text, std::int64_t layers);

/// Throws ModelError if `small` does not divide `large`, the values of these keys.
void require_divides(const std::string& source, const char* small, std::int64_t a,
                     const char* large, std::int64_t b);
/// Throws ModelError if the dims contradict each other.
void check_dims(const Config& config, const std::string& source);

}  // namespace heddle::models
