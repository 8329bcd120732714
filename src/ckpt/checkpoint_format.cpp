#include "ckpt/checkpoint_format.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "heddle-training-checkpoint";
// Raised when a reader of the version before could not read the files.
constexpr int kFormatVersion = 2;                             // 2: tensors in parts
constexpr std::uint64_t kLastStep = 999'999'999'999'999'999;  // 18 digits, as a folder's name
constexpr std::string_view kStepPrefix = "step-";
constexpr std::size_t kPieceBytes = 8 << 20;

}  // namespace

std::string step_name(std::int64_t step) { return fmt::format("{}{:08}", kStepPrefix, step); }

std::optional<std::int64_t> parse_step(const std::string& name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string digits = name.substr(kStepPrefix.size());
  const bool is_number =
      digits.size() >= 8 && digits.size() <= 18 &&
      std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number) return std::nullopt;
  return std::stoll(digits);
}

std::string to_text(const Manifest& manifest) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const ManifestFile& file : manifest.files) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3_128", file.digest}});
  }
  const bool has_metric = manifest.metric && std::isfinite(*manifest.metric);
  const nlohmann::ordered_json json = {
      {"format", kFormat},
      {"format_version", kFormatVersion},
      {"step", manifest.step},
      {"metric",
       has_metric ? nlohmann::ordered_json(*manifest.metric) : nlohmann::ordered_json(nullptr)},
      {"metric_name", manifest.metric_name},
      {"files", files}};
  return json.dump(2) + "\n";
}

namespace {

/// A number from 0 on.
std::uint64_t count_of(const Json& object, const char* key, std::uint64_t most,
                       const std::string& file) {
  const Json& value = object.at(key);
  if (!value.is_number_unsigned() || value > most) {
    throw_error<ModelError>("{}: '{}' is {}, expected a number from 0 on", file, key,
                            json::shown(value));
  }
  return value.get<std::uint64_t>();
}

ManifestFile parse_file(const Json& entry, const std::string& file) {
  ManifestFile found{entry.at("name").get<std::string>(),
                     count_of(entry, "bytes", std::numeric_limits<std::uint64_t>::max(), file),
                     entry.at("xxh3_128").get<std::string>()};
  const Path name = found.name;
  const bool is_plain = !name.empty() && name.filename() == name && name != "." && name != ".." &&
                        found.name.find('\0') == std::string::npos;
  if (!is_plain)
    throw_error<ModelError>("{}: '{}' is no plain file name", file, text::shown(found.name));
  return found;
}

Manifest parse_keys(const Json& json, const std::string& file) {
  if (json.value("format", "") != kFormat)
    throw_error<ModelError>("{}: 'format' is not '{}'", file, kFormat);
  const Json& version = json.at("format_version");
  if (!version.is_number_integer() || version < 1 || version > kFormatVersion) {
    throw_error<ModelError>(
        "{}: 'format_version' is {}, this program reads 1 to {}{}", file, json::shown(version),
        kFormatVersion,
        version.is_number_integer() && version > kFormatVersion ? ": it is of a newer one" : "");
  }
  Manifest manifest;
  manifest.step = static_cast<std::int64_t>(count_of(json, "step", kLastStep, file));
  if (!json.at("metric").is_null()) manifest.metric = json.at("metric").get<double>();
  manifest.metric_name = json.value("metric_name", "");
  if (!json.at("files").is_array()) throw_error<ModelError>("{}: 'files' is no list", file);
  std::set<std::string> names;
  for (const Json& entry : json.at("files")) {
    manifest.files.push_back(parse_file(entry, file));
    const std::string& name = manifest.files.back().name;
    if (!names.insert(name).second)
      throw_error<ModelError>("{}: '{}' stands twice", file, text::shown(name));
  }
  if (!names.contains(kStateFile))
    throw_error<ModelError>("{}: {} is not listed", file, kStateFile);
  return manifest;
}

}  // namespace

Manifest parse_manifest(const Json& json, const std::string& file) {
  try {
    return parse_keys(json, file);
  } catch (const Json::exception& error) {
    throw_error<ModelError>("{}: {}", file, text::shown(error.what()));
  }
}

Manifest read_manifest(const Path& checkpoint) {
  const Path path = checkpoint / kManifestFile;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw_error<ModelError>("{}: {} is missing: not a complete training checkpoint",
                            checkpoint.string(), kManifestFile);
  }
  Manifest manifest = parse_manifest(
      json::read_object<ModelError>(path, files::kJsonLimit, checkpoint), path.string());
  const auto named = parse_step(checkpoint.filename().string());
  if (named && *named != manifest.step) {
    throw_error<ModelError>("{}: 'step' is {}, its folder is {}", path.string(), manifest.step,
                            checkpoint.filename().string());
  }
  return manifest;
}

std::string to_text(const PartName& name) {
  return fmt::format("{}@{}:{}", name.tensor, fmt::join(name.shape, ","),
                     fmt::join(name.offset, ","));
}

PartName parse_part_name(const std::string& name, const std::vector<std::int64_t>& shape) {
  const auto at = name.rfind('@');
  if (at == std::string::npos) return {name, shape, std::vector<std::int64_t>(shape.size(), 0)};
  const auto numbers = [&](const std::string& text) {
    std::vector<std::int64_t> values;
    for (const std::string& part : text::split(text, ',')) {
      const bool is_number = !part.empty() && part.size() < 19 &&
                             part.find_first_not_of("0123456789") == std::string::npos;
      if (!is_number)
        throw_error<ModelError>("'{}' is no name of a part of a tensor", text::shown(name));
      values.push_back(std::stoll(part));
    }
    return values;
  };
  const auto colon = name.find(':', at);
  if (colon == std::string::npos) {
    throw_error<ModelError>("'{}' is no name of a part of a tensor", text::shown(name));
  }
  PartName part = {name.substr(0, at), numbers(name.substr(at + 1, colon - at - 1)),
                   numbers(name.substr(colon + 1))};
  if (part.shape.size() != shape.size() || part.offset.size() != shape.size()) {
    throw_error<ModelError>("'{}' does not fit a part with {} dimensions", text::shown(name),
                            shape.size());
  }
  return part;
}

std::vector<Path> find_checkpoints(const Path& directory) {
  std::vector<std::pair<std::int64_t, Path>> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const auto step = parse_step(entry.path().filename().string());
    if (step && entry.is_directory(error)) found.emplace_back(*step, entry.path());
  }
  std::sort(found.begin(), found.end());
  std::vector<Path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::string digest_of(const Path& path, const std::stop_token& stop) {
  const files::MappedFile map(path, path.parent_path());
  const auto bytes = map.bytes();
  hash::Hasher hasher;
  for (std::size_t begin = 0; begin < bytes.size(); begin += kPieceBytes) {
    if (stop.stop_requested()) throw_error<Error>("{}: no longer read", path.string());
    const std::size_t count = std::min(kPieceBytes, bytes.size() - begin);
    hasher.append({reinterpret_cast<const char*>(bytes.data()) + begin, count});
    map.drop(begin, count);
  }
  return hasher.hex();
}

void check_file(const Path& checkpoint, const ManifestFile& file, bool contents,
                const std::stop_token& stop) {
  const Path path = checkpoint / file.name;
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) throw_error<ModelError>("{}: {} is missing", checkpoint.string(), file.name);
  if (bytes != file.bytes) {
    throw_error<ModelError>("{}: {} has {} bytes, expected {}", checkpoint.string(), file.name,
                            bytes, file.bytes);
  }
  if (!contents) return;
  const std::string digest = digest_of(path, stop);
  if (digest != file.digest) {
    throw_error<ModelError>("{}: {} is damaged: its xxh3-128 is {}, expected {}",
                            checkpoint.string(), file.name, digest, file.digest);
  }
}

}  // namespace heddle::ckpt
