#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "rollout/cache_pool.h"
#include "rollout/request.h"

namespace heddle::rollout {

/// States that stay when no sequence has them, for prompts that go on from exactly there: they are
/// found by adapter, its version and all their tokens. When weights change they are dropped.
class KeptStates {
 public:
  struct State {
    std::vector<std::int32_t> tokens;
    std::shared_ptr<const Adapter> adapter;
    Holding held;
    std::int64_t used = 0;                    ///< When it was found last.
    std::vector<std::uint16_t> experts = {};  ///< Its tokens', see Sequence::experts.
  };
  /// At most `most` of each data rank. `pool` outlives it.
  KeptStates(CachePool& pool, std::int64_t most) : pool_(pool), most_(most) {}

  /// The longest one that is a part of the tokens, not all of them, from their start on; null.
  const State* find(const std::vector<std::int32_t>& tokens, const Adapter& adapter);
  /// A copy of a state that holds the first of these tokens.
  void keep(const std::vector<std::int32_t>& tokens, const std::shared_ptr<const Adapter>& adapter,
            const Holding& held, const std::vector<std::uint16_t>& experts);
  /// Takes over the holding itself; leaves it empty.
  void take_over(const std::vector<std::int32_t>& tokens,
                 const std::shared_ptr<const Adapter>& adapter, Holding& held,
                 std::vector<std::uint16_t> experts);
  /// Drops the one that was not used for the longest time, but not `spared`. False: there is none.
  bool drop_one(std::int64_t rank, const State* spared = nullptr);
  void drop_set(const nn::AdapterSet& set);
  void drop_all();
  bool has(const nn::AdapterSet& set) const;

 private:
  /// A slot for another state. False: none may be kept.
  bool make_room(std::int64_t rank);

  CachePool& pool_;
  std::int64_t most_, clock_ = 0;
  std::list<State> states_;
};

}  // namespace heddle::rollout
