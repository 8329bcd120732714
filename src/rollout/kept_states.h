#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "rollout/cache_pool.h"
#include "rollout/request.h"

namespace heddle::rollout {

/// States that stay when no sequence has them, for prompts that go on from exactly there: those of
/// a conversation for its next request alone, others for any prompt. They are found by adapter, its
/// version and all their tokens, lie in slots that no sequence wants, and when weights change they
/// are dropped.
class KeptStates {
 public:
  struct State {
    std::vector<std::int32_t> tokens;
    std::shared_ptr<const Adapter> adapter;
    Holding held;
    std::int64_t used = 0;                    ///< When it was found last.
    std::vector<std::uint16_t> experts = {};  ///< Its tokens', see Sequence::experts.
    std::int64_t conversation = -1;           ///< See Request::conversation.
  };
  /// `pool` outlives it.
  explicit KeptStates(CachePool& pool) : pool_(pool) {}

  /// The longest one that is a part of the tokens, not all of them, from their start on; null. Of a
  /// conversation its own, unless that does not fit: then it is dropped.
  const State* find(const std::vector<std::int32_t>& tokens, const Adapter& adapter,
                    std::int64_t conversation = -1);
  /// A copy of a state that holds the first of these tokens, if there is a slot for it.
  void keep(const std::vector<std::int32_t>& tokens, const std::shared_ptr<const Adapter>& adapter,
            const Holding& held, const std::vector<std::uint16_t>& experts);
  /// Takes over the holding itself; leaves it empty.
  void take_over(const std::vector<std::int32_t>& tokens,
                 const std::shared_ptr<const Adapter>& adapter, Holding& held,
                 std::vector<std::uint16_t> experts, std::int64_t conversation = -1);
  /// The memory of a state, which is kept no longer.
  Holding give(const State& state);
  /// A slot of the rank that nobody has, for which states are dropped, but not `spared`. False:
  /// there is none.
  bool free_slot(std::int64_t rank, const State* spared = nullptr);
  /// Drops the one that was not used for the longest time, those of conversations first, because
  /// one sequence alone goes on from each; but not `spared`. False: there is none.
  bool drop_one(std::int64_t rank, const State* spared = nullptr);
  void drop_set(const nn::AdapterSet& set);
  bool has(std::int64_t conversation) const;
  void drop_conversation(std::int64_t conversation);
  /// All but those of conversations.
  void drop_shared();
  void drop_all();

 private:
  template <class Which>
  void drop_if(Which which);

  CachePool& pool_;
  std::int64_t clock_ = 0;
  std::list<State> states_;
};

}  // namespace heddle::rollout
