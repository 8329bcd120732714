#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "rollout/kept_states.h"
#include "rollout/sequence.h"

namespace heddle::rollout {

/// Decides which sequences have memory and what a pass does. All ranks of a model keep the same
/// books. Sequences start by priority, then in the order in which they came; one that asks for the
/// prompt which another sample of its request is reading starts beside it and waits for that.
class Scheduler {
 public:
  struct Limits {
    std::int64_t sequences = 0;       ///< Generated at the same time.
    std::int64_t rank_sequences = 0;  ///< On one data rank.
    std::int64_t prefill_tokens = 0;  ///< Prompt tokens of one pass on each data rank.
    /// Passes have one set of adapters: ranks share experts, which take the set of their own rows.
    bool one_set = false;
    /// The last token before one that is drawn is never read with those before it. Where states are
    /// rounded when they are stored, a prompt that others share and one that nobody does are then
    /// rounded at the same tokens.
    bool reads_last_alone = false;
  };
  /// `pool` outlives it.
  Scheduler(CachePool& pool, const Limits& limits);

  bool is_idle() const { return waiting_.empty() && running_.empty(); }
  /// It waits after the others of its priority and of lower ones (vLLM's numbers: less is sooner);
  /// one whose conversation has a state that is kept, before those that have not started and would
  /// take the state's memory.
  void add(std::unique_ptr<Sequence> sequence);
  /// Gives waiting sequences memory; those that start get `adapter` unless they name one.
  void admit(const std::shared_ptr<const Adapter>& adapter);
  /// Tokens for the next pass, each with its memory, sequences of one adapter after another:
  /// prompts, as many tokens as a pass takes, or one token of every other sequence; in turn where
  /// there are both. Where pages are short the youngest sequences are interrupted.
  std::vector<Part> plan();
  /// The sequence of that id which has memory; null.
  Sequence* running(RequestId id) const;
  /// The next plan continues these sequences again, all that run, unless one ends: there is no
  /// place for any that waits.
  bool goes_on_with(const std::vector<Part>& parts) const;
  /// Memory for the token after the one that each part reads; nobody gives way for it.
  bool reserve_next(const std::vector<Part>& parts);
  /// After the pass.
  void passed(const std::vector<Part>& parts);
  /// It has ended: takes it out.
  std::unique_ptr<Sequence> finish(const Sequence& sequence);
  /// Takes a running sequence's memory; it waits at the front. Does nothing to one that waits.
  void preempt(RequestId id);
  void preempt_all();
  /// Running sequences that were preempted since the last call, by whomever.
  std::int64_t take_preempted() { return std::exchange(preempted_, 0); }
  /// Takes a sequence out; null if there is none of that id.
  std::unique_ptr<Sequence> remove(RequestId id);
  KeptStates& kept() { return kept_; }
  bool uses(const nn::AdapterSet& set) const;
  /// Called with each sequence; `runs`: it has memory.
  void visit(const std::function<void(const Sequence&, bool runs)>& visitor) const;
  /// Sequences that gave way to others where pages were short, so far.
  std::int64_t interruptions() const { return interruptions_; }
  /// Sequences that wait, and those that run.
  std::pair<std::int64_t, std::int64_t> queued() const {
    return {static_cast<std::int64_t>(waiting_.size()), static_cast<std::int64_t>(running_.size())};
  }

 private:
  enum class Admission { kStarted, kLater, kNoRoom };

  Admission start(Sequence& sequence, const std::shared_ptr<const Adapter>& adapter);
  /// Pages of the rank for `tokens` tokens more and those that run. Drops kept states for it.
  bool has_pages(std::int64_t rank, std::int64_t tokens, const KeptStates::State* spared);
  /// The reader of the prompt that the sequence shares with it; null.
  const Sequence* leader_of(const Sequence& sequence, const Adapter& adapter) const;
  std::int64_t running_on(std::int64_t rank) const;
  bool has_slot(std::int64_t rank) const { return running_on(rank) < limits_.rank_sequences; }
  /// The data rank with the fewest sequences that has room for another; -1.
  std::int64_t emptiest_rank() const;
  /// Memory for so many tokens. False: the sequence itself had to give way.
  bool make_room(Sequence& sequence, std::int64_t tokens);
  void share(const Sequence& leader);
  /// preempt() without being counted. False: it does not run.
  bool interrupt(RequestId id);

  CachePool& pool_;
  Limits limits_;
  KeptStates kept_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  ///< In the order of their admission.
  bool read_prompts_ = false;                       ///< The last pass did.
  std::int64_t passes_ = 0, preempted_ = 0, interruptions_ = 0;
};

}  // namespace heddle::rollout
