// A rollout rank as a process: heddle_sync_rollout FOLDER RANK. It says in the folder that it has
// started, takes part in the groups whose invitations appear there and writes each version that it
// has received whole.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "base/errors.h"
#include "base/files.h"
#include "sync/invitation.h"
#include "sync/weight_sync.h"
#include "weights.h"

using namespace heddle;

namespace {

constexpr int kLast = 3;

sync::Invitation next_invitation(const std::filesystem::path& folder, int generation) {
  const auto path = folder / ("invitation." + std::to_string(generation));
  while (!std::filesystem::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return sync::Invitation::from_text(files::read(path));
}

}  // namespace

int main(int, char** arguments) {
  const std::filesystem::path folder = arguments[1];
  std::int64_t rank = std::stoll(arguments[2]);
  const sync::testing::Weights weights;
  sync::Subscriber subscriber(weights.parts(), {4096, false});
  files::write_atomically(folder / ("ready." + std::string(arguments[2])), "1");
  for (int generation = 0; subscriber.version() < kLast; ++generation) {
    const sync::Invitation invitation = next_invitation(folder, generation);
    try {
      auto meeting = comm::StandaloneMeeting::start(invitation.options(rank, comm::Seconds(6)));
      subscriber.connect(sync::make_channel(meeting.wait()), generation);
      while (subscriber.version() < kLast) {
        const std::int64_t version = subscriber.receive();
        const bool is_right = weights.all_are(static_cast<double>(version));
        files::write_atomically(folder / ("received." + std::string(arguments[2])),
                                std::to_string(is_right ? version : -1));
      }
    } catch (const CommError&) {
      rank = 1;  // the only one that is left
    }
  }
}
