#include "rl/group_log.h"

#include <fstream>
#include <sstream>

#include "base/files.h"
#include "base/json.h"

namespace heddle::rl {

void GroupLog::keep_up_to(std::int64_t step) const {
  if (!std::filesystem::exists(file_)) return;
  std::istringstream lines(files::read(file_));
  std::string line, kept;
  while (std::getline(lines, line)) {
    try {
      if (json::parse(line).at("step").get<std::int64_t>() <= step) kept += line + "\n";
    } catch (const std::exception&) {
      // A line that a crash tore.
    }
  }
  files::write_atomically(file_, kept);
}

void GroupLog::write(std::int64_t step, std::int64_t version, const Prompt& prompt,
                     const Group& group) const {
  Json samples = Json::array();
  for (const Trajectory& trajectory : group.trajectories) {
    Json sample = {{"reward", trajectory.reward},
                   {"tokens", trajectory.tokens.size()},
                   {"finish_reason", trajectory.is_truncated ? "length" : "stop"},
                   {"text", trajectory.text}};
    if (!trajectory.parts.empty()) sample["parts"] = trajectory.parts;
    // Runs of one version: [version, tokens].
    Json runs = Json::array();
    for (const std::int64_t v : trajectory.versions) {
      if (!runs.empty() && runs.back()[0] == v) {
        runs.back()[1] = runs.back()[1].get<std::int64_t>() + 1;
      } else {
        runs.push_back({v, 1});
      }
    }
    sample["versions"] = runs;
    samples.push_back(sample);
  }
  const Json row = {{"step", step},           {"version", version},
                    {"cursor", group.cursor}, {"attempt", group.attempt},
                    {"prompt", prompt.text},  {"answer", prompt.truth},
                    {"samples", samples}};
  std::ofstream out(file_, std::ios::app);
  out << row.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n" << std::flush;
  if (!out) throw_error<FileError>("{}: cannot be written to", file_.string());
}

}  // namespace heddle::rl
