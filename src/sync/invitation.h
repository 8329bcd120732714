#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/standalone_group.h"

namespace heddle::sync {

/// Where and as whom the members of a sync group meet. The sender binds its listener first and
/// gives the invitation to the rollouts by whatever way there is; the port stays bound in between.
struct Invitation {
  comm::Endpoint endpoint;
  std::string secret;           ///< For this job.
  std::int64_t generation = 0;  ///< Rises with every group that is made.
  std::int64_t size = 2;        ///< The sender and the rollout ranks.

  std::string to_text() const;
  /// Throws ConfigError for anything that to_text() did not write.
  static Invitation from_text(const std::string& text);
  comm::StandaloneOptions options(std::int64_t rank, comm::Seconds timeout) const;
};

/// Waits for meetings that were all started before. The error of the first that fails, or of
/// `look`, which is called twice a second, ends the wait at once; the others end by themselves at
/// their deadline.
std::vector<comm::Group> await_all(std::vector<comm::StandaloneMeeting> meetings,
                                   const std::function<void()>& look);

}  // namespace heddle::sync
