// Values that a model writes as plain text, brought into the types of a JSON schema.
#pragma once

#include <string_view>

#include <nlohmann/json.hpp>

namespace heddle::data {

/// The schemas of a tool's parameters by name; an empty object if `tools` has no such tool.
nlohmann::ordered_json properties_of(const nlohmann::ordered_json& tools, std::string_view name);

/// `text` as a value of `schema` (an object with `type`, `anyOf`, `oneOf` or `enum`; anything else
/// stands for a string). Numbers, lists and objects are JSON; True, False and None are read too, as
/// templates print them. A text of none of the types is a string, verbatim.
nlohmann::ordered_json typed_value(std::string_view text, const nlohmann::ordered_json& schema);

}  // namespace heddle::data
