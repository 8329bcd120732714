#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/world.h"
#include "config/run_config.h"

/// Where a job of rl.role trainer and one of rl.role rollout meet. Rank 0 of the trainers serves a
/// store at sync.listen, and says in the file of sync.rendezvous where that is. A rollout job takes
/// the next number N there:
///
///     arrived        rollout jobs that have come
///     job/N          ranks and facts (run_facts.h) of one
///     refused/N      why it is not taken
///     called/N       the trainer wants it; it answers with here/N
///     passed/N       it did not answer in time, and comes anew under another number if it lives
///     place/N        where both go on, as one job: trainer rank 0 and all rollout ranks
///     over           the trainer needs no rollouts any more
///     gone/N         it has read that, or was stopped
///
/// From there on everything is as with rl.rollout_ranks, and it ends with this one rollout job.
namespace heddle::rl {

/// A store, and the secret that opens it.
struct Place {
  comm::Endpoint endpoint;
  std::string secret;

  std::string to_text() const;
  /// Throws ConfigError that begins with `what`.
  static Place from_text(const std::string& text, const std::string& what);
};

/// sync.rendezvous or what it defaults to.
std::string rendezvous_file(const config::RunConfig& config);
/// Nothing if there is no such file. Throws ConfigError if others may read it, or if it is none.
std::optional<Place> read_place(const std::string& file);
/// Replaces the file by one that its owner alone may read. Throws FileError.
void write_place(const std::string& file, const Place& place);

/// A store on this host and where others find it.
struct OpenedStore {
  comm::Store store;
  Place place;
};
/// Port 0: the system chooses. A host that is a name is listened for at all addresses, as it may
/// mean another one here than elsewhere. Throws CommError.
OpenedStore open_store(const comm::Endpoint& where, std::string secret, comm::Seconds timeout);

/// The job of both: trainer rank 0 is rank 0 of it, a rollout with `place` r is rank r + 1.
/// `own`: the world of this rank's own job, null where it is alone. Throws CommError.
std::shared_ptr<comm::World> join_as_trainer(const Place& where, std::int64_t number,
                                             std::int64_t rollouts, comm::Seconds timeout);
std::shared_ptr<comm::World> join_as_rollout(const Place& where, std::int64_t number,
                                             const comm::World* own, comm::Seconds timeout);

/// Nonce of the job of both.
std::string joint_nonce(std::int64_t number);

inline constexpr const char* kArrivedKey = "arrived";
inline constexpr const char* kNoMoreKey = "over";
std::string job_key(std::int64_t number);
std::string refused_key(std::int64_t number);
std::string called_key(std::int64_t number);
std::string here_key(std::int64_t number);
std::string passed_key(std::int64_t number);
std::string gone_key(std::int64_t number);
std::string place_key(std::int64_t number);

}  // namespace heddle::rl
