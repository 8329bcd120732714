#pragma once

#include <string>
#include <vector>

namespace heddle::comm {
struct LaunchEnvironment;
}

namespace heddle::cli {

/// Word by which several hosts say that no --job-id was given.
inline constexpr const char* kNoJobId = "no --job-id";

/// The end of "stopped after step 7; ": how a run goes on that `begun` (sft run.yaml ...) began.
/// `launch`: what started its ranks, null without a launcher. `log`: the file of rank 0's messages
/// that `heddle launch` gave it, "" without one. What another launcher was told only its user
/// knows.
std::string continuation(const std::vector<std::string>& begun,
                         const comm::LaunchEnvironment* launch, const std::string& log);

}  // namespace heddle::cli
