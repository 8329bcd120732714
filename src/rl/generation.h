#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "data/tokenizer/tokenizer.h"
#include "rl/admission.h"
#include "rl/group_source.h"
#include "rl/judge.h"
#include "rl/prompts.h"
#include "rollout/adapter_slots.h"
#include "rollout/engine.h"
#include "sync/weight_sync.h"

namespace heddle::rl {

/// Generates groups with the weights of a model and gives them in batches. In mode sync, or with
/// staleness 0, a batch is generated whole before it is given. All ranks of the model call it
/// together, and all have all groups.
///
/// A trainer that shares the weights takes next() and updated() in turn. Ranks that only generate
/// go on with advance() while others train, and ask try_next() when these want a batch.
class Generation : public GroupSource {
 public:
  Generation(const config::RunConfig& config, assembly::ModelOnRanks& model,
             std::shared_ptr<const data::Tokenizer> tokenizer, const Prompts& prompts);

  Batch next() override;
  void updated() override;
  std::int64_t version() const override { return admission_.version(); }
  std::string weights_hash() override;
  Batch standing() override;
  void restore(const nlohmann::json& state, std::vector<Group> finished,
               std::int64_t version) override;

  /// The next batch if it is there already.
  std::optional<Batch> try_next();
  /// Starts what may start and makes one pass. False if there is nothing to do.
  bool advance();
  /// Advances while new weights are on their way: with update mode wait only what runs goes on,
  /// as all of it has to end first.
  bool advance_before_update();
  /// Brings running groups to where the weights may change, as rl.update_mode says. With mode wait
  /// and rl.deterministic it ends all groups that the old weights may generate, so that the weights
  /// of a group do not depend on the clock.
  void prepare_update();
  /// The weights have other values, under version().
  void weights_changed();
  /// Null before the first pass.
  const rollout::Engine* made_engine() const { return engine_.get(); }

 private:
  struct Running {
    Group group;
    std::map<rollout::RequestId, std::size_t> requests;  ///< Under way -> its trajectory.
    std::int64_t judged = 0;   ///< Trajectories whose last turn is being judged.
    std::int64_t opening = 0;  ///< Episodes whose prompt is awaited.
    Json prompt = {};          ///< The first episode's, once it is there.
    /// Conversation of its first trajectory, see rollout::Request; the others' follow.
    /// -1: they have no further turns.
    std::int64_t conversation = -1;
  };

  rollout::Engine& engine();
  bool pins() const { return config_.rl.update_mode == config::UpdateMode::kPin; }
  bool is_first_rank() const { return model_.context.mesh.rank() == 0; }
  /// Requests that start from now on have the adapters as they are; pinned ones keep theirs.
  void publish_adapters();
  void dispatch();
  /// More groups than run now would not wait for nothing.
  bool has_use_for_more() const;
  void start(std::int64_t cursor, std::int64_t attempt);
  /// One pass of the engine, and what follows from the sequences that ended.
  void pass();
  /// Submits a group's first turns, which share a prompt.
  void begin(Running& running);
  /// Takes the prompt of an episode; the last one's makes the group's. Returns what is wrong with
  /// it.
  std::optional<std::string> open(Running& running, const reward::Score& score);
  void take(Running& running, std::size_t place, rollout::Completion completion);
  /// Takes what has been judged meanwhile; waits a moment for it where nothing else is to be done.
  void take_verdicts();
  void settle(Verdict verdict);
  /// An episode was lost with its worker by another one's fault: its prompt is issued again. False
  /// after rl.stale_attempts.
  bool play_anew(const Running& running);
  /// A request for the policy's next tokens after those of a prompt.
  rollout::Request request(std::vector<std::int32_t> tokens, std::int64_t drawn) const;
  std::uint64_t stream_of(const Group& group) const;
  /// Submits the next turn of a trajectory that goes on.
  void begin_turn(Running& running, std::size_t place);
  /// Trajectories of a group have no further turn: gives back the memory of their last ones.
  void end_episodes(const Running& running);
  /// All of the group is judged, or it cannot be.
  void finish(std::int64_t cursor, const std::optional<std::string>& error = {});
  struct Tried {
    std::int64_t cursor, attempt;
    std::int64_t tokens;  ///< Tokens that the policy drew for it.
  };
  /// Ends a running group.
  Tried abort(std::int64_t cursor);
  void issue_again(const Tried& group) { again_[group.cursor] = group.attempt + 1; }
  /// A group is too old: its prompt is issued again, or left out after rl.stale_attempts.
  void give_up(const Tried& group);
  bool may_filter() const;
  nlohmann::json state() const;
  /// A group of a checkpoint is one that this run could have made.
  bool is_own(const Group& group) const;

  const config::RunConfig& config_;
  assembly::ModelOnRanks& model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  const Prompts& prompts_;
  std::int64_t end_;  ///< Cursors are below it.
  Judge judge_;
  Admission admission_;
  std::vector<std::int32_t> stop_ids_;
  /// With the engine, if versions are pinned; the engine holds values of theirs until it ends.
  std::unique_ptr<rollout::AdapterSlots> slots_;
  std::unique_ptr<rollout::Engine> engine_;  ///< Made by the first pass.
  std::unique_ptr<sync::Publisher> hashed_;  ///< Made by the first weights_hash().
  std::map<std::int64_t, Running> running_;  ///< By cursor.
  std::map<rollout::RequestId, std::int64_t> cursor_of_;
  struct Finished {
    Group group;
    std::chrono::steady_clock::time_point at;
  };
  std::map<std::int64_t, Finished> finished_;   ///< By cursor.
  std::map<std::int64_t, std::int64_t> again_;  ///< Cursor to issue again -> its attempt.
  std::int64_t next_cursor_ = 0, next_conversation_ = 0;
  std::int64_t generated_ = 0;        ///< Groups since the weights changed, filtered ones included.
  std::int64_t failed_in_a_row_ = 0;  ///< Groups that could not be judged, since one that was.
  std::int64_t passes_ = 0;
  Batch news_;  ///< Counts and fates since the last batch.
  std::chrono::steady_clock::time_point last_batch_ = std::chrono::steady_clock::now();
};

}  // namespace heddle::rl
