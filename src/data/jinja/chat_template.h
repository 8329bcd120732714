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
    /// Bounds on one rendering; passing one is a DataError. The defaults are far above any real
    /// conversation.
    std::uint64_t max_steps = 20'000'000;
    std::size_t max_bytes = std::size_t{256} << 20;
  };
  struct Rendered {
    std::string text;
    /// Byte ranges [first, second) of `text` written inside {% generation %} blocks, in order.
    std::vector<std::pair<std::size_t, std::size_t>> generation_spans;
  };
  /// `messages` is a list of objects with role and content. Throws DataError with name, line and
  /// reason: also when the template itself calls raise_exception().
  Rendered render(const nlohmann::ordered_json& messages, const Options& options) const;

  /// True if the template has a {% generation %} block, and so knows which text is the assistant's.
  bool has_generation_blocks() const;

 private:
  std::shared_ptr<const jinja::Template> template_;
};

}  // namespace heddle::data
