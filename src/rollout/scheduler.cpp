#include "rollout/scheduler.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"

namespace heddle::rollout {

Scheduler::Scheduler(CachePool& pool, const Limits& limits)
    : pool_(pool), limits_(limits), kept_(pool) {}

void Scheduler::add(std::unique_ptr<Sequence> sequence) {
  const bool goes_on = kept_.has(sequence->conversation());
  const auto precedes = [&](const Sequence& before) {
    // One that was interrupted stays before those that never ran.
    if (before.adapter) return true;
    if (const bool other = kept_.has(before.conversation()); other != goes_on) return other;
    return before.request->priority <= sequence->request->priority;
  };
  auto place = waiting_.end();
  while (place != waiting_.begin() && !precedes(**std::prev(place))) --place;
  waiting_.insert(place, std::move(sequence));
}

std::int64_t Scheduler::running_on(std::int64_t rank) const {
  return std::count_if(running_.begin(), running_.end(),
                       [rank](const auto& sequence) { return sequence->held.rank == rank; });
}

std::int64_t Scheduler::emptiest_rank() const {
  std::int64_t best = -1;
  for (std::int64_t rank = 0; rank < pool_.size().ranks; ++rank) {
    if (has_slot(rank) && (best < 0 || running_on(rank) < running_on(best))) best = rank;
  }
  return best;
}

const Sequence* Scheduler::leader_of(const Sequence& sequence, const Adapter& adapter) const {
  if (sequence.shared_tokens() <= 0) return nullptr;
  for (const auto& other : running_) {
    if (other->group == sequence.group && !other->follows && other->adapter.get() == &adapter &&
        other->held.tokens < other->shared_tokens())
      return other.get();
  }
  return nullptr;
}

bool Scheduler::has_pages(std::int64_t rank, std::int64_t tokens, const KeptStates::State* spared) {
  const std::int64_t running = running_on(rank);
  // Each of those that run will soon want a page more.
  const std::int64_t wanted = pool_.pages_of(tokens + 1) + running;
  while (pool_.free_pages(rank) < wanted) {
    if (!kept_.drop_one(rank, spared)) return running == 0;
  }
  return true;
}

Scheduler::Admission Scheduler::start(Sequence& sequence,
                                      const std::shared_ptr<const Adapter>& adapter) {
  if (const Sequence* const leader = leader_of(sequence, *adapter)) {
    const std::int64_t rank = leader->held.rank;
    if (!has_slot(rank) || !has_pages(rank, 1, nullptr) || !kept_.free_slot(rank))
      return Admission::kLater;
    sequence.held = pool_.take_slot(rank);
    sequence.follows = true;
    return Admission::kStarted;
  }
  const auto tokens = static_cast<std::int64_t>(sequence.tokens.size());
  const KeptStates::State* kept =
      sequence.wants_prompt_logprobs()
          ? nullptr
          : kept_.find(sequence.tokens, *adapter, sequence.conversation());
  // One that was read for a request without experts does not say which these were.
  if (kept != nullptr && sequence.request->return_experts && kept->experts.empty()) kept = nullptr;
  if (kept != nullptr) {
    const std::int64_t rank = kept->held.rank;
    if (!has_slot(rank)) return Admission::kLater;
    if (!has_pages(rank, tokens - kept->held.tokens, kept)) return Admission::kNoRoom;
    if (sequence.output_size() == 0) sequence.completion.cached_tokens = kept->held.tokens;
    sequence.take_experts(kept->experts);
    if (kept->conversation >= 0 || !kept_.free_slot(rank, kept)) {
      sequence.held = kept_.give(*kept);
    } else {
      sequence.held = pool_.take_slot(rank);
      pool_.fork_into(kept->held, {&sequence.held});
    }
  } else {
    const std::int64_t rank = emptiest_rank();
    if (rank < 0 || !has_pages(rank, tokens, nullptr) || !kept_.free_slot(rank))
      return Admission::kNoRoom;
    sequence.held = pool_.begin(rank);
  }
  while (!pool_.reserve(sequence.held, tokens)) {
    if (!kept_.drop_one(sequence.held.rank))
      throw InternalError("the pages of a data rank do not hold one sequence");
  }
  return Admission::kStarted;
}

void Scheduler::visit(
    const std::function<void(const Sequence& sequence, bool runs)>& visitor) const {
  for (const auto& sequence : waiting_) visitor(*sequence, false);
  for (const auto& sequence : running_) visitor(*sequence, true);
}

void Scheduler::admit(const std::shared_ptr<const Adapter>& adapter) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (static_cast<std::int64_t>(running_.size()) >= limits_.sequences) return;
    Sequence& sequence = **it;
    const std::shared_ptr<const Adapter> own = sequence.adapter ? sequence.adapter
                                               : sequence.request->adapter
                                                   ? sequence.request->adapter
                                                   : adapter;
    const Admission admission = start(sequence, own);
    if (admission == Admission::kNoRoom) return;
    if (admission == Admission::kLater) {
      ++it;
      continue;
    }
    if (!sequence.adapter) {
      sequence.started = Sequence::Clock::now();
      sequence.completion.queue_s = sequence.seconds_since(sequence.arrived);
    }
    sequence.adapter = own;
    sequence.completion.adapter_version = own->version;
    running_.push_back(std::move(*it));
    it = waiting_.erase(it);
  }
}

bool Scheduler::make_room(Sequence& sequence, std::int64_t tokens) {
  const std::int64_t rank = sequence.held.rank;
  while (!pool_.reserve(sequence.held, tokens)) {
    if (kept_.drop_one(rank)) continue;
    const auto youngest = std::find_if(running_.rbegin(), running_.rend(),
                                       [rank](const auto& it) { return it->held.rank == rank; });
    const bool is_itself = youngest->get() == &sequence;
    if (is_itself && running_on(rank) == 1)
      throw InternalError("the pages of a data rank do not hold one sequence");
    ++interruptions_;
    preempt((*youngest)->id);
    if (is_itself) return false;
  }
  return true;
}

std::vector<Part> Scheduler::plan() {
  std::vector<Sequence*> prompts, steps;
  for (const auto& sequence : running_) {
    if (!sequence->follows) (sequence->is_prompt() ? prompts : steps).push_back(sequence.get());
  }
  read_prompts_ = !prompts.empty() && (steps.empty() || !read_prompts_);
  std::vector<Sequence*>& candidates = read_prompts_ ? prompts : steps;
  if (limits_.one_set && !candidates.empty()) {
    // Sequences that have waited longest have their turn.
    const Sequence* const first =
        *std::min_element(candidates.begin(), candidates.end(),
                          [](const auto* a, const auto* b) { return a->last_pass < b->last_pass; });
    std::erase_if(candidates, [set = first->adapter->set](const Sequence* sequence) {
      return sequence->adapter->set != set;
    });
  }
  ++passes_;
  std::vector<std::int64_t> used(static_cast<std::size_t>(pool_.size().ranks));
  std::vector<Part> parts;
  std::vector<const nn::AdapterSet*> sets;
  for (Sequence* const sequence : candidates) {
    if (sequence->held.slot < 0) continue;  // it gave way to another
    std::int64_t& rows = used[static_cast<std::size_t>(sequence->held.rank)];
    std::int64_t count = sequence->pending();
    if (read_prompts_) {
      const std::int64_t shared = sequence->shared_tokens() - sequence->held.tokens;
      if (shared > 0) count = std::min(count, shared);
      if (limits_.reads_last_alone && sequence->draws() && sequence->pending() > 1)
        count = std::min(count, sequence->pending() - 1);
      count = std::min(count, limits_.prefill_tokens - rows);
    }
    if (count <= 0 || !make_room(*sequence, sequence->held.tokens + count)) continue;
    rows += count;
    sequence->last_pass = passes_;
    parts.push_back({sequence, count});
    const nn::AdapterSet* const set = sequence->adapter->set.get();
    if (std::find(sets.begin(), sets.end(), set) == sets.end()) sets.push_back(set);
  }
  const auto place = [&](const Part& part) {
    return std::find(sets.begin(), sets.end(), part.sequence->adapter->set.get());
  };
  if (sets.size() > 1) {
    std::stable_sort(parts.begin(), parts.end(),
                     [&](const Part& a, const Part& b) { return place(a) < place(b); });
  }
  std::fill(used.begin(), used.end(), 0);
  for (Part& part : parts) {
    std::int64_t& rows = used[static_cast<std::size_t>(part.sequence->held.rank)];
    part.first_row = std::exchange(rows, rows + part.count);
  }
  return parts;
}

Sequence* Scheduler::running(RequestId id) const {
  const auto it = std::find_if(running_.begin(), running_.end(),
                               [id](const auto& sequence) { return sequence->id == id; });
  return it == running_.end() ? nullptr : it->get();
}

bool Scheduler::goes_on_with(const std::vector<Part>& parts) const {
  const auto all = static_cast<std::int64_t>(running_.size());
  return std::ssize(parts) == all && (waiting_.empty() || all >= limits_.sequences);
}

bool Scheduler::reserve_next(const std::vector<Part>& parts) {
  return std::all_of(parts.begin(), parts.end(), [&](const Part& part) {
    Holding& held = part.sequence->held;
    return pool_.reserve(held, held.tokens + part.count + 1);
  });
}

void Scheduler::passed(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    part.sequence->held.tokens += part.count;
    if (part.sequence->held.tokens == part.sequence->shared_tokens()) share(*part.sequence);
  }
}

void Scheduler::share(const Sequence& leader) {
  std::vector<Holding*> followers;
  for (const auto& sequence : running_) {
    if (!sequence->follows || sequence->group != leader.group) continue;
    followers.push_back(&sequence->held);
    sequence->follows = false;
    sequence->completion.cached_tokens = leader.held.tokens;
    sequence->take_experts(leader.experts);
  }
  pool_.fork_into(leader.held, followers);
  const bool is_awaited = std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& sequence) {
    return sequence->group == leader.group;
  });
  if (is_awaited || leader.request->keep_state)
    kept_.keep(leader.tokens, leader.adapter, leader.held, leader.experts);
}

std::unique_ptr<Sequence> Scheduler::finish(const Sequence& sequence) {
  const auto it = std::find_if(running_.begin(), running_.end(),
                               [&](const auto& other) { return other.get() == &sequence; });
  std::unique_ptr<Sequence> ended = std::move(*it);
  running_.erase(it);
  if (ended->request->keep_state || ended->conversation() >= 0) {
    kept_.take_over(ended->tokens, ended->adapter, ended->held, ended->experts,
                    ended->conversation());
  }
  pool_.release(ended->held);
  return ended;
}

void Scheduler::preempt(RequestId id) {
  if (interrupt(id)) ++preempted_;
}

bool Scheduler::interrupt(RequestId id) {
  const auto it = std::find_if(running_.begin(), running_.end(),
                               [id](const auto& sequence) { return sequence->id == id; });
  if (it == running_.end()) return false;
  std::unique_ptr<Sequence> sequence = std::move(*it);
  running_.erase(it);
  // Sequences that wait for its prompt have nobody to wait for.
  const bool leads = !sequence->follows && sequence->held.tokens < sequence->shared_tokens();
  for (std::size_t i = running_.size(); leads && i-- > 0;) {
    if (running_[i]->follows && running_[i]->group == sequence->group) preempt(running_[i]->id);
  }
  pool_.release(sequence->held);
  sequence->follows = false;
  waiting_.push_front(std::move(sequence));
  return true;
}

void Scheduler::preempt_all() {
  while (!running_.empty()) preempt(running_.back()->id);
}

std::unique_ptr<Sequence> Scheduler::remove(RequestId id) {
  interrupt(id);
  const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                               [id](const auto& sequence) { return sequence->id == id; });
  if (it == waiting_.end()) return nullptr;
  std::unique_ptr<Sequence> sequence = std::move(*it);
  waiting_.erase(it);
  return sequence;
}

bool Scheduler::uses(const nn::AdapterSet& set) const {
  const auto is_user = [&](const auto& sequence) {
    const Adapter* adapter =
        sequence->adapter ? sequence->adapter.get() : sequence->request->adapter.get();
    return adapter != nullptr && adapter->set.get() == &set;
  };
  return std::any_of(waiting_.begin(), waiting_.end(), is_user) ||
         std::any_of(running_.begin(), running_.end(), is_user);
}

}  // namespace heddle::rollout
