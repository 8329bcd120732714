#include "rl/remote_generation.h"

#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "rl/batch_bytes.h"
#include "rl/published.h"
#include "rl/run_facts.h"
#include "rl/timed.h"
#include "sync/verification.h"

namespace heddle::rl {
namespace {

using Clock = std::chrono::steady_clock;

/// So long other trainer ranks wait in a collective at most.
constexpr comm::Seconds kRound{1};
/// A rollout job that gives no sign of life for so long is lost if another one waits.
constexpr comm::Seconds kSilenceBeforeGuest{5};
/// So many rollout jobs without a batch between them are no accident.
constexpr std::int64_t kMostFailures = 3;
/// First characters of what trainer rank 0 tells the others.
constexpr char kAnswer = '=', kFailure = '!';

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Why the rollouts of another job say that they end: more than a connection that was closed tells.
std::optional<std::string> words_of_rollouts(const comm::World& joint) {
  try {
    return joint.failure_of_another();
  } catch (const CommError&) {
    return std::nullopt;  // This process stood still for long, and its store with it.
  }
}

}  // namespace

RemoteGeneration::RemoteGeneration(const config::RunConfig& config,
                                   const assembly::ModelOnRanks& model, const Prompts& prompts)
    : config_(config),
      model_(model),
      prompts_(prompts),
      device_(model.context.device),
      world_(model.context.mesh.world()),
      trainers_(model.context.mesh.world_group()),
      publisher_(trainers_, sync::sent_parts(published(config, model), model.context.mesh),
                 sync_options(config.sync, device_)),
      state_{{"next_cursor", 0},
             {"pending", nlohmann::json::array()},
             {"finished", nlohmann::json::array()}},
      rollout_ranks_(config.rl.rollout_ranks) {
  if (config.rl.has_two_jobs()) {
    if (trainers_.rank() == 0)
      reception_ = std::make_unique<Reception>(config, world_.get(), facts_of_job(config, prompts));
    await_rollouts("");
  } else if (trainers_.rank() == 0) {
    joint_ = world_;
    roster_ =
        std::make_unique<Roster>(*joint_, config.rollout.tp, comm::Seconds(config.sync.timeout_s));
    meet_rollouts();
    connect();
    roster_->met();
  }
  if (trainers_.rank() > 0) return;
  log::info("weights go to the rollouts by {}: {:.3g} GB in {} buckets",
            carrier_of(sync_options(config.sync, device_)),
            static_cast<double>(publisher_.manifest().bytes()) / 1e9,
            publisher_.manifest().buckets().size());
}

RemoteGeneration::~RemoteGeneration() {
  if (!link_ || std::uncaught_exceptions() > 0) return;
  try {
    roster_->end();
    try {
      roster_->look();
      link_->send(packed({{"do", "end"}}));
      if (reception_) {
        joint_->leave();
        reception_->wait_until_empty();
      }
    } catch (const CommError&) {
      if (!reception_) roster_->dismiss();
    }
  } catch (const std::exception& error) {
    log::warning("rl: the rollouts could not be told that the run is over: {}", error.what());
  }
}

void RemoteGeneration::meet_rollouts() {
  const Timed timed(publications_.rendezvous_s);
  met_ = meet(config_.sync, *joint_, roster_->members(), facts_of_run(config_, prompts_));
}

/// On the thread that owns the device.
void RemoteGeneration::connect() {
  const Timed timed(publications_.rendezvous_s);
  const std::int64_t generation = roster_->members().generation;
  publisher_.connect(std::move(met_.weights), generation + 1);
  link_ = std::make_unique<Link>(std::move(met_.messages), *joint_, generation, [this] { look(); });
}

void RemoteGeneration::look() {
  if (world_) {
    if (const auto failure = world_->failure_of_another()) throw CommError(*failure);
  }
  if (!reception_) {
    roster_->look();
    return;
  }
  if (const auto failure = joint_->failure_of_another()) throw CommError(*failure);
  // One that was started again may come before the silence of the dead one is long enough.
  roster_->look(reception_->has_guest() ? kSilenceBeforeGuest
                                        : comm::Seconds(config_.sync.timeout_s));
}

std::string RemoteGeneration::ask(const nlohmann::json& message) {
  bool is_sent = false;
  while (true) {
    // Its first character tells an answer, which may be empty, from a failure and from none.
    std::string news;
    if (trainers_.rank() == 0) {
      try {
        if (!std::exchange(is_sent, true)) link_->send(packed(message));
        if (const auto answer = link_->receive_within(kRound)) news = kAnswer + *answer;
      } catch (const CommError& error) {
        news = kFailure + std::string(error.what());
      }
    }
    news = trainers_.all_gather_objects(news).front();
    if (news.empty()) continue;
    if (news.front() == kFailure) throw CommError(news.substr(1));
    return news.substr(1);
  }
}

template <class Work>
void RemoteGeneration::surviving(const Work& work) {
  while (true) {
    try {
      work();
      return;
    } catch (const CommError& error) {
      recover(error.what());
    }
  }
}

void RemoteGeneration::recover(const std::string& failure) {
  is_published_ = false;
  link_.reset();
  publisher_.disconnect();
  await_rollouts(failure);
  surviving([&] { tell_state(); });
}

void RemoteGeneration::await_rollouts(std::string reason) {
  std::future<void> meeting;
  for (std::string news; news.empty();) {
    if (trainers_.rank() == 0) {
      if (!meeting.valid()) {
        meeting = std::async(std::launch::async, [this, reason] {
          reception_ ? meet_another_job(reason) : meet_those_left(reason);
        });
      }
      news = news_of(meeting, reason);
    }
    // The other trainer ranks look every second whether it is done.
    news = trainers_.all_gather_objects(news).front();
    if (news.empty()) continue;
    if (news.front() == kFailure) throw CommError(news.substr(1));
    rollout_ranks_ = std::stoll(news.substr(1));
  }
}

void RemoteGeneration::meet_those_left(std::string reason) {
  while (true) {
    roster_->reform(reason);
    try {
      roster_->await_ready(comm::Seconds(config_.parallel.timeout_s));
      meet_rollouts();
      return;
    } catch (const CommError& error) {
      reason = error.what();
    }
  }
}

void RemoteGeneration::meet_another_job(std::string reason) {
  while (true) {
    if (joint_) reason = words_of_rollouts(*joint_).value_or(reason);
    roster_.reset();
    joint_.reset();
    if (jobs_without_batch_++ == kMostFailures)
      throw_error<CommError>("rl: {} rollout jobs in a row came to nothing: {}", kMostFailures,
                             reason);
    const Guest guest = reception_->await(reason);
    try {
      joint_ = reception_->admit(guest);
      // It is lost as a whole: its launcher ends the other ranks.
      roster_ =
          std::make_unique<Roster>(*joint_, guest.ranks, comm::Seconds(config_.sync.timeout_s));
      roster_->await_ready(comm::Seconds(config_.parallel.timeout_s));
      meet_rollouts();
      return;
    } catch (const CommError& error) {
      reason = error.what();
    }
  }
}

std::string RemoteGeneration::news_of(std::future<void>& meeting, std::string& reason) {
  if (meeting.wait_for(kRound) != std::future_status::ready) return "";
  try {
    meeting.get();
    try {
      connect();
    } catch (const CommError& error) {
      reason = error.what();  // of a further loss: they meet again
      return "";
    }
    return kAnswer + std::to_string(roster_->members().ranks.size());
  } catch (const std::exception& error) {
    return kFailure + std::string(error.what());
  }
}

void RemoteGeneration::tell_state() {
  ask({{"do", "restore"},
       {"state", state_},
       {"finished", as_binary(to_bytes(Batch{.groups = finished_}))},
       {"version", version_}});
}

void RemoteGeneration::publish() {
  ask({{"do", is_published_ ? "update" : "refresh"}, {"version", version_}});
  const sync::SyncReport report = [&] {
    try {
      return publisher_.publish(version_);
    } catch (const CommError& error) {
      throw_error<CommError>("weights of version {} to the rollouts: {}", version_, error.what());
    }
  }();
  hash_ = report.weights_hash;
  publications_.bytes += report.bytes;
  publications_.damaged += report.damaged;
  publications_.wire_s += report.seconds;
  const bool is_first = !std::exchange(is_published_, true);
  log::debug("rl: weights {} published: {} bytes in {:.3f} s", version_, report.bytes,
             report.seconds);
  const std::int64_t every = config_.sync.verify;
  if (every > 0 && (is_first || version_ % every == 0)) verify();
}

void RemoteGeneration::verify() {
  nlohmann::json hashes = nlohmann::json::array();
  for (const sync::TensorHash& tensor : sync::sent_hashes(
           sync::sent_parts(published(config_, model_), model_.context.mesh), trainers_))
    hashes.push_back({tensor.name, tensor.hash});
  const auto answer = nlohmann::json::parse(ask({{"do", "verify"}, {"hashes", hashes}}));
  const auto difference = answer.at("difference").get<std::string>();
  if (!difference.empty()) {
    throw_error<Error>(
        "sync.verify: weights of version {} are not the trainer's after they were sent: {}",
        version_, difference);
  }
  publications_.verified += std::ssize(hashes);
}

Batch RemoteGeneration::next() {
  Batch batch;
  const auto begin = Clock::now();
  double sync_s = 0;
  surviving([&] {
    if (!is_published_) {
      const Timed timed(sync_s);
      publish();
    }
    batch = batch_from_bytes(ask({{"do", "next"}}));
  });
  batch.waited_s = seconds_since(begin) - sync_s;
  batch.sync_s = sync_s;
  batch.rollout_ranks = rollout_ranks_;
  state_ = batch.state;
  finished_.clear();
  jobs_without_batch_ = 0;
  return batch;
}

Batch RemoteGeneration::standing() {
  Batch standing;
  // No group outlives the weights that draw it, and those that are under way already are drawn
  // again by the same seeds.
  if (config_.rl.staleness() == 0) {
    standing.state = state_;
    return standing;
  }
  surviving([&] { standing = batch_from_bytes(ask({{"do", "standing"}})); });
  // The ledger has what happened until now, so that whoever is left goes on from here.
  state_ = standing.state;
  finished_ = standing.groups;
  return standing;
}

void RemoteGeneration::updated() {
  ++version_;
  surviving([&] { publish(); });
}

std::string RemoteGeneration::weights_hash() {
  return hash_text(publisher_.manifest(), is_published_ ? hash_ : publisher_.weights_hash());
}

void RemoteGeneration::restore(const nlohmann::json& state, std::vector<Group> finished,
                               std::int64_t version) {
  version_ = version;
  state_ = state;
  finished_ = std::move(finished);
  is_published_ = false;
  surviving([&] { tell_state(); });
}

}  // namespace heddle::rl
