#include "ui/group_samples.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "base/html.h"
#include "base/json.h"

namespace heddle::ui {
namespace {

using Json = nlohmann::ordered_json;

/// A longer line is not shown: a group of 64 completions of 64 k tokens has about 16 MiB.
constexpr std::uint64_t kLongestLine = std::uint64_t{64} << 20;

/// Bytes of a file.
struct Range {
  std::uint64_t begin = 0, end = 0;
};

class OpenFile {
 public:
  explicit OpenFile(const std::filesystem::path& path)
      : path_(path), descriptor_(files::open_regular(path)) {}
  ~OpenFile() { ::close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  /// Returns how many bytes there were, fewer at the end of the file.
  std::size_t read(std::uint64_t offset, char* bytes, std::size_t count) const {
    std::size_t done = 0;
    while (done < count) {
      const ssize_t found =
          ::pread(descriptor_, bytes + done, count - done, static_cast<off_t>(offset + done));
      if (found < 0 && errno == EINTR) continue;
      if (found < 0)
        throw_error<FileError>("{}: cannot be read: {}", path_.string(), ::strerror(errno));
      if (found == 0) break;
      done += static_cast<std::size_t>(found);
    }
    return done;
  }

 private:
  std::filesystem::path path_;
  int descriptor_;
};

/// Lines that have their end: how many, the first and the last kShownGroups.
struct Lines {
  std::int64_t count = 0;
  std::deque<Range> chosen;
};

Lines find_lines(const OpenFile& file) {
  Lines lines;
  std::string chunk(std::size_t{1} << 20, '\0');
  std::uint64_t offset = 0, begin = 0;
  while (const std::size_t have = file.read(offset, chunk.data(), chunk.size())) {
    const std::string_view text(chunk.data(), have);
    for (std::size_t end = text.find('\n'); end != std::string_view::npos;
         end = text.find('\n', end + 1)) {
      lines.chosen.push_back({begin, offset + end});
      begin = offset + end + 1;
      ++lines.count;
      // The first stays.
      if (lines.chosen.size() > kShownGroups) lines.chosen.erase(lines.chosen.begin() + 1);
    }
    offset += have;
  }
  return lines;
}

SampledText cut(const std::string& text) {
  std::size_t end = std::min(text.size(), kShownBytes);
  // Not within a character.
  while (end < text.size() && end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80)
    --end;
  return {text.substr(0, end), static_cast<std::int64_t>(text.size() - end)};
}

SampledText text_of(const Json& row, const char* key) {
  const auto found = row.find(key);
  if (found == row.end() || found->is_null()) return {};
  if (found->is_string()) return cut(found->get_ref<const std::string&>());
  return cut(found->dump(-1, ' ', false, Json::error_handler_t::replace));
}

double reward_of(const Json& sample) {
  const auto found = sample.find("reward");
  return found != sample.end() && found->is_number() ? found->get<double>()
                                                     : std::numeric_limits<double>::quiet_NaN();
}

SampledCompletion completion_of(const Json& sample) {
  SampledCompletion completion;
  const auto add = [&](const Json& row, const char* key, bool is_observation) {
    if (completion.texts.size() < kShownTexts) {
      completion.texts.emplace_back(text_of(row, key), is_observation);
    } else {
      ++completion.turns_left_out;
    }
  };
  if (const auto turns = sample.find("turns"); turns != sample.end() && turns->is_array()) {
    for (const Json& turn : *turns) {
      add(turn, "completion", false);
      add(turn, "observation", true);
    }
  }
  add(sample, "text", false);
  completion.reward = reward_of(sample);
  if (const auto tokens = sample.find("tokens");
      tokens != sample.end() && tokens->is_number_integer())
    completion.tokens = tokens->get<std::int64_t>();
  const auto reason = sample.find("finish_reason");
  completion.is_truncated = reason != sample.end() && *reason == "length";
  return completion;
}

/// Nothing for a line that is no group.
std::optional<SampledGroup> group_of(const std::string& line) {
  try {
    const Json row = json::parse(line);
    if (!row.is_object()) return {};
    const auto step = row.find("step"), samples = row.find("samples");
    if (step == row.end() || !step->is_number_integer() || samples == row.end() ||
        !samples->is_array())
      return {};
    SampledGroup group;
    group.step = step->get<std::int64_t>();
    group.prompt = text_of(row, "prompt");
    group.answer = text_of(row, "answer");
    group.all_completions = std::ssize(*samples);
    for (const Json& sample : *samples) {
      if (!sample.is_object()) return {};
      group.reward_mean += reward_of(sample) / static_cast<double>(group.all_completions);
      if (group.completions.size() < kShownCompletions)
        group.completions.push_back(completion_of(sample));
    }
    return group;
  } catch (const DataError&) {
    return {};
  } catch (const Json::exception&) {
    return {};
  }
}

std::string html_of(const SampledText& text) {
  std::string out = escape_html(text.text);
  if (text.left_out > 0)
    out += fmt::format("<span class='soft'> … {} more bytes</span>", text.left_out);
  return out;
}

std::string number_of(double reward) {
  return std::isnan(reward) ? "unknown" : fmt::format("{:.4g}", reward);
}

std::string html_of(const SampledCompletion& completion) {
  std::string out = fmt::format("<div><div class='label'>Reward {} · {} tokens{}</div>",
                                number_of(completion.reward), completion.tokens,
                                completion.is_truncated ? ", cut off" : "");
  for (const auto& [text, is_observation] : completion.texts)
    out += fmt::format("<pre{}>{}</pre>", is_observation ? " class='soft'" : "", html_of(text));
  if (completion.turns_left_out > 0)
    out += fmt::format("<div class='soft'>{} more texts of its turns</div>",
                       completion.turns_left_out);
  return out + "</div>";
}

}  // namespace

GroupSamples read_group_samples(const std::filesystem::path& file) {
  GroupSamples samples;
  if (!std::filesystem::exists(file)) return samples;
  const OpenFile open(file);
  const Lines lines = find_lines(open);
  samples.groups = lines.count;
  for (const Range& range : lines.chosen) {
    std::optional<SampledGroup> group;
    if (range.end - range.begin <= kLongestLine) {
      std::string line(range.end - range.begin, '\0');
      line.resize(open.read(range.begin, line.data(), line.size()));
      group = group_of(line);
    }
    if (group) {
      samples.shown.push_back(*std::move(group));
    } else {
      ++samples.unreadable;
    }
  }
  return samples;
}

std::string render_groups(const GroupSamples& samples) {
  if (samples.groups == 0) return "";
  std::string out = fmt::format(
      "<h2>Sampled groups</h2>\n<div class='soft'>{} of {} groups in groups.jsonl: the first and "
      "the newest{}</div>\n",
      samples.shown.size(), samples.groups,
      samples.unreadable > 0
          ? fmt::format("; {} that cannot be read are left out", samples.unreadable)
          : "");
  for (const SampledGroup& group : samples.shown) {
    const auto more = group.all_completions - std::ssize(group.completions);
    out += fmt::format(
        "<div class='card block'><div class='head'><h3>Step {}</h3><span class='soft'>mean reward "
        "{} of {} completions{}</span></div><div class='label'>Prompt</div><pre>{}</pre>",
        group.step, number_of(group.reward_mean), group.all_completions,
        more > 0 ? fmt::format(", {} not shown", more) : "", html_of(group.prompt));
    if (!group.answer.text.empty())
      out += fmt::format("<div class='label'>Answer</div><pre>{}</pre>", html_of(group.answer));
    out += "<div class='grid pair'>";
    for (const SampledCompletion& completion : group.completions) out += html_of(completion);
    out += "</div></div>\n";
  }
  return out;
}

}  // namespace heddle::ui
