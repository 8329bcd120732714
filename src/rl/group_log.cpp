#include "rl/group_log.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/json.h"
#include "data/readers/line_reader.h"

namespace heddle::rl {
namespace {

/// False for a line that a crash tore.
bool is_up_to(const std::string& line, std::int64_t step) {
  try {
    const Json row = json::parse(line);
    const auto found = row.find("step");
    return found != row.end() && found->is_number_integer() && *found <= step;
  } catch (const DataError&) {
    return false;
  }
}

/// Ids that the policy drew, and under which log-probabilities.
void put_tokens(const Trajectory& trajectory, Json& sample) {
  Json ids = Json::array(), logprobs = Json::array();
  for (std::size_t t = 0; t < trajectory.tokens.size(); ++t) {
    if (!trajectory.is_sampled(t)) continue;
    ids.push_back(trajectory.tokens[t]);
    logprobs.push_back(std::round(trajectory.logprobs[t] * 1e6) / 1e6);
  }
  sample["ids"] = std::move(ids);
  sample["logprobs"] = std::move(logprobs);
}

}  // namespace

void GroupLog::keep_up_to(std::int64_t step) const {
  if (!std::filesystem::exists(file_)) return;
  // Line by line: the file of a long run is larger than the memory.
  data::LineReader lines(file_);
  files::AtomicFile kept(file_);
  std::string line;
  while (true) {
    try {
      if (!lines.next(line)) break;
    } catch (const DataError&) {
      continue;  // longer than any of ours
    }
    if (is_up_to(line, step)) kept.write(line + "\n");
  }
  kept.commit();
}

void GroupLog::write(std::int64_t step, std::int64_t version, const Prompt& prompt,
                     const Group& group) const {
  Json samples = Json::array();
  for (const Trajectory& trajectory : group.trajectories) {
    Json sample = {{"reward", trajectory.reward},
                   {"tokens", trajectory.sampled_tokens()},
                   {"finish_reason", trajectory.is_truncated ? "length" : "stop"},
                   {"text", trajectory.text}};
    for (const Turn& turn : trajectory.turns)
      sample["turns"].push_back(
          {{"completion", turn.completion}, {"observation", turn.observation}});
    if (!trajectory.parts.empty()) sample["parts"] = trajectory.parts;
    // Runs of one version: [version, tokens].
    Json runs = Json::array();
    for (std::size_t t = 0; t < trajectory.versions.size(); ++t) {
      if (!trajectory.is_sampled(t)) continue;
      const std::int64_t v = trajectory.versions[t];
      if (!runs.empty() && runs.back()[0] == v) {
        runs.back()[1] = runs.back()[1].get<std::int64_t>() + 1;
      } else {
        runs.push_back({v, 1});
      }
    }
    sample["versions"] = runs;
    put_tokens(trajectory, sample);
    samples.push_back(sample);
  }
  const Json row = {{"step", step},
                    {"version", version},
                    {"cursor", group.cursor},
                    {"attempt", group.attempt},
                    {"prompt", group.opening ? group.opening->text : prompt.text},
                    {"answer", prompt.truth},
                    {"samples", samples}};
  const std::string text = row.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  const int descriptor = files::open_to_append(file_);  // follows no link that somebody put there
  std::string_view rest = text;
  while (!rest.empty()) {
    const ssize_t count = ::write(descriptor, rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) break;
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
  const int error = errno;
  ::close(descriptor);
  if (!rest.empty())
    throw_error<FileError>("{}: cannot be written to: {}", file_.string(), std::strerror(error));
}

}  // namespace heddle::rl
