#include "rl/remote_generation.h"

#include <chrono>
#include <exception>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "config/shared_entries.h"
#include "rl/batch_bytes.h"
#include "rl/published.h"

namespace heddle::rl {
namespace {

using Clock = std::chrono::steady_clock;

/// So long other trainer ranks wait in a collective at most.
constexpr comm::Seconds kRound{1};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

std::string facts_of_run(const config::RunConfig& config, const Prompts& prompts) {
  std::string facts = "prompts " + prompts.key() + "\n";
  for (const auto& [key, value] : config::shared_entries(config))
    facts += fmt::format("{} {}\n", key, value);
  return facts;
}

RemoteGeneration::RemoteGeneration(const config::RunConfig& config,
                                   const assembly::ModelOnRanks& model, const Prompts& prompts)
    : trainers_(model.context.mesh.world_group()),
      publisher_(trainers_, sync::sent_parts(published(config, model), model.context.mesh),
                 sync_options(config.sync, model.context.device)) {
  const comm::World& world = *model.context.mesh.world();
  if (world.rank() > 0) return;
  Channels channels = meet(config.sync, world, facts_of_run(config, prompts));
  publisher_.connect(std::move(channels.weights), 1);
  log::info("weights go to the rollouts by {}: {:.3g} GB in {} buckets",
            carrier_of(sync_options(config.sync, model.context.device)),
            static_cast<double>(publisher_.manifest().bytes()) / 1e9,
            publisher_.manifest().buckets().size());
  link_ = std::make_unique<Link>(std::move(channels.messages), world,
                                 comm::Seconds(config.sync.timeout_s));
}

RemoteGeneration::~RemoteGeneration() {
  if (!link_ || std::uncaught_exceptions() > 0) return;
  try {
    link_->send(nlohmann::json{{"do", "end"}}.dump());
  } catch (const std::exception& error) {
    log::warning("rl: the rollouts could not be told that the run is over: {}", error.what());
  }
}

std::string RemoteGeneration::ask(const std::string& message) {
  if (link_) link_->send(message);
  while (true) {
    std::optional<std::string> answer;
    if (link_) answer = link_->receive_within(kRound);
    if (trainers_.size() == 1) {
      if (answer) return *answer;
      continue;
    }
    // An answer may be empty, so that a character tells whether there is one.
    const std::string all = trainers_.all_gather_objects(answer ? "=" + *answer : "").front();
    if (!all.empty()) return all.substr(1);
  }
}

void RemoteGeneration::publish(const char* message) {
  const auto begin = Clock::now();
  ask(nlohmann::json{{"do", message}, {"version", version_}}.dump());
  const sync::SyncReport report = [&] {
    try {
      return publisher_.publish(version_);
    } catch (const CommError& error) {
      // The group of the weights counts its own ranks.
      throw_error<CommError>("weights of version {} to the rollouts, the ranks from {} on: {}",
                             version_, trainers_.size(), error.what());
    }
  }();
  hash_ = report.weights_hash;
  sync_s_ = seconds_since(begin);
  is_published_ = true;
  log::debug("rl: weights {} published: {} bytes in {:.3f} s", version_, report.bytes,
             report.seconds);
}

Batch RemoteGeneration::next() {
  if (!is_published_) publish("refresh");
  const auto begin = Clock::now();
  Batch batch = batch_from_bytes(ask(nlohmann::json{{"do", "next"}}.dump()));
  batch.waited_s = seconds_since(begin);
  batch.sync_s = std::exchange(sync_s_, 0);
  return batch;
}

void RemoteGeneration::updated() {
  ++version_;
  publish("update");
}

std::string RemoteGeneration::weights_hash() {
  return hash_text(publisher_.manifest(), is_published_ ? hash_ : publisher_.weights_hash());
}

void RemoteGeneration::restore(const nlohmann::json& state, std::int64_t version) {
  version_ = version;
  is_published_ = false;
  ask(nlohmann::json{{"do", "restore"}, {"state", state}, {"version", version}}.dump());
}

}  // namespace heddle::rl
