#include "data/jinja/chat_template.h"

#include "base/errors.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/parser.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

/// The names that reasoning goes by, in the order in which they are looked for.
constexpr const char* kReasoning[] = {"reasoning_content", "thinking", "reasoning"};

/// transformers gives a template the reasoning under each of the two names that templates read.
ordered_json with_reasoning_names(const ordered_json& message) {
  if (!message.is_object()) return message;
  for (const char* name : kReasoning) {
    const auto found = message.find(name);
    if (found == message.end() || found->is_null()) continue;
    ordered_json out = ordered_json::object();
    out["thinking"] = *found;
    for (const auto& [key, value] : message.items()) out[key] = value;
    out["reasoning_content"] = *found;
    return out;
  }
  return message;
}

}  // namespace

ChatTemplate ChatTemplate::parse(std::string source, std::string name) {
  ChatTemplate result;
  try {
    result.template_ = jinja::parse_template(source, name);
  } catch (const jinja::TypeError& error) {
    throw_error<DataError>("{}: {}", name, error.message);
  }
  return result;
}

bool ChatTemplate::has_generation_blocks() const { return template_->has_generation; }

ChatTemplate::Rendered ChatTemplate::render(const ordered_json& messages,
                                            const Options& options) const {
  using jinja::Value;
  const std::string& name = template_->name;
  if (!messages.is_array()) {
    throw_error<DataError>("{}: messages must be a list, found {}", name, messages.type_name());
  }
  std::vector<std::pair<std::string, Value>> variables;
  try {
    jinja::Values list;
    list.reserve(messages.size());
    for (std::size_t i = 0; i < messages.size(); ++i) {
      if (!messages[i].is_object()) {
        throw_error<DataError>("{}: message {} must be an object with role and content, found {}",
                               name, i, messages[i].type_name());
      }
      list.push_back(Value::from_json(with_reasoning_names(messages[i])));
    }
    variables.emplace_back("messages", Value::list(std::move(list)));
    variables.emplace_back("tools", Value::from_json(options.tools));
    variables.emplace_back("documents", Value::none());
    variables.emplace_back("add_generation_prompt", Value::boolean(options.add_generation_prompt));
    if (!options.variables.is_null() && !options.variables.is_object()) {
      throw_error<DataError>("{}: the variables must be an object, found {}", name,
                             options.variables.type_name());
    }
    for (const auto& [key, value] : options.variables.items())
      variables.emplace_back(key, Value::from_json(value));
  } catch (const jinja::TypeError& error) {
    throw_error<DataError>("{}: {}", name, error.message);
  }
  Rendered rendered;
  jinja::Interpreter interpreter(*template_, {options.max_steps, options.max_bytes});
  rendered.text = interpreter.run(std::move(variables), rendered.generation_spans);
  return rendered;
}

}  // namespace heddle::data
