#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "models/model.h"
#include "nn/cache.h"

namespace heddle::rollout {

/// One sequence's part of a data rank's caches: a slot of recurrent state, and pages of keys and
/// values, which it may share with others.
struct Holding {
  std::int64_t rank = -1, slot = -1;  ///< -1: nothing is held.
  std::vector<std::int32_t> pages;
  std::int64_t tokens = 0;  ///< Tokens that it holds: exactly those, as a state cannot go back.
};

/// The caches of all data ranks: every rank keeps the books of all, and the memory of its own.
/// Beyond the slots and pages of sequences each has `dummy_slots` and a page for rows that fill a
/// pass up.
class CachePool {
 public:
  struct Size {
    std::int64_t ranks = 1, own_rank = 0;  ///< Data ranks.
    std::int64_t slots = 0, pages = 0;     ///< For each.
    std::int64_t dummy_slots = 0;
    std::int64_t page_tokens = 32;
    std::optional<c10::ScalarType> state_dtype = {};  ///< See nn::CacheSize.
  };
  CachePool(const models::Model& model, const Size& size);

  const Size& size() const { return size_; }
  /// Made at the first use after release_memory(), and settled.
  nn::Cache& cache();
  /// Clears and copies what begin() and reserve() promised: before a pass, for all its sequences
  /// together.
  void settle();
  std::int64_t dummy_slot() const { return size_.slots; }
  std::int32_t dummy_page() const { return static_cast<std::int32_t>(size_.pages); }
  std::int64_t free_slots(std::int64_t rank) const;
  std::int64_t free_pages(std::int64_t rank) const;
  std::int64_t pages_of(std::int64_t tokens) const;

  /// A slot without a token; there is a free one.
  Holding begin(std::int64_t rank);
  /// A slot whose state fork_into() will bring.
  Holding take_slot(std::int64_t rank);
  /// The state of `from` in the slots of `into`; the pages are shared.
  void fork_into(const Holding& from, const std::vector<Holding*>& into);
  /// Pages for `tokens` tokens in all, of which those after the held ones can be written: a shared
  /// page among them is copied. False, and nothing has changed, if there are too few free pages.
  bool reserve(Holding& holding, std::int64_t tokens);
  void release(Holding& holding);
  /// Gives the caches' memory back. Nothing is held.
  void release_memory();
  bool has_memory() const { return !cache_.empty(); }

 private:
  struct Rank {
    std::vector<std::int64_t> free_slots;
    std::vector<std::int32_t> free_pages;
    std::vector<std::int32_t> references;  ///< [pages]
  };
  Rank& rank_of(const Holding& holding);
  bool is_own(const Holding& holding) const { return holding.rank == size_.own_rank; }
  nn::Cache& memory();

  const models::Model& model_;
  Size size_;
  std::vector<Rank> ranks_;
  nn::Cache cache_;
  std::vector<std::int64_t> to_clear_;         ///< Slots.
  std::vector<std::int64_t> copied_, copies_;  ///< Pages, and the pages that are to be like them.
};

}  // namespace heddle::rollout
