#include "rollout/cache_pool.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace heddle::rollout {
namespace {

/// Taken from the end, so that the first ones go first.
template <class T>
std::vector<T> all_free(std::int64_t count) {
  std::vector<T> free;
  for (std::int64_t i = count; i-- > 0;) free.push_back(static_cast<T>(i));
  return free;
}

template <class T>
T take(std::vector<T>& free, const char* what) {
  if (free.empty()) throw InternalError(fmt::format("no free {} of the caches is left", what));
  const T taken = free.back();
  free.pop_back();
  return taken;
}

}  // namespace

CachePool::CachePool(const models::Model& model, const Size& size) : model_(model), size_(size) {
  Rank rank{all_free<std::int64_t>(size.slots), all_free<std::int32_t>(size.pages), {}};
  rank.references.resize(static_cast<std::size_t>(size.pages));
  ranks_.assign(static_cast<std::size_t>(size.ranks), rank);
}

nn::Cache& CachePool::cache() {
  settle();
  return memory();
}

nn::Cache& CachePool::memory() {
  if (cache_.empty())
    cache_ = model_.make_cache({.slots = size_.slots + size_.dummy_slots,
                                .pages = size_.pages + 1,
                                .page_tokens = size_.page_tokens,
                                .state_dtype = size_.state_dtype});
  return cache_;
}

std::int64_t CachePool::free_slots(std::int64_t rank) const {
  return static_cast<std::int64_t>(ranks_[static_cast<std::size_t>(rank)].free_slots.size());
}

std::int64_t CachePool::free_pages(std::int64_t rank) const {
  return static_cast<std::int64_t>(ranks_[static_cast<std::size_t>(rank)].free_pages.size());
}

std::int64_t CachePool::pages_of(std::int64_t tokens) const {
  return (tokens + size_.page_tokens - 1) / size_.page_tokens;
}

CachePool::Rank& CachePool::rank_of(const Holding& holding) {
  return ranks_[static_cast<std::size_t>(holding.rank)];
}

Holding CachePool::begin(std::int64_t rank) {
  Holding holding = take_slot(rank);
  if (is_own(holding)) to_clear_.push_back(holding.slot);
  return holding;
}

void CachePool::settle() {
  if (!to_clear_.empty()) nn::clear_slots(memory(), std::exchange(to_clear_, {}));
  if (!copies_.empty()) {
    nn::copy_pages(memory(), std::exchange(copied_, {}), std::exchange(copies_, {}));
  }
}

Holding CachePool::take_slot(std::int64_t rank) {
  Holding holding;
  holding.rank = rank;
  holding.slot = take(rank_of(holding).free_slots, "slot");
  return holding;
}

void CachePool::fork_into(const Holding& from, const std::vector<Holding*>& into) {
  if (into.empty()) return;
  Rank& rank = rank_of(from);
  std::vector<std::int64_t> slots;
  for (Holding* const holding : into) {
    for (const std::int32_t page : from.pages) ++rank.references[static_cast<std::size_t>(page)];
    holding->pages = from.pages;
    holding->tokens = from.tokens;
    slots.push_back(holding->slot);
  }
  if (is_own(from)) nn::copy_slot(cache(), from.slot, slots);
}

bool CachePool::reserve(Holding& holding, std::int64_t tokens) {
  Rank& rank = rank_of(holding);
  const auto wanted = static_cast<std::size_t>(pages_of(tokens));
  // Pages from this one on are written to.
  const auto first = static_cast<std::size_t>(holding.tokens / size_.page_tokens);
  std::size_t fresh = wanted > holding.pages.size() ? wanted - holding.pages.size() : 0;
  const auto is_shared = [&](std::int32_t page) {
    return rank.references[static_cast<std::size_t>(page)] > 1;
  };
  for (std::size_t p = first; p < std::min(wanted, holding.pages.size()); ++p)
    fresh += is_shared(holding.pages[p]);
  if (fresh > rank.free_pages.size()) return false;
  const auto fresh_page = [&] {
    const std::int32_t page = take(rank.free_pages, "page");
    rank.references[static_cast<std::size_t>(page)] = 1;
    return page;
  };
  for (std::size_t p = first; p < std::min(wanted, holding.pages.size()); ++p) {
    std::int32_t& page = holding.pages[p];
    if (!is_shared(page)) continue;
    const std::int32_t copy = fresh_page();
    if (is_own(holding)) {
      // Pages that were freed since their copy was promised may come again.
      const auto is_promised = [&](std::int32_t one) {
        return std::find(copies_.begin(), copies_.end(), one) != copies_.end();
      };
      if (is_promised(page) || is_promised(copy)) settle();
      copied_.push_back(page);
      copies_.push_back(copy);
    }
    --rank.references[static_cast<std::size_t>(page)];
    page = copy;
  }
  while (holding.pages.size() < wanted) holding.pages.push_back(fresh_page());
  return true;
}

void CachePool::release(Holding& holding) {
  if (holding.slot < 0) return;
  Rank& rank = rank_of(holding);
  rank.free_slots.push_back(holding.slot);
  for (const std::int32_t page : holding.pages) {
    if (--rank.references[static_cast<std::size_t>(page)] == 0) rank.free_pages.push_back(page);
  }
  holding = {};
}

void CachePool::release_memory() {
  cache_.clear();
  to_clear_.clear();
  copied_.clear();
  copies_.clear();
}

}  // namespace heddle::rollout
