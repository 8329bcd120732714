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
                                          const Adapter& adapter, std::int64_t conversation) {
  const auto fits = [&](const State& state) {
    return state.tokens.size() < tokens.size() && is_same(*state.adapter, adapter) &&
           std::equal(state.tokens.begin(), state.tokens.end(), tokens.begin());
  };
  if (conversation >= 0)
    drop_if([&](const State& own) { return own.conversation == conversation && !fits(own); });
  State* found = nullptr;
  for (State& state : states_) {
    const bool is_open = state.conversation < 0 || state.conversation == conversation;
    if (is_open && fits(state) && (found == nullptr || state.tokens.size() > found->tokens.size()))
      found = &state;
  }
  if (found != nullptr) found->used = ++clock_;
  return found;
}

void KeptStates::keep(const std::vector<std::int32_t>& tokens,
                      const std::shared_ptr<const Adapter>& adapter, const Holding& held,
                      const std::vector<std::uint16_t>& experts) {
  std::vector<std::int32_t> whole = held_of(tokens, held);
  for (const State& state : states_) {
    if (state.conversation < 0 && is_same(*state.adapter, *adapter) && state.tokens == whole &&
        state.held.rank == held.rank)
      return;
  }
  if (whole.empty() || !free_slot(held.rank)) return;
  State state{std::move(whole), adapter, pool_.take_slot(held.rank), ++clock_, experts};
  pool_.fork_into(held, {&state.held});
  states_.push_back(std::move(state));
}

void KeptStates::take_over(const std::vector<std::int32_t>& tokens,
                           const std::shared_ptr<const Adapter>& adapter, Holding& held,
                           std::vector<std::uint16_t> experts, std::int64_t conversation) {
  std::vector<std::int32_t> whole = held_of(tokens, held);
  if (whole.empty()) return;
  states_.push_back({std::move(whole), adapter, std::exchange(held, {}), ++clock_,
                     std::move(experts), conversation});
}

Holding KeptStates::give(const State& state) {
  const auto it = std::find_if(states_.begin(), states_.end(),
                               [&](const State& other) { return &other == &state; });
  Holding held = std::move(it->held);
  states_.erase(it);
  return held;
}

bool KeptStates::free_slot(std::int64_t rank, const State* spared) {
  while (pool_.free_slots(rank) == 0) {
    if (!drop_one(rank, spared)) return false;
  }
  return true;
}

bool KeptStates::drop_one(std::int64_t rank, const State* spared) {
  const auto order = [](const State& state) {
    return std::pair(state.conversation < 0, state.used);
  };
  auto oldest = states_.end();
  for (auto it = states_.begin(); it != states_.end(); ++it) {
    if (it->held.rank != rank || &*it == spared) continue;
    if (oldest == states_.end() || order(*it) < order(*oldest)) oldest = it;
  }
  if (oldest == states_.end()) return false;
  pool_.release(oldest->held);
  states_.erase(oldest);
  return true;
}

template <class Which>
void KeptStates::drop_if(Which which) {
  std::erase_if(states_, [&](State& state) {
    const bool is_dropped = which(state);
    if (is_dropped) pool_.release(state.held);
    return is_dropped;
  });
}

void KeptStates::drop_set(const nn::AdapterSet& set) {
  drop_if([&](const State& state) { return state.adapter->set.get() == &set; });
}

bool KeptStates::has(std::int64_t conversation) const {
  return conversation >= 0 && std::ranges::any_of(states_, [&](const State& state) {
           return state.conversation == conversation;
         });
}

void KeptStates::drop_conversation(std::int64_t conversation) {
  drop_if([&](const State& state) { return state.conversation == conversation; });
}

void KeptStates::drop_shared() {
  drop_if([](const State& state) { return state.conversation < 0; });
}

void KeptStates::drop_all() {
  drop_if([](const State&) { return true; });
}

}  // namespace heddle::rollout
