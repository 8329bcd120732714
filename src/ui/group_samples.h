#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace heddle::ui {

/// A part of a text that is as long as it may be.
struct SampledText {
  std::string text;           ///< UTF-8, its beginning.
  std::int64_t left_out = 0;  ///< Bytes after it.
};

/// A completion and what it was worth.
struct SampledCompletion {
  /// Texts in turn, true for those that answered the policy's.
  std::vector<std::pair<SampledText, bool>> texts;
  std::int64_t turns_left_out = 0;  ///< Texts after them.
  double reward = 0;                ///< NaN: the file has none.
  std::int64_t tokens = 0;
  bool is_truncated = false;
};

/// A line of groups.jsonl: a prompt and what the model wrote.
struct SampledGroup {
  std::int64_t step = 0;
  SampledText prompt, answer;
  std::vector<SampledCompletion> completions;  ///< The first of them.
  std::int64_t all_completions = 0;
  double reward_mean = 0;  ///< Over all; NaN if one has none.
};

struct GroupSamples {
  std::vector<SampledGroup> shown;  ///< The first group of the run and the newest, by step.
  std::int64_t groups = 0;          ///< Lines of the file.
  std::int64_t unreadable = 0;      ///< Lines that should be shown and cannot: torn, or too long.
};

/// Reads the part of a run's groups.jsonl that the report shows, however large it is: at most
/// kShownGroups groups, kShownCompletions of each, kShownBytes of a text. Nothing where there is no
/// file. Throws FileError.
GroupSamples read_group_samples(const std::filesystem::path& file);

inline constexpr std::size_t kShownGroups = 5, kShownCompletions = 4, kShownTexts = 16,
                             kShownBytes = 2000;

/// The section of the report; empty without a group.
std::string render_groups(const GroupSamples& samples);

}  // namespace heddle::ui
