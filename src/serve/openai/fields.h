#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/openai/error.h"

namespace heddle::serve::openai {

/// The fields of a request's object, each taken once: what nobody took is refused, so that nothing
/// a client asks for is ignored in silence. A null counts as absent. Faults are an ApiError that
/// names the field.
class Fields {
 public:
  /// The object in a request's body. `within` comes before the names in messages: "messages[2].".
  static Fields parse(std::string_view body);
  explicit Fields(Json object, std::string within = "");

  /// Null if absent.
  Json take(const std::string& name);
  std::optional<double> number(const std::string& name, double least, double most);
  std::optional<std::int64_t> integer(const std::string& name, std::int64_t least,
                                      std::int64_t most);
  std::optional<bool> boolean(const std::string& name);
  std::optional<std::string> text(const std::string& name);
  /// A text or a list of texts.
  std::vector<std::string> texts(const std::string& name, std::size_t most);
  std::vector<std::int32_t> ids(const std::string& name, std::int64_t vocabulary);
  /// Fields that change no answer: notes of the client.
  void pass_over(std::initializer_list<const char*> names);
  /// Fields that are known and not served: only a value of no effect is accepted.
  void only(const std::string& name, const Json& neutral, const std::string& advice);

  /// Refuses what is left.
  void finish() const;
  std::string full(const std::string& name) const { return within_ + name; }

 private:
  Json object_;
  std::string within_;
};

/// Token ids of a list. `field` is its name in messages.
std::vector<std::int32_t> token_ids(const Json& list, const std::string& field,
                                    std::int64_t vocabulary);

}  // namespace heddle::serve::openai
