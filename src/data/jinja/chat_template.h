#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::data {

namespace jinja {
struct Template;
}

/// A chat template in Jinja, rendered as `transformers.apply_chat_template(tokenize=False)` does.
class ChatTemplate {
 public:
  /// `name` stands for the template in messages. Throws DataError with name, line and construct for
  /// a syntax error or a construct that is not supported.
  static ChatTemplate parse(std::string source, std::string name);

  struct Options {
    /// A list of tool schemas, or null for none.
    nlohmann::ordered_json tools;
    bool add_generation_prompt = false;
    /// An object of further variables: enable_thinking, bos_token, eos_token, ...
    nlohmann::ordered_json variables;
    /// Bounds on one rendering, beside kStepsOfInput and kBytesOfInput; passing one is a DataError.
    std::uint64_t max_steps = 20'000'000;
    std::size_t max_bytes = std::size_t{256} << 20;
  };
  /// Steps that a rendering may take for each value and each 16 bytes of text of its input: time
  /// and memory grow with the conversation, and a hostile template ends.
  static constexpr std::uint64_t kStepsOfInput = 1000;
  static constexpr std::size_t kBytesOfInput = 4096;

  struct Rendered {
    std::string text;
    /// Byte ranges [first, second) of `text` written inside {% generation %} blocks, in order.
    std::vector<std::pair<std::size_t, std::size_t>> generation_spans;
    /// Byte range of `text` that a pass of the template's loop over the messages wrote for each
    /// message; empty where no pass wrote anything, or several did.
    std::vector<std::pair<std::size_t, std::size_t>> message_spans;
  };

  /// Messages and variables as the template sees them, for several renderings. Copies are cheap.
  class Conversation {
   public:
    std::size_t size() const;
    /// The conversation with another message at `index`.
    Conversation with(std::size_t index, const nlohmann::ordered_json& message) const;

   private:
    friend class ChatTemplate;
    struct Data;
    std::shared_ptr<const Data> data_;
  };
  /// `messages` is a list of objects with role and content. Throws DataError with the template's
  /// name.
  Conversation prepare(const nlohmann::ordered_json& messages, const Options& options) const;

  /// Renders the first `count` messages. Throws DataError with name, line and reason: also when the
  /// template itself calls raise_exception().
  Rendered render(const Conversation& conversation, std::size_t count,
                  bool add_generation_prompt) const;
  Rendered render(const nlohmann::ordered_json& messages, const Options& options) const {
    const Conversation conversation = prepare(messages, options);
    return render(conversation, conversation.size(), options.add_generation_prompt);
  }

  /// True if the template has a {% generation %} block, and so knows which text is the assistant's.
  bool has_generation_blocks() const;

 private:
  std::shared_ptr<const jinja::Template> template_;
};

}  // namespace heddle::data
