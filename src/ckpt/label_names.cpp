#include "ckpt/label_names.h"

#include "base/errors.h"

namespace heddle::ckpt {
namespace {

using nlohmann::ordered_json;

std::string placeholder(std::size_t number) { return fmt::format("LABEL_{}", number); }

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
  std::vector<std::string> names;
  for (std::size_t i = 0; i < found->size(); ++i) {
    const auto name = found->find(std::to_string(i));
    if (name == found->end()) return {};
    if (!name->is_string()) fail(fmt::format("has {} for class {}", name->dump(), i));
    names.push_back(name->get<std::string>());
  }
  return names;
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
  ordered_json id2label = ordered_json::object(), label2id = ordered_json::object();
  for (std::size_t i = 0; i < names.size(); ++i) {
    id2label[std::to_string(i)] = names[i];
    label2id[names[i]] = i;
  }
  config["id2label"] = std::move(id2label);
  config["label2id"] = std::move(label2id);
}

}  // namespace heddle::ckpt
