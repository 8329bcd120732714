#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reward/reward.h"

/// Tasks that make their own rows, and answer what the policy does turn by turn.
namespace heddle::reward {

class Verifier;

/// One row of a task, with the columns of a data file: {"prompt", "answer", "meta"}.
struct Row {
  std::string prompt;
  Json truth, meta;
};

struct Step {
  std::string observation;  ///< Text that is appended to the transcript; empty once done.
  double reward = 0;        ///< For this turn; an episode's reward is the sum.
  bool done = false;
  bool truncated = false;  ///< Done because of a limit, not by the task's own rule.
};

/// One episode at a time.
class Environment {
 public:
  virtual ~Environment() = default;
  /// Begins an episode; the first observation is the prompt. The same seed and row give the same
  /// episode.
  virtual std::string reset(std::uint64_t seed, const Row& row) = 0;
  /// The policy's text of one turn. Throws InternalError before reset() and after done.
  virtual Step step(const std::string& action) = 0;
};

/// A source of rows and environments.
class Task {
 public:
  virtual ~Task() = default;
  /// Row number `index` of the stream `seed`; the same in any order and process.
  virtual Row row(std::uint64_t seed, std::uint64_t index) const = 0;
  /// True if an episode may have more than one turn of the policy.
  virtual bool is_multi_turn() const { return false; }
  virtual std::unique_ptr<Environment> environment() const = 0;
};

/// Judges turns of a task's episodes: each sample's `truth` and `meta` are those of its row. While
/// an episode goes on its scores have an observation.
std::unique_ptr<Verifier> make_task_verifier(std::shared_ptr<const Task> task);

/// `arithmetic`, `countdown`, `reverse_string`, `copy`, `modular_addition`, `guess_number`.
std::vector<std::string> task_names();

/// Throws ConfigError for a name that is not there or a parameter that it does not have.
std::unique_ptr<Task> make_task(const std::string& name, const Json& parameters,
                                const std::string& where);

}  // namespace heddle::reward
