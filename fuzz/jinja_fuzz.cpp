// Input: a chat template, a zero byte, and the conversation as JSON (without it, a fixed one).
#include <string>
#include <string_view>

#include "base/errors.h"
#include "data/jinja/chat_template.h"

namespace {

constexpr std::string_view kConversation = R"([
  {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hé 🙂\n"}]},
  {"role": "assistant", "content": "<think>\na\n</think>\n\nb", "tool_calls": [
    {"function": {"name": "f", "arguments": {"x": 1.5, "y": [1, null, true], "z": "w"}}}]},
  {"role": "tool", "content": "3"}])";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  using heddle::data::ChatTemplate;
  using nlohmann::ordered_json;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t zero = input.find('\0');
  ordered_json messages =
      ordered_json::parse(zero == std::string_view::npos ? kConversation : input.substr(zero + 1),
                          nullptr, /*allow_exceptions=*/false);
  if (messages.is_discarded()) messages = ordered_json::parse(kConversation);
  try {
    const ChatTemplate chat = ChatTemplate::parse(std::string(input.substr(0, zero)), "template");
    ChatTemplate::Options options;
    options.add_generation_prompt = size % 2 == 0;
    options.variables["enable_thinking"] = false;
    options.tools = messages;
    options.max_steps = 200'000;
    options.max_bytes = 1 << 20;
    chat.render(messages, options);
  } catch (const heddle::DataError&) {
  }
  return 0;
}
