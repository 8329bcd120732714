#include "rl/rollout_job.h"

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/log.h"
#include "rl/membership.h"
#include "rl/rendezvous.h"
#include "rl/rollouts.h"
#include "rl/run_facts.h"

namespace heddle::rl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{100};
/// A store that is there answers within this time.
constexpr comm::Seconds kTry{2};
/// Between two looks at the ranks of this job.
constexpr comm::Seconds kLook{0.5};
/// So long nothing is said of a trainer that does not call.
constexpr std::chrono::seconds kQuiet{5};

/// How a search for the trainer ended; it travels from rank 0 of the job to the others.
struct Found {
  enum class What { kPlace, kOver, kStopped, kRefused, kNobody };
  What what = What::kNobody;
  std::int64_t number = 0;
  std::string text = {};  ///< A Place, or why it is not one.

  std::string to_text() const {
    return nlohmann::json{static_cast<int>(what), number, text}.dump();
  }
  static Found from_text(const std::string& from) {
    const auto value = nlohmann::json::parse(from);
    return {static_cast<What>(value.at(0).get<int>()), value.at(1).get<std::int64_t>(),
            value.at(2).get<std::string>()};
  }
};

/// Rank 0's search for the trainer.
class Search {
 public:
  Search(const config::RunConfig& config, const Facts& facts, std::int64_t ranks,
         const std::atomic<bool>& stop)
      : file_(rendezvous_file(config)),
        facts_(facts),
        ranks_(ranks),
        patience_(config.sync.rendezvous_timeout_s),
        stop_(stop) {}

  Found run() {
    auto begun = Clock::now();
    while (!stop_) {
      std::string obstacle = fmt::format("{} is not there", file_);
      try {
        if (const std::optional<Place> place = read_place(file_)) {
          const comm::Store store =
              comm::Store::connect(place->endpoint, kTry, place->secret).below(comm::kStorePrefix);
          begun = Clock::now();
          return wait_for_call(store, place->endpoint);
        }
      } catch (const CommError& error) {
        // How long one try took is no news.
        obstacle = error.what();
        obstacle = obstacle.substr(0, obstacle.find(", after "));
      } catch (const ConfigError& error) {
        return {.what = Found::What::kRefused, .text = error.what()};
      }
      if (said_.insert(obstacle).second) {
        log::info("rl: waits for the trainer, {:.3g} s at most (sync.rendezvous_timeout_s): {}",
                  patience_.count(), obstacle);
      }
      if (Clock::now() - begun > patience_) {
        return {.text = fmt::format(
                    "rl: no trainer was found within {:.3g} s (sync.rendezvous_timeout_s): {}",
                    patience_.count(), obstacle)};
      }
      std::this_thread::sleep_for(kPoll);
    }
    return {.what = Found::What::kStopped};
  }

 private:
  /// A trainer whose store answers lives: it may be in the middle of a long step, or have another
  /// rollout job.
  Found wait_for_call(const comm::Store& store, const comm::Endpoint& where) const {
    std::int64_t number = 0;
    bool is_here = false, has_said = false;
    const auto arrive = [&] {
      number = store.add(kArrivedKey, 1);
      store.set(job_key(number), nlohmann::json{{"ranks", ranks_}, {"facts", facts_}}.dump());
      is_here = false;
    };
    arrive();
    const auto begun = Clock::now();
    while (!stop_) {
      if (const auto place = store.find(place_key(number)))
        return {Found::What::kPlace, number, *place};
      if (store.find(kNoMoreKey)) {
        say_gone(store, number);
        return {.what = Found::What::kOver};
      }
      if (store.find(passed_key(number))) arrive();
      if (const auto why = store.find(refused_key(number))) {
        return {.what = Found::What::kRefused,
                .text = fmt::format("rl: the trainer at {} refuses this job: {}", where.to_string(),
                                    *why)};
      }
      if (!is_here && store.find(called_key(number))) {
        store.set(here_key(number), "1");
        is_here = true;
      }
      if (!is_here && !has_said && Clock::now() - begun > kQuiet) {
        log::info(
            "rl: the trainer at {} has not called this job yet: it is in a step, or has another "
            "rollout job; waits as long as it lives",
            where.to_string());
        has_said = true;
      }
      std::this_thread::sleep_for(kPoll);
    }
    say_gone(store, number);
    return {.what = Found::What::kStopped};
  }

  static void say_gone(const comm::Store& store, std::int64_t number) {
    try {
      store.set(gone_key(number), "1");
    } catch (const CommError&) {
      // The trainer has not waited for it.
    }
  }

  std::string file_;
  const Facts& facts_;
  std::int64_t ranks_;
  comm::Seconds patience_;
  const std::atomic<bool>& stop_;
  std::set<std::string> said_;  ///< Obstacles.
};

/// A value in the store of a job, which a rank that lives gives sooner or later.
std::string wait_for(const comm::World& own, const std::string& key) {
  SignsOfLife signs(own.store().reconnected());
  while (true) {
    if (const auto text = own.store().wait(key, kLook)) return *text;
    if (const auto failure = own.failure_of_another()) throw CommError(*failure);
    for (std::int64_t rank = 0; rank < own.size(); ++rank) {
      if (signs.age(comm::pulse_key("", rank)) <= own.timeout()) continue;
      throw_error<CommError>(
          "rl: rank {} of the rollouts gave no sign of life for {:.3g} s (parallel.timeout_s)",
          rank, own.timeout().count());
    }
  }
}

/// Gives all ranks of the job what rank 0 found. It begins when all have come: a trainer is not
/// to wait for one that has died.
template <class Find>
Found on_all_ranks(comm::World* own, std::int64_t attempt, const Find& find) {
  if (own == nullptr) return find();
  const comm::Store& store = own->store();
  const auto key_of = [&](const char* what) { return fmt::format("rl/{}/{}", what, attempt); };
  if (store.add(key_of("looking"), 1) == own->size()) store.set(key_of("all"), "1");
  if (own->rank() == 0) {
    wait_for(*own, key_of("all"));
    const Found found = find();
    store.set(key_of("found"), found.to_text());
    return found;
  }
  return Found::from_text(wait_for(*own, key_of("found")));
}

/// Generates for a trainer. False if its run is not over.
bool serve(const config::RunConfig& config, const Found& found, comm::World* own,
           const RolloutData& data, const std::atomic<bool>& stop) {
  const auto joint = join_as_rollout(Place::from_text(found.text, "place of the trainer"),
                                     found.number, own, comm::Seconds(config.parallel.timeout_s));
  log::info("rl: generates for the trainer as rollout job {}", found.number);
  return comm::announcing_failure(joint.get(), [&] {
    const bool is_over = run_rollouts(config, joint, data, &stop);
    if (is_over) joint->leave();
    return is_over;
  });
}

}  // namespace

void run_rollout_job(const config::RunConfig& config, const std::shared_ptr<comm::World>& own,
                     const std::atomic<bool>& stop) {
  const RolloutData data = rollout_data(config);
  const Facts facts = facts_of_job(config, *data.prompts);
  for (std::int64_t attempt = 0;; ++attempt) {
    const Found found = on_all_ranks(own.get(), attempt, [&] {
      return Search(config, facts, own ? own->size() : 1, stop).run();
    });
    bool is_over = found.what == Found::What::kOver;
    if (found.what == Found::What::kRefused) throw ConfigError(found.text);
    if (found.what == Found::What::kNobody) throw CommError(found.text);
    if (found.what == Found::What::kPlace) {
      try {
        is_over = serve(config, found, own.get(), data, stop);
      } catch (const CommError& error) {
        if (own && own->failure_of_another()) throw;
        log::warning("rl: the trainer is lost: {}", error.what());
        continue;
      }
    }
    log::info("{}", is_over ? "rl: the trainer needs no rollouts any more; this job ends"
                            : "rl: this job was asked to stop, and ends; the trainer waits for "
                              "another one");
    return;
  }
}

}  // namespace heddle::rl
