// Names of a classifier's classes in config.json: id2label and label2id, as transformers writes
// them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::ckpt {

/// The names by number; empty where the file has none, or not one for each number from 0. Throws
/// ModelError for an id2label that is no object of texts.
std::vector<std::string> label_names(const nlohmann::ordered_json& config,
                                     const std::string& source);

/// Whether the names say no more than the numbers: LABEL_0, LABEL_1, ..., which transformers writes
/// where nobody gave others.
bool are_placeholders(const std::vector<std::string>& names);

/// The file beside an adapter that has what config.json has of a classifier: PEFT keeps no names.
inline constexpr const char* kLabelNamesFile = "id2label.json";

/// The names that an adapter directory has; empty without its file. Throws ModelError.
std::vector<std::string> label_names_of_adapter(const std::filesystem::path& directory);

/// The text of that file.
std::string label_names_text(const std::vector<std::string>& names);

/// Writes `names`; without them what is there stays if it has `count` entries, else placeholders
/// are written.
void set_label_names(nlohmann::ordered_json& config, std::vector<std::string> names,
                     std::int64_t count);

}  // namespace heddle::ckpt
