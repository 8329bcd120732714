#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reward/reward.h"

/// Rules that judge a completion without any other program. Each looks at 64 KiB of a completion at
/// most (its end, where the answer stands), takes less than 50 ms whatever the text is, and depends
/// on nothing but its arguments.
namespace heddle::reward {

inline constexpr std::size_t kBytesLookedAt = 64 << 10;

class Verifier {
 public:
  virtual ~Verifier() = default;
  /// A score of 0 is a wrong answer; an error means that the row cannot be judged (no truth, or one
  /// of the wrong kind). With an observation the policy goes on with another turn.
  virtual Score judge(const Sample& sample) const = 0;
};

/// `exact`, `regex`, `format`, `numeric`, `math`, `choice`, `json`, `length`, `repetition`,
/// `overlong`, `contains`.
std::vector<std::string> verifier_names();

/// The verifier compares with the row's answer: rows without one cannot be judged.
bool needs_truth(const std::string& name);

/// One of verifier_names(), or what judges one of task_names(). Throws ConfigError for a name that
/// is not there or a parameter that it does not have; `where` (the configuration's key) begins the
/// message.
std::unique_ptr<Verifier> make_verifier(const std::string& name, const Json& parameters,
                                        const std::string& where);

}  // namespace heddle::reward
