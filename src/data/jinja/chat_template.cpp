#include "data/jinja/chat_template.h"

#include <unordered_map>

#include "base/errors.h"
#include "data/jinja/interpreter.h"
#include "data/jinja/parser.h"
#include "data/json/json_text.h"
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
    return json_text::merged(json_text::merged({{"thinking", *found}}, message),
                             {{"reasoning_content", *found}});
  }
  return message;
}

/// Turns faults of values into a DataError with the template's name.
template <class Make>
auto naming(const std::string& name, Make make) {
  try {
    return make();
  } catch (const jinja::TypeError& error) {
    throw_error<DataError>("{}: {}", name, error.message);
  }
}

}  // namespace

struct ChatTemplate::Conversation::Data {
  std::string template_name;
  jinja::Values messages;
  std::vector<std::pair<std::string, jinja::Value>> variables;
  std::uint64_t max_steps = 0;
  std::size_t max_bytes = 0;

  jinja::Value read(std::size_t index, const ordered_json& message) const {
    if (!message.is_object()) {
      throw_error<DataError>("{}: message {} must be an object with role and content, found {}",
                             template_name, index, message.type_name());
    }
    return naming(template_name,
                  [&] { return jinja::Value::from_json(with_reasoning_names(message)); });
  }
  /// Values, and 16 bytes of text, of all that a template is given.
  std::uint64_t weight() const {
    std::uint64_t weight = 0;
    for (const jinja::Value& message : messages) weight += message.extent().weight;
    for (const auto& [name, value] : variables) weight += value.extent().weight;
    return weight;
  }
};

std::size_t ChatTemplate::Conversation::size() const { return data_->messages.size(); }

ChatTemplate::Conversation ChatTemplate::Conversation::with(std::size_t index,
                                                            const ordered_json& message) const {
  auto data = std::make_shared<Data>(*data_);
  data->messages[index] = data->read(index, message);
  Conversation changed;
  changed.data_ = std::move(data);
  return changed;
}

ChatTemplate ChatTemplate::parse(std::string source, std::string name) {
  ChatTemplate result;
  result.template_ = naming(name, [&] { return jinja::parse_template(source, name); });
  return result;
}

bool ChatTemplate::has_generation_blocks() const { return template_->has_generation; }

ChatTemplate::Conversation ChatTemplate::prepare(const ordered_json& messages,
                                                 const Options& options) const {
  using jinja::Value;
  const std::string& name = template_->name;
  if (!messages.is_array()) {
    throw_error<DataError>("{}: messages must be a list, found {}", name, messages.type_name());
  }
  if (!options.variables.is_null() && !options.variables.is_object()) {
    throw_error<DataError>("{}: the variables must be an object, found {}", name,
                           options.variables.type_name());
  }
  auto data = std::make_shared<Conversation::Data>();
  data->template_name = name;
  data->max_steps = options.max_steps;
  data->max_bytes = options.max_bytes;
  data->messages.reserve(messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    data->messages.push_back(data->read(i, messages[i]));
  }
  naming(name, [&] {
    data->variables.emplace_back("tools", Value::from_json(options.tools));
    data->variables.emplace_back("documents", Value::none());
    for (const auto& [key, value] : options.variables.items())
      data->variables.emplace_back(key, Value::from_json(value));
    return true;
  });
  Conversation conversation;
  conversation.data_ = std::move(data);
  return conversation;
}

namespace {

/// Text that the passes wrote for each of the first `count` messages. A template hands messages on
/// as they are, so that a pass knows its message by the address of its values.
std::vector<std::pair<std::size_t, std::size_t>> spans_of_messages(
    const jinja::Values& messages, std::size_t count,
    const std::vector<jinja::Interpreter::Pass>& passes) {
  std::unordered_map<const jinja::DictData*, std::size_t> index;
  index.reserve(count);
  for (std::size_t i = 0; i < count; ++i) index.emplace(&messages[i].as_dict(), i);
  std::vector<std::pair<std::size_t, std::size_t>> spans(count, {0, 0});
  std::vector<bool> is_known(count, false);
  for (const jinja::Interpreter::Pass& pass : passes) {
    const auto found = index.find(pass.item);
    if (found == index.end()) continue;
    const std::size_t i = found->second;
    spans[i] =
        is_known[i] ? std::pair<std::size_t, std::size_t>{0, 0} : std::pair{pass.begin, pass.end};
    is_known[i] = true;
  }
  return spans;
}

}  // namespace

ChatTemplate::Rendered ChatTemplate::render(const Conversation& conversation, std::size_t count,
                                            bool add_generation_prompt) const {
  using jinja::Value;
  const Conversation::Data& data = *conversation.data_;
  std::vector<std::pair<std::string, Value>> variables = data.variables;
  variables.emplace_back(
      "messages", naming(template_->name, [&] {
        return Value::list(
            {data.messages.begin(), data.messages.begin() + static_cast<std::ptrdiff_t>(count)});
      }));
  variables.emplace_back("add_generation_prompt", Value::boolean(add_generation_prompt));
  const std::uint64_t weight = data.weight();
  Rendered rendered;
  jinja::Interpreter interpreter(*template_,
                                 {data.max_steps + weight * kStepsOfInput, data.max_bytes,
                                  data.max_bytes + weight * kBytesOfInput});
  std::vector<jinja::Interpreter::Pass> passes;
  rendered.text = interpreter.run(std::move(variables), rendered.generation_spans, passes);
  rendered.message_spans = spans_of_messages(data.messages, count, passes);
  return rendered;
}

}  // namespace heddle::data
