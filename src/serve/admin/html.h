#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace heddle::serve::admin {

/// The whole page of a State's JSON. Needs no script: its script only renews <main>.
std::string page_of(const nlohmann::json& state);
/// The inside of <main>.
std::string content_of(const nlohmann::json& state);
std::string login_page(const std::string& message);

extern const char* const kScript;
extern const char* const kStyle;

}  // namespace heddle::serve::admin
