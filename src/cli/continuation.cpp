#include "cli/continuation.h"

#include <fmt/format.h>

#include <filesystem>

#include "cli/application.h"
#include "cli/command.h"
#include "comm/launch_environment.h"

namespace heddle::cli {

std::string continuation(const std::vector<std::string>& begun,
                         const comm::LaunchEnvironment* launch, const std::string& log) {
  // The run goes on from its own newest checkpoint, wherever it began.
  std::vector<std::string> command = begun;
  std::erase_if(command, [](const std::string& word) { return word.starts_with("train.resume="); });
  if (launch == nullptr) return fmt::format("continue with:\n  {}", quote_command(command));
  if (launch->launcher != "heddle launch") {
    return fmt::format("continue by starting it with {} in the same way: {}", launch->launcher,
                       quote_command(command));
  }
  const std::int64_t hosts = launch->world / launch->local_world;
  std::vector<std::string> again = {"launch", "--nproc", std::to_string(launch->local_world)};
  if (hosts > 1) {
    again.insert(again.end(), {"--nnodes", std::to_string(hosts), "--node-rank",
                               std::to_string(launch->rank / launch->local_world), "--master",
                               launch->master.to_string()});
    if (launch->nonce != kNoJobId) again.insert(again.end(), {"--job-id", launch->nonce});
  }
  const std::string directory = std::filesystem::path(log).parent_path();
  if (!directory.empty() && directory != kLaunchLogDirectory)
    again.insert(again.end(), {"--log-dir", directory});
  again.emplace_back("--");
  again.insert(again.end(), command.begin(), command.end());
  return fmt::format("continue with{}:\n  {}",
                     hosts > 1 ? ", on every host with its --node-rank" : "", quote_command(again));
}

}  // namespace heddle::cli
