#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "comm/group.h"

namespace heddle::comm {

/// A group outside the world mesh: processes of two jobs, say a trainer and a rollout engine, that
/// know nothing of each other but this.
struct StandaloneOptions {
  std::string name = "standalone";
  Endpoint endpoint;
  std::int64_t rank = 0, size = 1;
  /// A secret of both sides. Who has another one is not heard.
  std::string secret;
  /// Counts how often the group was made. Both sides name the same; a connection is never repaired
  /// under its old number.
  std::int64_t generation = 0;
  Seconds timeout{60};
};

/// The meeting of one side. It works in a thread, so that a program can start several sides, or go
/// on with its own work, before it waits for any.
class StandaloneMeeting {
 public:
  /// Rank 0 gives the listening socket, bound beforehand; the others connect to the endpoint.
  static StandaloneMeeting start(StandaloneOptions options, std::optional<Listener> listener = {});

  /// The group once it is connected and a first sum over it has come out right. Throws CommError
  /// that says why not, at the latest a few seconds after the timeout.
  Group wait();
  /// wait() returns or throws at once.
  bool is_ready() const;

 private:
  std::future<Group> group_;
};

}  // namespace heddle::comm
