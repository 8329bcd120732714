#pragma once

#include <atomic>
#include <memory>

#include "comm/world.h"
#include "config/run_config.h"

namespace heddle::rl {

/// The work of a rank in a job of rl.role rollout: finds the trainer by sync.rendezvous and
/// generates for it until it says that the run is over, or until `stop` (rank 0's counts). When the
/// trainer is lost, waits for it to come again. `own`: the world of the job, null for one rank.
/// Throws ConfigError if the trainer refuses this job, CommError if none answers within
/// sync.rendezvous_timeout_s or a rank of the job fails, and as run_rollouts().
void run_rollout_job(const config::RunConfig& config, const std::shared_ptr<comm::World>& own,
                     const std::atomic<bool>& stop);

}  // namespace heddle::rl
