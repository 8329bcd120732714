#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace heddle::ckpt {

/// A regular expression as adapter_config.json holds them (Python's `re`; PCRE2 has the same
/// grammar in all but corners).
class Pattern {
 public:
  /// Throws ModelError that names `where` (file and key) and the place in the expression.
  Pattern(const std::string& expression, const std::string& where);

  /// The whole of `text` matches.
  bool matches_all(std::string_view text) const;
  /// The first group's text when a prefix of `text` matches; nothing when none does.
  std::optional<std::string> first_group(std::string_view text) const;
  /// A prefix of `text` matches.
  bool matches_prefix(std::string_view text) const;

 private:
  struct Match {
    std::size_t end = 0;
    std::string group;
  };
  std::optional<Match> match(std::string_view text, std::uint32_t options) const;

  std::string where_;
  std::shared_ptr<void> code_;
};

}  // namespace heddle::ckpt
