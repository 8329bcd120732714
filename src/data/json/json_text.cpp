#include "data/json/json_text.h"

#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::json_text {

ordered_json parse(std::string_view text, int max_depth) {
  if (const std::size_t valid = utf8::valid_prefix(text); valid < text.size()) {
    throw_error<DataError>(
        "byte 0x{:02X} at column {} is not UTF-8; convert the file, for example from Latin-1: "
        "iconv -f LATIN1 -t UTF-8 FILE > NEW",
        static_cast<unsigned char>(text[valid]), valid + 1);
  }
  json::Limits limits;
  limits.depth = static_cast<std::size_t>(max_depth);
  limits.keeps_big_integers = true;
  return json::parse(text, limits);
}

std::optional<std::string> big_integer(const ordered_json& value) {
  if (!value.is_binary()) return std::nullopt;
  const auto& digits = value.get_binary();
  return std::string(digits.begin(), digits.end());
}

namespace {

void write(const ordered_json& value, std::string& out) {
  const auto scalar = [](const auto& part) {
    return part.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  };
  if (const auto digits = big_integer(value)) {
    out += *digits;
  } else if (value.is_object()) {
    out += '{';
    bool first = true;
    for (const auto& [key, item] : value.get_ref<const ordered_json::object_t&>()) {
      if (!std::exchange(first, false)) out += ',';
      out += scalar(ordered_json(key)) + ':';
      write(item, out);
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (i > 0) out += ',';
      write(value[i], out);
    }
    out += ']';
  } else {
    out += scalar(value);
  }
}

}  // namespace

std::string dump(const ordered_json& value) {
  std::string out;
  write(value, out);
  return out;
}

ordered_json merged(ordered_json base, const ordered_json& more) {
  if (more.empty()) return base;
  using Object = ordered_json::object_t;
  auto& items = base.get_ref<Object&>();
  items.reserve(items.size() + more.size());  // no key moves from here on
  std::unordered_map<std::string_view, ordered_json*> places;
  for (auto& [key, value] : items) places.emplace(key, &value);
  for (const auto& [key, value] : more.get_ref<const Object&>()) {
    if (const auto found = places.find(key); found != places.end()) {
      *found->second = value;
    } else {
      // At the end, because emplace() would look through all keys.
      static_cast<Object::Container&>(items).emplace_back(key, value);
    }
  }
  return base;
}

const char* type_name(const ordered_json& value) {
  return value.is_binary() ? "number" : value.type_name();
}

std::optional<double> as_double(const ordered_json& value) {
  if (const auto digits = big_integer(value)) return std::strtod(digits->c_str(), nullptr);
  if (!value.is_number()) return std::nullopt;
  return value.get<double>();
}

}  // namespace heddle::data::json_text
