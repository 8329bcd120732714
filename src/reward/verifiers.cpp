#include "reward/verifiers.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"
#include "reward/answer_verifiers.h"
#include "reward/environment.h"
#include "reward/shape_verifiers.h"

namespace heddle::reward {
namespace {

using Make = std::unique_ptr<Verifier> (*)(Parameters&);
struct VerifierEntry {
  std::string_view name;
  Make make;
};
constexpr std::array<VerifierEntry, 11> kVerifiers{{
    {"exact", make_exact},
    {"contains", make_contains},
    {"numeric", make_numeric},
    {"math", make_math},
    {"choice", make_choice},
    {"regex", make_regex},
    {"json", make_json},
    {"format", make_format},
    {"length", make_length},
    {"repetition", make_repetition},
    {"overlong", make_overlong},
}};

}  // namespace

std::vector<std::string> verifier_names() {
  std::vector<std::string> names;
  for (const VerifierEntry& entry : kVerifiers) names.emplace_back(entry.name);
  return names;
}

bool needs_truth(const std::string& name) {
  constexpr std::array<std::string_view, 5> kComparing{"exact", "contains", "numeric", "math",
                                                       "choice"};
  const std::vector<std::string> tasks = task_names();
  return std::ranges::find(kComparing, name) != kComparing.end() ||
         std::ranges::find(tasks, name) != tasks.end();
}

std::unique_ptr<Verifier> make_verifier(const std::string& name, const Json& parameters,
                                        const std::string& where) {
  for (const VerifierEntry& entry : kVerifiers) {
    if (entry.name != name) continue;
    Parameters values(parameters, where);
    std::unique_ptr<Verifier> verifier = entry.make(values);
    values.finish();
    return verifier;
  }
  const std::vector<std::string> tasks = task_names();
  if (std::ranges::find(tasks, name) != tasks.end())
    return make_task_verifier(make_task(name, parameters, where));
  throw_error<ConfigError>("{}: there is no verifier '{}'; expected one of {}, or a task: {}",
                           where, text::shown(name), text::join(verifier_names(), ", "),
                           text::join(tasks, ", "));
}

}  // namespace heddle::reward
