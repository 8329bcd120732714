#pragma once

#include <array>
#include <string>

#include <nlohmann/json.hpp>

#include "data/jinja/chat_template.h"

namespace heddle::data {

/// A chat template with what it reads: learnt once by rendering conversations of marked words.
///
/// Data sets write the same message in several ways (a content as text or as parts, arguments of a
/// call as an object or as JSON text), and a template reads some of them. One that it reads is
/// handed over as it stands, as transformers does; one that it would lose, raise on, or show as a
/// Python literal, in the form that it reads. Const and safe to use from several threads.
class Chat {
 public:
  /// `variables`: what the template is given beside messages and tools. Throws DataError when the
  /// source cannot be parsed.
  Chat(const std::string& source, const std::string& name, nlohmann::ordered_json variables);

  const ChatTemplate& chat_template() const { return template_; }
  const nlohmann::ordered_json& variables() const { return variables_; }

  /// The messages in the forms that the template reads.
  nlohmann::ordered_json adapted(nlohmann::ordered_json messages) const;

 private:
  enum Role { kUser, kAssistant, kSystem, kTool, kRoles };
  /// Whether a content of each form is shown; of an absent one, whether it is allowed.
  struct Content {
    bool text = true;
    bool parts = false;
    bool absent = true;
  };

  static Role role_of(const nlohmann::ordered_json& message);
  void learn_content(Role role);
  void learn_arguments();
  /// Whether the conversation, adapted but for its last message, renders with `words` in order.
  bool shows(nlohmann::ordered_json before, const nlohmann::ordered_json& last,
             std::initializer_list<std::string> words) const;
  void adapt_content(nlohmann::ordered_json& message) const;
  void adapt_arguments(nlohmann::ordered_json& message) const;

  ChatTemplate template_;
  nlohmann::ordered_json variables_;
  std::array<Content, kRoles> content_;
  bool text_arguments_ = true;    ///< arguments of a call as JSON text are shown as they stand
  bool object_arguments_ = true;  ///< arguments as an object are shown
};

}  // namespace heddle::data
