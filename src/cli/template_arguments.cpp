#include "cli/template_arguments.h"

#include <CLI/CLI.hpp>

#include "base/errors.h"
#include "base/quote.h"
#include "data/json/json_text.h"
#include "data/readers/conversation_row.h"

namespace heddle::cli {

void add_template_arguments(CLI::App& command, std::vector<std::string>& arguments) {
  command
      .add_option("--template-arg", arguments,
                  "Variable of the chat template, as enable_thinking=false")
      ->type_name("NAME=JSON")
      ->allow_extra_args(false);
}

nlohmann::ordered_json template_variables(const std::vector<std::string>& arguments) {
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();
  for (const std::string& argument : arguments) {
    const std::size_t equals = argument.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw_error<ConfigError>("--template-arg: expected NAME=JSON, found '{}'",
                               text::shown(argument));
    }
    const std::string name = argument.substr(0, equals), text = argument.substr(equals + 1);
    if (data::is_template_argument(name)) {
      throw_error<ConfigError>(
          "--template-arg {}: is an argument of apply_chat_template, not a variable of the "
          "template",
          text::shown(name));
    }
    nlohmann::ordered_json value;
    try {
      value = data::json_text::parse(text, /*max_depth=*/200);
    } catch (const DataError& error) {
      throw_error<ConfigError>(
          "--template-arg {}: '{}' is not JSON: write true, false, a number, or a text in double "
          "quotes ({}='\"...\"'): {}",
          text::shown(name), text::shown(text), text::shown(name), error.what());
    }
    if (variables.contains(name))
      throw_error<ConfigError>("--template-arg {} is given twice", name);
    variables[name] = value;
  }
  return variables;
}

}  // namespace heddle::cli
