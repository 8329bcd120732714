#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/launch_environment.h"
#include "comm/store.h"

namespace heddle::comm {

/// The device's process group of some ranks; comm/connection.cpp knows what it is.
struct DeviceGroup;
class DeviceWatch;

/// Consecutive ranks of a job that work as one, with a mesh of their own: the trainers or the
/// rollouts of a run. Without a name: all ranks.
struct JobPart {
  std::string name;
  std::int64_t first = 0, size = 0;
};

/// All ranks of one job or of a part of it, seen from one of them: the store through which they
/// met, a sign of life of each, and the first failure. One rank alone has no World.
class World {
 public:
  /// Returns when every rank has arrived. Throws CommError before `timeout` is over: who is
  /// missing, that the store belongs to another job (nonce), that two processes claim one rank, or
  /// that the ranks disagree about their number.
  static std::shared_ptr<World> join(const LaunchEnvironment& environment, Seconds timeout,
                                     const JobPart& part = {});
  /// Joins as the rank that serves the store, on a socket that was bound before.
  static std::shared_ptr<World> serve(const LaunchEnvironment& environment, Listener listener,
                                      Seconds timeout);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  /// Place in the part, and how many it has.
  std::int64_t rank() const { return environment_.rank - part_.first; }
  std::int64_t size() const { return part_.size; }
  const std::string& part() const { return part_.name; }
  const LaunchEnvironment& environment() const { return environment_; }
  /// Deadline of every operation.
  Seconds timeout() const { return timeout_; }
  /// Keys of the part alone, and keys of the whole job.
  const Store& store() const { return store_; }
  const Store& job_store() const { return job_store_; }
  /// The address under which this host talks to the others.
  const std::string& address() const { return address_; }

  /// Lets all ranks know that this one cannot go on, in the first line of the message; the first
  /// message of all stands. Then leaves as leave() does. Does not throw.
  void fail(const std::string& message) noexcept;
  /// "rank 3 failed: ...", a rank of the job; nothing as long as no other one has failed.
  std::optional<std::string> failure_of_another() const;
  /// True after fail().
  bool has_failed() const { return has_failed_; }
  /// Waits until every rank of the job has called it, at most a few seconds: the one that serves
  /// the store must go last. Does not throw.
  void leave() noexcept;

  /// How many groups this rank has made under the key before this one.
  std::int64_t count_group(const std::string& key) { return groups_made_[key]++; }
  /// The device's process group under the key, empty until a Connection has made it. Groups of the
  /// same ranks share it: HCCL wants one communicator for one set of ranks, and each costs memory.
  std::shared_ptr<DeviceGroup>& device_group(const std::string& key) { return device_groups_[key]; }
  /// After a collective that did not end, nothing may wait for the threads that still try.
  void set_broken() { is_broken_ = true; }
  bool is_broken() const { return is_broken_; }
  /// Over the collectives that this rank has queued on its device.
  DeviceWatch& device_watch() { return *device_watch_; }
  /// Describes this rank's work, for the others' diagnoses; an empty text is "computing".
  void set_activity(const std::string& activity);
  /// One sentence on each of these ranks that has given no sign of life lately, or if all have, on
  /// what they are doing; or what failure_of_another() says meanwhile. Takes a few seconds.
  std::string diagnose(const std::vector<std::int64_t>& ranks) const;

 private:
  class Pulse;
  World(LaunchEnvironment environment, JobPart part, Store job_store, Seconds timeout);
  static std::shared_ptr<World> meet(const LaunchEnvironment& environment, const JobPart& part,
                                     const Store& job_store, Seconds timeout);
  void arrive();
  void count_out() noexcept;
  std::string missing_ranks() const;

  LaunchEnvironment environment_;
  JobPart part_;
  Seconds timeout_;
  Store job_store_, store_;
  std::string address_;
  std::map<std::string, std::int64_t> groups_made_;
  std::map<std::string, std::shared_ptr<DeviceGroup>> device_groups_;
  std::atomic<bool> is_broken_ = false, has_failed_ = false;
  std::atomic<bool> is_counted_out_ = false;
  std::unique_ptr<Pulse> pulse_;
  std::unique_ptr<DeviceWatch> device_watch_;  ///< Last: it uses the others.
};

/// Runs `body`, and where it throws lets the other ranks know before anything of the caller is
/// destroyed: a destructor may wait for a disk or for them, while they wait for this rank. `world`
/// is null for one rank.
template <class Body>
auto announcing_failure(World* world, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    if (world != nullptr) world->fail(error.what());
    throw;
  }
}

/// The address of this host on the way to `peer`; "127.0.0.1" if all ranks are on one host.
std::string local_address(const Endpoint& peer);

/// The store of the job, at the place that the launcher names, below kStorePrefix; served by this
/// process if it is the one that does. A job whose ranks are all on one host meets on its loopback
/// address, where no other host can come. Throws CommError.
Store open_job_store(const LaunchEnvironment& environment, Seconds timeout);

/// Counts `ranks` of this process as gone from the job, for good or ill. A process that serves the
/// store waits until all ranks have, a few seconds at most: they would find a closed connection
/// instead of what the store says. Throws CommError.
void count_out(const Store& job_store, const LaunchEnvironment& environment,
               std::int64_t ranks = 1);

/// Key of the sign of life that a rank of a part gives twice a second, in the store of its job.
std::string pulse_key(const std::string& part, std::int64_t rank);

/// Below this prefix of the store stands what follows.
inline constexpr const char* kStorePrefix = "heddle";
/// The nonce of the job that the store belongs to, written by whoever serves it.
inline constexpr const char* kJobKey = "job";
/// A job's first failure: "RANK MESSAGE".
inline constexpr const char* kFailureKey = "failure";
/// Set when every rank of a job is counted out.
inline constexpr const char* kEmptyKey = "empty";
/// The time that the others have to read a store before whoever serves it goes.
inline constexpr Seconds kLeaving{10};

}  // namespace heddle::comm
