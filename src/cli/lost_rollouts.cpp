#include "cli/lost_rollouts.h"

#include <cstring>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/world.h"
#include "config/objective.h"
#include "rl/membership.h"

namespace heddle::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr comm::Seconds kConnectTimeout{1};
constexpr std::chrono::seconds kBetweenTries{5};
constexpr std::chrono::milliseconds kBetweenLooks{500};

}  // namespace

LostRollouts::LostRollouts(const config::RunConfig& config, std::int64_t ranks) {
  if (config::objective_of(config) != config::Objective::kPolicy || config.rl.has_two_jobs())
    return;
  size_ = config.rl.rollout_ranks;
  first_ = ranks - size_;
  replica_ = config.rollout.tp;
}

void LostRollouts::set_place(const comm::Endpoint& store, const std::string& secret) {
  place_ = store;
  secret_ = secret;
}

bool LostRollouts::survives(const RankEnd& end) {
  if (lost_.contains(end.rank)) return true;
  if (!can_lose() || end.signal == 0 || end.rank < first_) return false;
  if (!find(rl::generation_key(0))) return false;
  lost_[end.rank] = fmt::format("was ended by signal {} ({})", end.signal, strsignal(end.signal));
  if (!has_whole_replica()) return false;
  try {
    store_->set_if_absent(rl::lost_key(end.rank), lost_[end.rank]);
  } catch (const CommError&) {
    return false;
  }
  log::warning("rank {}, a rollout, {}; the job goes on as long as others are left", end.rank,
               lost_[end.rank]);
  return true;
}

bool LostRollouts::has_whole_replica() const {
  for (std::int64_t first = first_; first < first_ + size_; first += replica_) {
    const auto found = lost_.lower_bound(first);
    if (found == lost_.end() || found->first >= first + replica_) return true;
  }
  return false;
}

std::vector<std::int64_t> LostRollouts::given_up() {
  std::vector<std::int64_t> ranks;
  if (!can_lose() || Clock::now() < next_look_) return ranks;
  next_look_ = Clock::now() + kBetweenLooks;
  for (std::int64_t rank = first_; rank < first_ + size_; ++rank) {
    if (lost_.contains(rank)) continue;
    const auto why = find(rl::lost_key(rank));
    if (!why) continue;
    lost_[rank] = *why;
    ranks.push_back(rank);
    log::warning(
        "rank {}, a rollout, {}; it is ended, and the job goes on as long as others are left", rank,
        *why);
  }
  return ranks;
}

void LostRollouts::report() const {
  std::vector<std::string> all;
  for (const auto& [rank, why] : lost_) all.push_back(fmt::format("rank {} {}", rank, why));
  if (all.empty()) return;
  log::warning("the job has ended well without {} of its {} rollout ranks: {}", all.size(), size_,
               text::list_some(all, 8));
}

std::optional<std::string> LostRollouts::find(const std::string& key) {
  if (!connect()) return std::nullopt;
  try {
    return store_->find(key);
  } catch (const CommError&) {
    store_.reset();
    return std::nullopt;
  }
}

bool LostRollouts::connect() {
  if (store_) return true;
  if (Clock::now() < next_try_) return false;
  try {
    store_ = comm::Store::connect(place_, kConnectTimeout, secret_).below(comm::kStorePrefix);
    return true;
  } catch (const std::exception&) {
    // Host 0 has not come yet, or the job is over.
    next_try_ = Clock::now() + kBetweenTries;
    return false;
  }
}

}  // namespace heddle::cli
