#include "train/run_lock.h"

#include <unistd.h>

#include <array>
#include <string>

#include "base/chosen_directory.h"
#include "base/errors.h"
#include "base/log.h"

namespace heddle::train {
namespace {

// Time that the processes of a killed job may take until they are gone, when a script starts it
// again at once.
constexpr double kGraceSeconds = 3;

std::string this_process() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host = {"an unknown host"};
  return fmt::format("pid {} on {}", getpid(), host.data());
}

std::filesystem::path made(const std::filesystem::path& directory) {
  files::make_chosen_directory(directory, "train.output_dir");
  return directory / "run.lock";
}

}  // namespace

RunLock::RunLock(const std::filesystem::path& output_directory) : lock_(made(output_directory)) {
  bool is_mine = false;
  try {
    is_mine = lock_.try_lock_for(kGraceSeconds);
  } catch (const FileError& error) {
    log::warning("{}: nothing keeps a second run out of train.output_dir", error.what());
    return;
  }
  if (!is_mine) {
    const std::string holder = lock_.text();
    throw_error<ConfigError>(
        "train.output_dir: {} is in use by {}; wait for that run or stop it, or choose another "
        "train.output_dir",
        output_directory.string(), holder.empty() ? "another run" : holder);
  }
  lock_.set_text(this_process());
}

}  // namespace heddle::train
