#include "rl/membership.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/log.h"
#include "base/random_hex.h"
#include "base/text.h"
#include "comm/part_loss.h"

namespace heddle::rl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr comm::Seconds kSignEvery{0.5};  ///< Between two looks at signs of life.
constexpr std::chrono::milliseconds kStorePoll{20};
/// A rank whose sign is the same in so many looks after a failure, over four seconds, is its cause.
/// Looks are counted and not the time: where the host stood still, nobody's sign is new.
constexpr int kDiagnosisLooks = 20;
constexpr std::chrono::milliseconds kBetweenLooks{200};
/// Ranks that die together are heard of within this time.
constexpr std::chrono::milliseconds kTogether{100};

constexpr const char* kOver = "rl/over";
constexpr const char* kReady = "ready";  ///< In the store of a generation.

std::string broken_key(std::int64_t generation) { return fmt::format("rl/broken/{}", generation); }

std::string nonce_of(std::int64_t generation) { return fmt::format("rollouts#{}", generation); }

std::string rank_failed(const std::string& record) {
  const auto space = record.find(' ');
  return fmt::format("rank {} failed: {}", record.substr(0, space), record.substr(space + 1));
}

}  // namespace

std::string lost_key(std::int64_t rank) { return fmt::format("rl/lost/{}", rank); }
std::string generation_key(std::int64_t generation) {
  return fmt::format("rl/generation/{}", generation);
}

Membership all_rollouts(const comm::World& job) {
  const std::int64_t world = job.environment().world;
  const bool is_trainer = job.part() == assembly::kTrainers;
  Membership all;
  for (std::int64_t rank = is_trainer ? job.size() : world - job.size(); rank < world; ++rank)
    all.ranks.push_back(rank);
  return all;
}

comm::Seconds SignsOfLife::age(const std::string& key) {
  const std::string text = store_.find(key).value_or("");
  const auto now = Clock::now();
  const auto [seen, is_first] = seen_.try_emplace(key, Seen{text, now});
  if (seen->second.text != text) seen->second = {text, now};
  return now - seen->second.at;
}

std::optional<std::string> failure_of_job(const comm::World& job) {
  const auto found = job.job_store().find(comm::kFailureKey);
  if (!found || found->starts_with(fmt::format("{} ", job.environment().rank))) return std::nullopt;
  return rank_failed(*found);
}

Roster::Roster(const comm::World& trainers, std::int64_t replica, comm::Seconds silence)
    : trainers_(trainers),
      replica_(replica),
      silence_(silence),
      store_(trainers.job_store().reconnected()),
      members_(all_rollouts(trainers)),
      first_(members_.ranks.front()),
      signs_(store_) {}

std::string Roster::pulse_of(std::int64_t rank) const {
  return comm::pulse_key(assembly::kRollouts, rank - first_);
}

void Roster::met() {
  if (members_.generation == 0) store_.set(generation_key(0), "");
}

void Roster::look(comm::Seconds silence) {
  for (const std::int64_t rank : members_.ranks) {
    if (const auto why = store_.find(lost_key(rank)))
      throw_error<CommError>("rl: rank {}, a rollout, {}", rank, *why);
    if (signs_.age(pulse_of(rank)) <= silence) continue;
    const std::string why =
        fmt::format("gave no sign of life for {:.3g} s ({})", silence.count(),
                    silence < silence_ ? "and another rollout job waits" : "sync.timeout_s");
    give_up(rank, why);
    throw_error<CommError>("rl: rank {}, a rollout, {}", rank, why);
  }
  if (const auto broken = store_.find(broken_key(members_.generation)))
    throw_error<CommError>("rl: {}", rank_failed(*broken));
}

void Roster::give_up(std::int64_t rank, const std::string& why) {
  store_.set_if_absent(lost_key(rank), why);
}

std::map<std::int64_t, std::string> Roster::find_lost() {
  std::map<std::int64_t, std::string> lost;
  const auto look = [&] {
    for (const std::int64_t rank : members_.ranks) {
      if (const auto why = store_.find(lost_key(rank))) lost[rank] = *why;
    }
  };
  std::map<std::int64_t, std::string> silent;  // its sign at the first look
  for (const std::int64_t rank : members_.ranks)
    silent[rank] = store_.find(pulse_of(rank)).value_or("");
  for (int looks = 0; looks < kDiagnosisLooks; ++looks) {
    look();
    if (!lost.empty()) {
      std::this_thread::sleep_for(kTogether);
      look();
      return lost;
    }
    if (const auto failure = trainers_.failure_of_another()) throw CommError(*failure);
    std::this_thread::sleep_for(kBetweenLooks);
    std::erase_if(silent, [&](const auto& sign) {
      return store_.find(pulse_of(sign.first)).value_or("") != sign.second;
    });
  }
  for (const auto& [rank, sign] : silent)
    give_up(rank, "gave no sign of life for 4 s after a failure");
  look();
  return lost;
}

void Roster::end_waits(const std::string& why) {
  const comm::Store& meeting = meeting_ ? *meeting_ : store_;
  meeting.below(assembly::kRollouts).set_if_absent(comm::kPartLossKey, why);
}

void Roster::reform(const std::string& failure) {
  const std::map<std::int64_t, std::string> lost = find_lost();
  if (lost.empty()) throw CommError(failure);
  std::vector<std::string> reasons;
  for (const auto& [rank, why] : lost) reasons.push_back(fmt::format("rank {} {}", rank, why));
  const std::string reason = text::list_some(reasons, 8);
  end_waits("rl: " + reason);
  std::vector<std::int64_t> left, with_them;
  for (std::size_t first = 0; first < members_.ranks.size();
       first += static_cast<std::size_t>(replica_)) {
    const std::vector<std::int64_t> replica(
        members_.ranks.begin() + static_cast<std::ptrdiff_t>(first),
        members_.ranks.begin() + static_cast<std::ptrdiff_t>(first) + replica_);
    const bool is_whole =
        std::ranges::none_of(replica, [&](std::int64_t rank) { return lost.contains(rank); });
    for (const std::int64_t rank : replica) {
      if (is_whole) {
        left.push_back(rank);
      } else if (!lost.contains(rank)) {
        with_them.push_back(rank);
      }
    }
  }
  if (left.empty()) throw_error<CommError>("rl: no rollout is left: {}", reason);
  const std::size_t before = members_.ranks.size();
  open_generation({members_.generation + 1, std::move(left)});
  log::warning(
      "rl: {}{}; the run goes on with {} of {} rollout ranks, as generation {}: what was being "
      "generated is generated again",
      reason,
      with_them.empty()
          ? ""
          : fmt::format(", and its replica ends (ranks {})", fmt::join(with_them, ", ")),
      members_.ranks.size(), before, members_.generation);
}

/// The store of a generation is here: it outlives whoever of the rollouts dies next.
void Roster::open_generation(Membership members) {
  comm::Listener listener(
      comm::make_endpoint(trainers_.address(), 0, "the address of the trainer's rank 0"));
  members_ = std::move(members);
  members_.endpoint =
      comm::make_endpoint(trainers_.address(), listener.port(), "the listener").to_string();
  members_.secret = random_hex(16);
  meeting_ = comm::Store::serve(std::move(listener), trainers_.timeout(), members_.secret)
                 .below(comm::kStorePrefix);
  meeting_->set(comm::kJobKey, nonce_of(members_.generation));
  store_.set(generation_key(members_.generation), nlohmann::json{{"ranks", members_.ranks},
                                                                 {"endpoint", members_.endpoint},
                                                                 {"secret", members_.secret}}
                                                      .dump());
}

void Roster::await_ready(comm::Seconds timeout) {
  const auto begun = Clock::now();
  auto next_look = begun;
  const comm::Store& meeting = meeting_ ? *meeting_ : store_;
  while (!meeting.find(kReady)) {
    const auto now = Clock::now();
    if (now - begun > timeout) {
      throw_error<CommError>(
          "rl: the rollouts of generation {} (ranks {}) were not ready within {:.3g} s "
          "(parallel.timeout_s)",
          members_.generation, fmt::join(members_.ranks, ", "), timeout.count());
    }
    if (now >= next_look) {
      next_look = now + std::chrono::duration_cast<Clock::duration>(kSignEvery);
      if (const auto failure = trainers_.failure_of_another()) throw CommError(*failure);
      look();
    }
    std::this_thread::sleep_for(kStorePoll);
  }
}

void Roster::end() { store_.set(kOver, "1"); }

void Roster::dismiss() {
  for (const auto& [rank, why] : find_lost()) log::warning("rl: rank {}, a rollout, {}", rank, why);
  end_waits("rl: the run is over");
}

std::optional<Membership> next_generation(const comm::World& job, const Membership& now,
                                          const std::string& failure, comm::Seconds silence) {
  const comm::Store& store = job.job_store();
  const std::int64_t self = job.environment().rank;
  store.set_if_absent(broken_key(now.generation),
                      fmt::format("{} {}", self, failure.substr(0, failure.find('\n'))));
  log::warning("rl: {}", failure);
  SignsOfLife signs(store);
  while (true) {
    if (const auto text = store.find(generation_key(now.generation + 1))) {
      const auto value = nlohmann::json::parse(*text);
      Membership next{now.generation + 1, value.at("ranks").get<std::vector<std::int64_t>>(),
                      value.at("endpoint").get<std::string>(),
                      value.at("secret").get<std::string>()};
      if (std::ranges::find(next.ranks, self) != next.ranks.end()) return next;
      log::warning("rl: this rank ends: generation {} goes on without it (ranks {})",
                   next.generation, fmt::join(next.ranks, ", "));
      return std::nullopt;
    }
    if (store.find(kOver)) return std::nullopt;
    if (failure_of_job(job)) throw CommError(failure);
    if (signs.age(comm::pulse_key(assembly::kTrainers, 0)) > silence) {
      throw_error<CommError>(
          "rl: rank 0, the first of the trainers, gave no sign of life for {:.3g} s "
          "(sync.timeout_s), after: {}",
          silence.count(), failure);
    }
    std::this_thread::sleep_for(10 * kStorePoll);
  }
}

std::shared_ptr<comm::World> join(const comm::World& job, const Membership& members) {
  const std::vector<std::int64_t>& ranks = members.ranks;
  comm::LaunchEnvironment environment = job.environment();
  const auto size = std::ssize(ranks);
  const std::int64_t first = environment.world - size;
  const auto place = std::ranges::find(ranks, environment.rank) - ranks.begin();
  environment.rank = first + place;
  environment.launcher = comm::kHeddleLaunch;
  environment.master = comm::parse_endpoint(members.endpoint, "the trainer's listener");
  environment.secret = members.secret;
  environment.nonce = nonce_of(members.generation);
  environment.serves_store = environment.announces_job = environment.has_agent_store = false;
  return comm::World::join(environment, job.timeout(), {assembly::kRollouts, first, size});
}

void say_ready(const comm::World& rollouts) { rollouts.job_store().set(kReady, "1"); }

}  // namespace heddle::rl
