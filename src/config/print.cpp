#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/secret.h"
#include "base/text.h"
#include "config/config.h"
#include "config/field.h"

namespace heddle::config {
namespace {

constexpr std::size_t kCommentColumn = 36;

/// Whether a text can stand unquoted in block and flow YAML and be read back as the same text.
bool is_plain(const std::string& text) {
  if (text.empty() || text.front() == ' ' || text.back() == ' ') return false;
  const bool is_safe = std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) || c >= 0x80 ||
           std::string_view("_-./:+@%= *").find(c) != std::string_view::npos;
  });
  if (!is_safe || text.find(": ") != std::string::npos || text.back() == ':') return false;
  if (std::string_view("-.:%@*=").find(text.front()) != std::string_view::npos &&
      !(text.front() == '.' && text.size() > 1 && (text[1] == '/' || text[1] == '.'))) {
    return false;
  }
  // Other YAML readers take these as booleans, nothing or numbers.
  std::string lower = text;
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* word : {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}) {
    if (lower == word) return false;
  }
  return !std::isdigit(static_cast<unsigned char>(text.front())) && text.front() != '+';
}

std::string indent(const std::string& section_key) {
  return std::string(2 * static_cast<std::size_t>(std::ranges::count(section_key, '.')), ' ');
}

std::string last_part(const std::string& key) { return key.substr(key.rfind('.') + 1); }

/// "  key: value", with a comment in its column if there is one.
std::string line(const std::string& indentation, const std::string& text,
                 const std::string& comment) {
  std::string out = indentation + text;
  if (!comment.empty()) {
    out.resize(std::max(out.size() + 2, kCommentColumn), ' ');
    out += "# " + comment;
  }
  return out + "\n";
}

std::string dump(const RunConfig& config, bool is_reference) {
  std::string out;
  for (const Section& section : schema()) {
    const std::string outer = indent(section.key);
    const std::string inner = outer + "  ";
    const Json open = section.open ? section.open->get(config) : Json::object();
    if (section.fields.empty() && open.empty() && !is_reference) continue;
    if (is_reference && outer.empty() && !out.empty()) out += "\n";
    if (is_reference) out += fmt::format("{}# {}\n", outer, section.doc);
    out += fmt::format("{}{}:\n", outer, last_part(section.key));
    for (const Field& field : section.fields) {
      const std::string comment =
          is_reference
              ? fmt::format("[{}{}] {}", field.type, field.required ? ", required" : "", field.doc)
              : "";
      out +=
          line(inner, fmt::format("{}: {}", last_part(field.key), to_flow_yaml(field.get(config))),
               comment);
    }
    for (const auto& [name, value] : open.items()) {
      out += line(inner, fmt::format("{}: {}", to_flow_yaml(name), to_flow_yaml(value)), "");
    }
    if (is_reference && section.open) {
      out += line(inner, fmt::format("# {}: {}", section.open->placeholder, "..."),
                  fmt::format("[{}] {}", section.open->type, section.open->doc));
    }
  }
  return out;
}

Json to_json(const RunConfig& config) {
  Json root = Json::object();
  for (const Section& section : schema()) {
    Json* object = &root;
    for (const std::string& part : text::split(section.key, '.')) object = &(*object)[part];
    if (object->is_null()) *object = Json::object();
    for (const Field& field : section.fields) (*object)[last_part(field.key)] = field.get(config);
    if (section.open) object->update(section.open->get(config));
  }
  return root;
}

std::string escape_markdown(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|' || c == '<' || c == '*' || c == '_') out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

std::string describe(const YAML::Node& node) {
  if (node.IsMap()) return "a mapping";
  if (node.IsSequence()) return fmt::format("a list of {}", node.size());
  if (!node.IsScalar() || (node.Scalar().empty() && node.Tag() != "!")) return "nothing";
  constexpr std::size_t kLongest = 60;
  const std::string& text = node.Scalar();
  return "'" + (text.size() > kLongest ? text.substr(0, kLongest) + "..." : text) + "'";
}

std::string to_flow_yaml(const Json& value) {
  std::vector<std::string> parts;
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    return is_plain(text) ? text : value.dump();
  }
  if (value.is_number_float()) return fmt::format("{}", value.get<double>());
  if (value.is_array()) {
    for (const Json& item : value) parts.push_back(to_flow_yaml(item));
    return "[" + text::join(parts, ", ") + "]";
  }
  if (value.is_object()) {
    for (const auto& [name, item] : value.items()) {
      parts.push_back(to_flow_yaml(name) + ": " + to_flow_yaml(item));
    }
    return "{" + text::join(parts, ", ") + "}";
  }
  return value.dump();
}

Json without_secret(Json value, Secret secret) {
  const auto* text = value.get_ptr<const std::string*>();
  if (secret == Secret::kNone || text == nullptr || text->empty()) return value;
  return secret == Secret::kWhole ? std::string(text::kHidden) : text::without_password(*text);
}

std::string without_secret(const std::string& argument) {
  const std::size_t equals = argument.find('=');
  if (equals == std::string::npos) return argument;
  const std::string key = argument.substr(0, equals), value = argument.substr(equals + 1);
  const Field* field = find_field(key);
  if (field != nullptr && field->secret != Secret::kNone)
    return key + "=" + without_secret(Json(value), field->secret).get<std::string>();
  // A whole section as one value: rl.reward={url: ..., token: ...}.
  const bool is_above = std::ranges::any_of(schema(), [&](const Section& section) {
    return std::ranges::any_of(section.fields, [&](const Field& one) {
      return one.secret != Secret::kNone && one.key.starts_with(key + ".") &&
             value.find(last_part(one.key)) != std::string::npos;
    });
  });
  return is_above ? key + "=" + std::string(text::kHidden) : argument;
}

std::string dump_yaml(const RunConfig& config) { return dump(config, false); }

std::string dump_json(const RunConfig& config) { return to_json(config).dump(2); }

std::string reference_yaml() {
  return "# Every key of a Heddle run with its default, type and meaning.\n\n" + dump({}, true);
}

std::string reference_markdown() {
  std::string out;
  for (const Section& section : schema()) {
    out += fmt::format("### `{}`\n\n{}\n\n| key | default | type | meaning |\n|---|---|---|---|\n",
                       section.key, section.doc);
    for (const Field& field : section.fields) {
      const std::string value =
          field.required ? "required" : "`" + to_flow_yaml(field.get({})) + "`";
      out += fmt::format("| `{}` | {} | {} | {} |\n", field.key, value, escape_markdown(field.type),
                         escape_markdown(field.doc));
    }
    if (section.open) {
      out += fmt::format("| `{}.{}` | | {} | {} |\n", section.key, section.open->placeholder,
                         escape_markdown(section.open->type), escape_markdown(section.open->doc));
    }
    out += "\n";
  }
  return out;
}

std::vector<std::string> all_keys() {
  std::vector<std::string> keys;
  for (const Section& section : schema()) {
    for (const Field& field : section.fields) keys.push_back(field.key);
  }
  return keys;
}

std::vector<std::pair<std::string, std::string>> entries(const RunConfig& config) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const Section& section : schema()) {
    for (const Field& field : section.fields) {
      out.emplace_back(field.key, to_flow_yaml(field.get(config)));
    }
    if (!section.open) continue;
    const Json open = section.open->get(config);
    for (const auto& [name, value] : open.items()) {
      out.emplace_back(section.key + "." + name, to_flow_yaml(value));
    }
  }
  return out;
}

namespace {

/// Keys whose value followed from another key in both, as fill_in() makes it: what changed is that
/// other key.
std::set<std::string> followers(const RunConfig& before, const RunConfig& after) {
  std::set<std::string> keys;
  const auto add_if = [&](const std::string& key, const auto& follows) {
    if (follows(before) && follows(after)) keys.insert(key);
  };
  add_if("data.cache_dir",
         [](const RunConfig& c) { return c.data.cache_dir == c.train.output_dir + "/cache"; });
  add_if("model.tokenizer", [](const RunConfig& c) { return c.model.tokenizer == c.model.path; });
  return keys;
}

}  // namespace

std::vector<std::string> differences(const RunConfig& before, const RunConfig& after) {
  const std::set<std::string> told = followers(before, after);
  const auto old_entries = entries(before);
  std::map<std::string, std::string> old(old_entries.begin(), old_entries.end());
  std::vector<std::string> out;
  for (const auto& [key, value] : entries(after)) {
    const auto node = old.extract(key);
    const std::string was = node.empty() ? "(unset)" : node.mapped();
    if (was != value && !told.contains(key))
      out.push_back(fmt::format("{}: {} -> {}", key, was, value));
  }
  for (const auto& [key, value] : old) out.push_back(fmt::format("{}: {} -> (unset)", key, value));
  return out;
}

}  // namespace heddle::config
