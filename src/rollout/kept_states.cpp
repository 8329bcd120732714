#include "rollout/kept_states.h"

#include <algorithm>

namespace heddle::rollout {
namespace {

bool is_same(const Adapter& a, const Adapter& b) {
  return a.set == b.set && a.version == b.version;
}

std::vector<std::int32_t> held_of(const std::vector<std::int32_t>& tokens, const Holding& held) {
  return {tokens.begin(), tokens.begin() + held.tokens};
}

}  // namespace

const KeptStates::State* KeptStates::find(const std::vector<std::int32_t>& tokens,
                                          const Adapter& adapter) {
  State* found = nullptr;
  for (State& state : states_) {
    const bool fits = state.tokens.size() < tokens.size() && is_same(*state.adapter, adapter) &&
                      std::equal(state.tokens.begin(), state.tokens.end(), tokens.begin());
    if (fits && (found == nullptr || state.tokens.size() > found->tokens.size())) found = &state;
  }
  if (found != nullptr) found->used = ++clock_;
  return found;
}

void KeptStates::keep(const std::vector<std::int32_t>& tokens,
                      const std::shared_ptr<const Adapter>& adapter, const Holding& held,
                      const std::vector<std::uint16_t>& experts) {
  std::vector<std::int32_t> whole = held_of(tokens, held);
  for (const State& state : states_) {
    if (is_same(*state.adapter, *adapter) && state.tokens == whole && state.held.rank == held.rank)
      return;
  }
  if (whole.empty() || !make_room(held.rank)) return;
  State state{std::move(whole), adapter, pool_.take_slot(held.rank), ++clock_, experts};
  pool_.fork_into(held, {&state.held});
  states_.push_back(std::move(state));
}

void KeptStates::take_over(const std::vector<std::int32_t>& tokens,
                           const std::shared_ptr<const Adapter>& adapter, Holding& held,
                           std::vector<std::uint16_t> experts) {
  std::vector<std::int32_t> whole = held_of(tokens, held);
  if (whole.empty() || !make_room(held.rank)) return;
  states_.push_back(
      {std::move(whole), adapter, std::exchange(held, {}), ++clock_, std::move(experts)});
}

bool KeptStates::make_room(std::int64_t rank) {
  if (most_ <= 0) return false;
  const auto count = std::count_if(states_.begin(), states_.end(),
                                   [&](const State& state) { return state.held.rank == rank; });
  if (count >= most_) drop_one(rank);
  return true;
}

bool KeptStates::drop_one(std::int64_t rank, const State* spared) {
  auto oldest = states_.end();
  for (auto it = states_.begin(); it != states_.end(); ++it) {
    if (it->held.rank != rank || &*it == spared) continue;
    if (oldest == states_.end() || it->used < oldest->used) oldest = it;
  }
  if (oldest == states_.end()) return false;
  pool_.release(oldest->held);
  states_.erase(oldest);
  return true;
}

void KeptStates::drop_set(const nn::AdapterSet& set) {
  std::erase_if(states_, [&](State& state) {
    const bool is_of_it = state.adapter->set.get() == &set;
    if (is_of_it) pool_.release(state.held);
    return is_of_it;
  });
}

void KeptStates::drop_all() {
  for (State& state : states_) pool_.release(state.held);
  states_.clear();
}

bool KeptStates::has(const nn::AdapterSet& set) const {
  return std::any_of(states_.begin(), states_.end(),
                     [&](const State& state) { return state.adapter->set.get() == &set; });
}

}  // namespace heddle::rollout
