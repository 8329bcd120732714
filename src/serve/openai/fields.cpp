#include "serve/openai/fields.h"

#include <cmath>
#include <utility>

#include "base/json.h"
#include "data/json/json_text.h"
#include "serve/http/body.h"

namespace heddle::serve::openai {

Fields Fields::parse(std::string_view body) {
  Json object;
  try {
    object = json::parse(body, {.values = kMostJsonValues});
  } catch (const DataError& error) {
    throw ApiError(400, fmt::format("the body is not JSON: {}", error.what()), "");
  }
  return Fields(std::move(object));
}

Fields::Fields(Json object, std::string within)
    : object_(std::move(object)), within_(std::move(within)) {
  if (object_.is_object()) return;
  const std::string name =
      within_.empty() ? "body" : within_.substr(0, within_.find_last_not_of('.') + 1);
  throw_field(name, "is a JSON {}: expected an object", data::json_text::type_name(object_));
}

Json Fields::take(const std::string& name) {
  const auto found = object_.find(name);
  if (found == object_.end()) return {};
  Json value = std::move(*found);
  object_.erase(found);
  return value;
}

std::optional<double> Fields::number(const std::string& name, double least, double most) {
  const Json value = take(name);
  if (value.is_null()) return std::nullopt;
  const auto number = data::json_text::as_double(value);
  if (!number || !std::isfinite(*number) || *number < least || *number > most) {
    throw_field(full(name), "is {}: expected a number from {} to {}", json::shown(value), least,
                most);
  }
  return *number;
}

std::optional<std::int64_t> Fields::integer(const std::string& name, std::int64_t least,
                                            std::int64_t most) {
  const Json value = take(name);
  if (value.is_null()) return std::nullopt;
  const bool fits =
      value.is_number_unsigned()
          ? most >= 0 && value.get<std::uint64_t>() <= static_cast<std::uint64_t>(most) &&
                (least <= 0 || value.get<std::uint64_t>() >= static_cast<std::uint64_t>(least))
          : value.is_number_integer() && value.get<std::int64_t>() >= least &&
                value.get<std::int64_t>() <= most;
  if (!fits) {
    throw_field(full(name), "is {}: expected a whole number from {} to {}", json::shown(value),
                least, most);
  }
  return value.get<std::int64_t>();
}

std::optional<bool> Fields::boolean(const std::string& name) {
  const Json value = take(name);
  if (value.is_null()) return std::nullopt;
  if (!value.is_boolean())
    throw_field(full(name), "is {}: expected true or false", json::shown(value));
  return value.get<bool>();
}

std::optional<std::string> Fields::text(const std::string& name) {
  const Json value = take(name);
  if (value.is_null()) return std::nullopt;
  if (!value.is_string()) throw_field(full(name), "is {}: expected a text", json::shown(value));
  return value.get<std::string>();
}

std::vector<std::string> Fields::texts(const std::string& name, std::size_t most) {
  Json value = take(name);
  if (value.is_null()) return {};
  if (value.is_string()) value = Json::array({std::move(value)});
  std::vector<std::string> texts;
  const bool is_list = value.is_array() && value.size() <= most;
  for (const Json& item : is_list ? value : Json::array({nullptr})) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty()) {
      throw_field(full(name), "is {}: expected a text or up to {} texts, none of them empty",
                  json::shown(value), most);
    }
    texts.push_back(item.get<std::string>());
  }
  return texts;
}

std::vector<std::int32_t> Fields::ids(const std::string& name, std::int64_t vocabulary) {
  const Json value = take(name);
  return value.is_null() ? std::vector<std::int32_t>() : token_ids(value, full(name), vocabulary);
}

void Fields::pass_over(std::initializer_list<const char*> names) {
  for (const char* const name : names) take(name);
}

void Fields::only(const std::string& name, const Json& neutral, const std::string& advice) {
  const Json value = take(name);
  if (value.is_null() || value == neutral) return;
  throw_field(full(name), "is {}, which is not served: {}", json::shown(value), advice);
}

void Fields::finish() const {
  for (const auto& [name, value] : object_.items()) {
    if (!value.is_null()) throw_field(full(name), "is not known; leave it out");
  }
}

std::vector<std::int32_t> token_ids(const Json& list, const std::string& field,
                                    std::int64_t vocabulary) {
  if (!list.is_array())
    throw_field(field, "is {}: expected a list of token ids", json::shown(list));
  std::vector<std::int32_t> ids;
  ids.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const bool fits = list[i].is_number_unsigned() &&
                      list[i].get<std::uint64_t>() < static_cast<std::uint64_t>(vocabulary);
    if (!fits) {
      throw_field(fmt::format("{}[{}]", field, i), "is {}: expected a token id below {}",
                  json::shown(list[i]), vocabulary);
    }
    ids.push_back(list[i].get<std::int32_t>());
  }
  return ids;
}

}  // namespace heddle::serve::openai
