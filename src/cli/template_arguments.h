#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace CLI {
class App;
}

namespace heddle::cli {

/// Adds --template-arg NAME=JSON (repeatable): variables of the chat template, as the keyword
/// arguments of transformers' apply_chat_template.
void add_template_arguments(CLI::App& command, std::vector<std::string>& arguments);

/// The variables as an object. Throws ConfigError for an argument without '=' or name, for a value
/// that is no JSON (a bare word would be a true text), and for a name given twice.
nlohmann::ordered_json template_variables(const std::vector<std::string>& arguments);

}  // namespace heddle::cli
