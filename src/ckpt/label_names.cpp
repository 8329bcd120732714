#include "ckpt/label_names.h"

#include <charconv>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "ckpt/model_directory.h"

namespace heddle::ckpt {
namespace {

using nlohmann::ordered_json;

std::string placeholder(std::size_t number) { return fmt::format("LABEL_{}", number); }

/// The number that a key writes as std::to_string() does.
std::optional<std::size_t> number_of(const std::string& key) {
  std::size_t number = 0;
  const char* const end = key.data() + key.size();
  const auto read = std::from_chars(key.data(), end, number);
  if (read.ec != std::errc() || read.ptr != end || (key.front() == '0' && key.size() > 1))
    return std::nullopt;
  return number;
}

}  // namespace

std::vector<std::string> label_names(const ordered_json& config, const std::string& source) {
  const auto found = config.find("id2label");
  if (found == config.end() || found->is_null()) return {};
  const auto fail = [&](const std::string& what) {
    throw_error<ModelError>(
        "{}: id2label {}: expected an object that gives the number of each class its name", source,
        what);
  };
  if (!found->is_object()) fail(fmt::format("is a JSON {}", found->type_name()));
  // Keys are different, so that as many numbers below the count are all of them. An object in order
  // looks a key up by going through all.
  std::vector<std::string> names(found->size());
  bool has_all = true;
  for (const auto& [key, name] : found->items()) {
    const std::optional<std::size_t> number = number_of(key);
    if (!number || *number >= names.size()) {
      has_all = false;
      continue;
    }
    if (!name.is_string()) fail(fmt::format("has {} for class {}", name.dump(), *number));
    names[*number] = name.get<std::string>();
  }
  if (!has_all) names.clear();
  return names;
}

std::vector<std::string> label_names_of_adapter(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / kLabelNamesFile;
  if (!std::filesystem::exists(file)) return {};
  return label_names(read_json_object(file), file.string());
}

std::string label_names_text(const std::vector<std::string>& names) {
  ordered_json config;
  set_label_names(config, names, std::ssize(names));
  return config.dump(2) + "\n";
}

bool are_placeholders(const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] != placeholder(i)) return false;
  }
  return true;
}

void set_label_names(ordered_json& config, std::vector<std::string> names, std::int64_t count) {
  if (names.empty()) {
    const auto given = config.find("id2label");
    if (given != config.end() && std::ssize(*given) == count) return;
    for (std::int64_t i = 0; i < count; ++i)
      names.push_back(placeholder(static_cast<std::size_t>(i)));
  }
  ordered_json::object_t id2label, label2id;  // appended to: operator[] goes through all
  std::unordered_map<std::string, std::size_t> places;
  for (std::size_t i = 0; i < names.size(); ++i) {
    id2label.emplace_back(std::to_string(i), names[i]);
    const auto [place, is_new] = places.try_emplace(names[i], label2id.size());
    if (is_new) {
      label2id.emplace_back(names[i], i);
    } else {
      (label2id.begin() + static_cast<std::ptrdiff_t>(place->second))->second = i;
    }
  }
  config["id2label"] = std::move(id2label);
  config["label2id"] = std::move(label2id);
}

}  // namespace heddle::ckpt
