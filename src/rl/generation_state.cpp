// A stream of groups in a checkpoint, and from it.
#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "base/log.h"
#include "config/config.h"
#include "rl/batch_bytes.h"
#include "rl/generation.h"

namespace heddle::rl {
namespace {

/// Settings by which groups are drawn and judged, by key, and a hash of the prompts: a chat
/// template may change in its file.
nlohmann::json drawn_with(const config::RunConfig& config, const Prompts& prompts) {
  constexpr std::array kKeys = {"data.max_length",
                                "rl.mode",
                                "rl.history",
                                "rl.router_replay",
                                "rl.samples_per_group",
                                "rollout.temperature",
                                "rollout.max_new_tokens",
                                "rollout.top_k",
                                "rollout.top_p",
                                "rollout.min_p",
                                "rollout.stop"};
  nlohmann::json settings = nlohmann::json::object();
  for (const auto& [key, value] : config::entries(config)) {
    if (key.starts_with("rl.reward.") || std::ranges::count(kKeys, key) > 0) settings[key] = value;
  }
  settings["what data.* makes of the prompts"] = prompts.content();
  return settings;
}

/// The first of these settings that a checkpoint has otherwise; "" if it has all alike.
std::string changed_key(const nlohmann::json& state, const nlohmann::json& now) {
  if (!state.contains("drawn_with")) return "";
  const nlohmann::json before = state.value("drawn_with", nlohmann::json::object());
  for (const auto* settings : {&now, &before}) {
    for (const auto& [key, value] : settings->items()) {
      if (before.value(key, "") != now.value(key, "")) return key;
    }
  }
  return "";
}

}  // namespace

nlohmann::json Generation::state() const {
  // Attempts begin again with the next number, as some of their tokens were seen already.
  std::map<std::int64_t, std::int64_t> again = again_;
  for (const auto& [cursor, running] : running_) again[cursor] = running.group.attempt + 1;
  nlohmann::json pending = nlohmann::json::array(), finished = nlohmann::json::array();
  for (const auto& [cursor, attempt] : again) pending.push_back({cursor, attempt});
  for (const auto& [cursor, entry] : finished_) finished.push_back({cursor, entry.group.attempt});
  return {{"next_cursor", next_cursor_}, {"pending", pending}, {"finished", finished}};
}

Batch Generation::standing() {
  Batch standing{.fates = std::exchange(news_.fates, {}), .state = state()};
  standing.state["drawn_with"] = drawn_with(config_, prompts_);
  // The next batch tells of what was done until now, also where it is another run's.
  if (engine_) news_.counts.engine += engine_->take_counts();
  standing.state["counts"] = to_json(news_.counts);
  for (const auto& [cursor, finished] : finished_) standing.groups.push_back(finished.group);
  return standing;
}

bool Generation::is_own(const Group& group) const {
  const auto have_order = [](const std::vector<Fork>& forks) {
    return std::ranges::is_sorted(forks, std::ranges::less(), &Fork::first);
  };
  const auto is_whole = [&](const Trajectory& t) {
    const auto fits = [&](std::size_t size) { return size == t.tokens.size(); };
    return fits(t.logprobs.size()) && fits(t.versions.size()) &&
           (t.supports.empty() || fits(t.supports.size())) &&
           (t.sampled.empty() || fits(t.sampled.size())) && have_order(t.forks);
  };
  return group.cursor >= 0 && group.row == prompts_.index_of(group.cursor) &&
         std::ssize(group.trajectories) == config_.rl.samples_per_group &&
         std::ranges::all_of(group.trajectories, is_whole);
}

void Generation::restore(const nlohmann::json& state, std::vector<Group> finished,
                         std::int64_t version) {
  next_cursor_ = state.at("next_cursor").get<std::int64_t>();
  again_.clear();
  finished_.clear();
  for (const auto& entry : state.at("pending"))
    again_[entry.at(0).get<std::int64_t>()] = entry.at(1).get<std::int64_t>();
  if (state.contains("counts")) news_.counts = counts_from_json(state.at("counts"));
  admission_.rebase(version);
  const std::string changed =
      finished.empty() ? "" : changed_key(state, drawn_with(config_, prompts_));
  if (!changed.empty()) {
    if (is_first_rank()) {
      log::info("{} finished groups of the checkpoint are generated anew, because {} changed",
                finished.size(), changed);
    }
    finished.clear();
  }
  std::map<std::int64_t, Group> groups;
  for (Group& group : finished) groups[group.cursor] = std::move(group);
  for (const auto& entry : state.value("finished", nlohmann::json::array())) {
    const Tried tried{entry.at(0).get<std::int64_t>(), entry.at(1).get<std::int64_t>(), 0};
    const auto found = groups.find(tried.cursor);
    if (found == groups.end() || found->second.attempt != tried.attempt || !is_own(found->second)) {
      issue_again(tried);
    } else if (Group& group = found->second;
               admission_.restore(group.cursor, group.oldest_version())) {
      finished_.emplace(group.cursor, Finished{std::move(group), std::chrono::steady_clock::now()});
    } else {
      give_up({group.cursor, group.attempt, group.sampled_tokens()});
    }
  }
  weights_changed();
}

}  // namespace heddle::rl
