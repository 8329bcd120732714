#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/world.h"

/// Rollout ranks of a job that are left, as its store says. A rollout that dies or freezes is given
/// up; trainer rank 0 then names those that go on, and they meet it anew under the next number.
///
///     rl/lost/RANK       why a rank is given up, by the launcher or by trainer rank 0
///     rl/broken/N        "RANK MESSAGE": a rollout of generation N could not go on
///     rl/generation/N    the members of generation N, and where they meet each other
///     rl/over            the trainer needs no rollouts any more
namespace heddle::rl {

/// A rank that is given up: a sentence without its subject.
std::string lost_key(std::int64_t rank);
std::string generation_key(std::int64_t generation);

struct Membership {
  std::int64_t generation = 0;
  std::vector<std::int64_t> ranks;         ///< Ranks of the job, in the order of their places.
  std::string endpoint = {}, secret = {};  ///< Where they meet each other, after the first.
};

/// Generation 0: all rollouts of the job. `job`: the world of the trainers or of the rollouts.
Membership all_rollouts(const comm::World& job);

/// Tells how long signs of life have not changed.
class SignsOfLife {
 public:
  explicit SignsOfLife(comm::Store store) : store_(std::move(store)) {}
  /// Time since the sign under the key (comm::pulse_key) was new, as far as calls have seen it.
  comm::Seconds age(const std::string& key);

 private:
  using Clock = std::chrono::steady_clock;
  struct Seen {
    std::string text;
    Clock::time_point at;
  };
  comm::Store store_;
  std::map<std::string, Seen> seen_;
};

/// Trainer rank 0's view of the rollouts.
class Roster {
 public:
  /// All rollouts of the job, in replicas of `replica` ranks; one that gives no sign of life for
  /// `silence` is lost.
  Roster(const comm::World& trainers, std::int64_t replica, comm::Seconds silence);

  const Membership& members() const { return members_; }
  /// The rollouts have met the trainer: from here on the launcher leaves lost ones to it.
  void met();
  /// Throws CommError if a member is lost, or if the members say that they cannot go on.
  void look() { look(silence_); }
  void look(comm::Seconds silence);
  /// After a failure: gives up lost members, with the replicas that they were part of, ends what
  /// the others wait for and names the next generation. Throws CommError with `failure` if nobody
  /// is lost, and with the reasons if nobody is left.
  void reform(const std::string& failure);
  /// Waits until the members of the new generation stand ready to meet. Throws CommError as look(),
  /// and after `timeout`.
  void await_ready(comm::Seconds timeout);
  /// The run needs no rollouts any more. Those that cannot be told otherwise learn it here.
  void end();
  /// After end(), if some could not be told: gives up those that are lost and lets the rest go.
  void dismiss();

 private:
  std::string pulse_of(std::int64_t rank) const;
  void give_up(std::int64_t rank, const std::string& why);
  /// Reasons by rank. Without a word of the launcher it takes a few seconds.
  std::map<std::int64_t, std::string> find_lost();
  /// Ends all waits of the members for each other.
  void end_waits(const std::string& why);
  void open_generation(Membership members);

  const comm::World& trainers_;
  std::int64_t replica_;
  comm::Seconds silence_;
  comm::Store store_;  ///< The job's.
  Membership members_;
  std::int64_t first_;                  ///< Rank of the job that is rollout 0.
  std::optional<comm::Store> meeting_;  ///< This generation's, if it is not the first.
  SignsOfLife signs_;
};

/// After a failure in generation `now`: tells the trainer and waits for its word. Nothing if this
/// rank is not to go on, because the run is over or it was given up; says why. Throws CommError
/// with `failure` if the job ends.
std::optional<Membership> next_generation(const comm::World& job, const Membership& now,
                                          const std::string& failure, comm::Seconds silence);
/// Meets the other rollouts of a generation. Throws CommError.
std::shared_ptr<comm::World> join(const comm::World& job, const Membership& members);
/// The members of a generation after the first are ready to meet the trainer; one of them says so.
void say_ready(const comm::World& rollouts);
/// "rank 3 failed: ...", of a rank of the job other than this one, whatever became of its part.
std::optional<std::string> failure_of_job(const comm::World& job);

}  // namespace heddle::rl
