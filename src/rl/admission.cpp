#include "rl/admission.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/errors.h"

namespace heddle::rl {

Admission::Admission(AdmissionOptions options) : options_(options) {
  const auto require = [](const char* key, std::int64_t value, std::int64_t least) {
    if (value < least)
      throw_error<ConfigError>("{}: expected at least {}, found {}", key, least, value);
  };
  require("rl.max_staleness", options_.max_staleness, 0);
  require("rl.groups_per_step", options_.groups_per_batch, 1);
  require("rl.max_inflight_groups", options_.max_inflight, 0);
}

void Admission::rebase(std::int64_t version) {
  groups_.clear();
  running_ = 0;
  version_ = version;
  is_cut_ = false;
}

void Admission::erase(std::int64_t cursor) {
  const auto found = groups_.find(cursor);
  running_ -= !found->second.is_finished;
  groups_.erase(found);
}

std::int64_t Admission::room() const {
  // Batches and not groups are counted: they may be smaller or larger than groups_per_batch, and
  // the next one can always be filled.
  const std::int64_t most = std::numeric_limits<std::int64_t>::max() / options_.groups_per_batch;
  const std::int64_t batches = std::min(options_.max_staleness + (is_cut_ ? 0 : 1), most);
  return std::max<std::int64_t>(
      0, batches * options_.groups_per_batch - static_cast<std::int64_t>(groups_.size()));
}

std::int64_t Admission::capacity() const {
  if (options_.max_inflight == 0) return room();
  return std::min(room(), std::max<std::int64_t>(0, options_.max_inflight - running()));
}

void Admission::start(std::int64_t cursor, std::int64_t version) {
  if (capacity() == 0) throw_error<InternalError>("group {} starts without capacity", cursor);
  if (version > version_) {
    throw_error<InternalError>("group {} starts under version {}, the trainer has {}", cursor,
                               version, version_);
  }
  if (!groups_.emplace(cursor, Group{version, false}).second)
    throw_error<InternalError>("group {} starts twice", cursor);
  ++running_;
}

bool Admission::finish(std::int64_t cursor, std::int64_t oldest_version) {
  const auto found = groups_.find(cursor);
  if (found == groups_.end() || found->second.is_finished)
    throw_error<InternalError>("group {} finishes and does not run", cursor);
  erase(cursor);
  return restore(cursor, oldest_version);
}

bool Admission::restore(std::int64_t cursor, std::int64_t oldest_version) {
  if (oldest_version + options_.max_staleness < version_) return false;
  if (!groups_.emplace(cursor, Group{oldest_version, true}).second)
    throw_error<InternalError>("group {} is queued twice", cursor);
  return true;
}

void Admission::forget(std::int64_t cursor) {
  if (!groups_.contains(cursor))
    throw_error<InternalError>("group {} is neither running nor queued", cursor);
  erase(cursor);
}

std::optional<Admission::Batch> Admission::cut(bool no_more) {
  if (is_cut_) throw_error<InternalError>("version {} has had its batch: publish", version_);
  std::vector<std::pair<std::int64_t, std::int64_t>> finished;  // (version, cursor)
  std::vector<std::int64_t> expiring;                           // running
  std::int64_t expiring_finished = 0;
  for (const auto& [cursor, group] : groups_) {
    if (group.is_finished) finished.emplace_back(group.version, cursor);
    if (!expires(group)) continue;
    if (group.is_finished) {
      ++expiring_finished;
    } else {
      expiring.push_back(cursor);
    }
  }
  // Groups that still run have to be in this batch, too.
  if (options_.policy == StalePolicy::kWait && !expiring.empty()) return {};
  const std::int64_t wanted = std::max(options_.groups_per_batch, expiring_finished);
  const auto available = static_cast<std::int64_t>(finished.size());
  const bool is_all = no_more && available == static_cast<std::int64_t>(groups_.size());
  if (available == 0 || (available < wanted && !is_all)) return {};

  const std::int64_t size = std::min(available, wanted);
  std::sort(finished.begin(), finished.end());
  const auto& last = finished[static_cast<std::size_t>(size) - 1];
  const auto runs_before_it = [&](const auto& entry) {
    return !entry.second.is_finished && std::pair(entry.second.version, entry.first) < last;
  };
  if (options_.in_order && std::ranges::any_of(groups_, runs_before_it)) return {};
  Batch batch;
  for (std::int64_t k = 0; k < size; ++k) {
    batch.cursors.push_back(finished[static_cast<std::size_t>(k)].second);
    erase(batch.cursors.back());
  }
  if (options_.policy == StalePolicy::kDrop) {
    batch.dropped = std::move(expiring);
    for (const std::int64_t cursor : batch.dropped) erase(cursor);
  }
  is_cut_ = true;
  return batch;
}

std::vector<std::int64_t> Admission::publish() {
  std::vector<std::int64_t> too_old;
  for (const auto& [cursor, group] : groups_) {
    if (expires(group)) too_old.push_back(cursor);
  }
  for (const std::int64_t cursor : too_old) erase(cursor);
  ++version_;
  is_cut_ = false;
  return too_old;
}

}  // namespace heddle::rl
