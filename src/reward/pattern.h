#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace heddle::reward {

/// A regular expression of the user (PCRE2, Unicode) with a bound on its work: what back-tracks
/// beyond it counts as no match, the same on every machine.
class Pattern {
 public:
  enum class Match { kSearch, kFull };
  /// Throws ConfigError that begins with `where` and gives place and reason.
  Pattern(const std::string& expression, Match match, bool ignore_case, const std::string& where);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) = delete;

  struct Found {
    std::string whole;
    std::optional<std::string> first_group;
  };
  /// The first match in the text; bytes that are not UTF-8 are read as U+FFFD.
  std::optional<Found> find(std::string_view text) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace heddle::reward
