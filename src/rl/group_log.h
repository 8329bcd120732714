#pragma once

#include <cstdint>
#include <filesystem>

#include "rl/group.h"
#include "rl/prompts.h"

namespace heddle::rl {

/// groups.jsonl of a run: what the model wrote and what it was worth, a group a line.
class GroupLog {
 public:
  explicit GroupLog(std::filesystem::path file) : file_(std::move(file)) {}
  /// Forgets what an interrupted run wrote after the step that it is continued from.
  void keep_up_to(std::int64_t step) const;
  /// `version`: of the weights in training. Throws FileError.
  void write(std::int64_t step, std::int64_t version, const Prompt& prompt,
             const Group& group) const;

 private:
  std::filesystem::path file_;
};

}  // namespace heddle::rl
