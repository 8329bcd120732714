#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "data/tokenizer/tokenizer.h"
#include "rollout/engine_counts.h"
#include "rollout/engine_options.h"
#include "rollout/merged_adapter.h"
#include "rollout/recorded_decoding.h"
#include "rollout/request.h"
#include "rollout/scheduler.h"

namespace heddle::rollout {

/// Effect of changed weights on sequences under way.
enum class LiveSequences {
  kRecompute,  ///< Their tokens pass through the new weights before they go on.
  kKeep,       ///< They go on from the caches of the old weights.
};

/// A pass of the model.
struct PassShape {
  bool draws = false;     ///< One token of each sequence, not prompts.
  bool recorded = false;  ///< Replayed as a graph.
  bool ahead = false;     ///< It began before the tokens of the pass before it were known.
  std::int64_t sequences = 0, tokens = 0;
  std::int64_t sets = 0;  ///< Different sets of adapters, the base model among them.
};

/// A step's news for a request.
struct Progress {
  RequestId id = 0;
  std::string text;  ///< Text that became certain: whole UTF-8, not a part of a stop string.
  std::optional<SampledToken> token;     ///< Drawn in this step.
  std::optional<Completion> completion;  ///< Set for a request that finished.
  /// Why the request ended without a completion. See EngineOptions::tells_failures.
  std::string failure = {};
};

/// Generates with continuous batching over the ranks of a model: a sequence that ends gives its
/// memory to the next request. A request's tokens depend on its own seed and on neither the other
/// requests nor the order, the batch size or an interruption, up to the rounding of products over
/// other numbers of rows.
///
/// All ranks of the model make the same calls in the same order and get the same results. Every
/// data rank has a share of the sequences; each pass is planned for all of them at once, so that
/// all ranks run equally many.
class Engine {
 public:
  /// `placed` outlives the engine. Throws ConfigError for ranks that divide sequences (cp), and as
  /// pool_size() and MergedAdapter.
  Engine(assembly::ModelOnRanks& placed, std::shared_ptr<const data::Tokenizer> tokenizer,
         const EngineOptions& options);

  /// Ids count from 0; the samples of a request have consecutive ones, of which this is the first.
  /// Throws DataError for an empty prompt, an id outside the vocabulary, options out of range, and
  /// for a request that exceeds the capacity.
  RequestId submit(Request request);
  /// One pass: over prompts, or one token for every sequence that has read its own; in turn where
  /// there are both. Reports the requests that got a token or finished. Throws ModelError, with the
  /// request and the first layer, where logits are not finite, unless tells_failures is set.
  std::vector<Progress> step();
  /// Nothing waits or runs.
  bool is_idle() const { return done_.empty() && scheduler_.is_idle(); }
  /// Ends a request and returns what it has. Throws InternalError for one that is not under way.
  Completion abort(RequestId id);
  /// Takes a running request's slot away: it goes on later, and its tokens pass through the model
  /// again. Does nothing to one that waits.
  void preempt(RequestId id);

  /// Gives back the copies of weights that ranks divide, and the matrices as they were before the
  /// adapter was merged, until the next step: before whoever shares the model gives its parameters
  /// other values or makes passes of its own.
  void release_weights();
  /// After the model's parameters have other values. Kept states are dropped, but those of
  /// conversations go on as live sequences do.
  void weights_changed(std::int64_t version, LiveSequences live = LiveSequences::kRecompute);

  /// The adapter of requests that name none and start from now on; sequences that have started keep
  /// theirs. At first the model's own, if it has adapters and they are not merged.
  void use_adapter(std::shared_ptr<const Adapter> adapter);
  /// A request that waits or runs has this set, or the engine's adapter is of it.
  bool uses(const nn::AdapterSet& set) const;
  /// The conversation has no further request: forgets the state that is kept for it, if any.
  void end_conversation(std::int64_t conversation);
  /// Forgets kept states of a set whose numbers are to change.
  void forget_states(const nn::AdapterSet& set);

  /// The pass of the last step(), on all data ranks; without sequences if it had nothing to do.
  const PassShape& last_pass() const { return last_pass_; }
  /// Counts since the last call.
  EngineCounts take_counts();
  /// Sequences that wait for memory, and those that have it.
  std::pair<std::int64_t, std::int64_t> queued() const { return scheduler_.queued(); }
  /// See Scheduler::visit and interruptions.
  const Scheduler& scheduler() const { return scheduler_; }
  /// Slots and pages of this data rank that nobody has.
  std::pair<std::int64_t, std::int64_t> free_memory() const;
  /// Gives the memory of the caches back until the next step, as a trainer on the same device wants
  /// it; running requests go on after that as after preempt().
  void release_memory();
  /// The caches have their memory: not before the first step, nor after release_memory().
  bool has_memory() const { return pool_.has_memory(); }

 private:
  void check(const Request& request) const;
  void hold_weights();
  static PassShape shape_of(const std::vector<Part>& parts);
  /// Hidden states of this rank's rows; undefined where the last stage is elsewhere.
  at::Tensor run(const std::vector<Part>& parts);
  /// Tokens of a pass that each data rank reads.
  std::vector<std::int64_t> rows_of_ranks(const std::vector<Part>& parts) const;
  /// Keeps the experts of the pass's tokens whose requests ask for them. Before the places of the
  /// tokens are counted as read. `rows`: the pass's, of each data rank.
  void keep_experts(const std::vector<Part>& parts, const OwnExperts& own,
                    const std::vector<std::int64_t>& rows);
  /// A table row, see TokenTable, from the hidden states of one row of a data rank's pass.
  struct Wanted {
    const Part* part;
    std::int64_t row;         ///< Row of the data rank's pass.
    std::int64_t given = -1;  ///< A token of the prompt; -1: one is drawn.
    Draw draw = {};
  };
  /// One rank has the row that a token follows from; all learn it. Tokens are all given, or all
  /// drawn.
  at::Tensor table_of(const TokenTable& shape, const at::Tensor& hidden,
                      const std::vector<Wanted>& wanted) const;
  /// The next token of each sequence.
  std::vector<SampledToken> draw(const at::Tensor& hidden, const std::vector<Part>& parts) const;
  /// Draws in places of prompts, to the requests that want them.
  void tell_draws(const at::Tensor& hidden, const std::vector<Wanted>& drawn) const;
  void judge_prompts(const at::Tensor& hidden, const std::vector<Part>& parts);
  /// A recorded step that was started.
  struct Flight {
    std::vector<RequestId> ids;        ///< Sequences of all data ranks, as in its parts.
    std::vector<std::size_t> own;      ///< Places of this rank's among them.
    std::vector<std::int64_t> places;  ///< Row of each in its data rank's step.
    std::vector<std::int64_t> rows;    ///< Their number on each data rank.
    std::int64_t version = 0;          ///< Weights that it reads.
    bool tells_experts = false;
    std::optional<RecordedDecoding::Told> told = {};  ///< To this rank, once read.
  };
  Flight flight_of(const std::vector<Part>& parts) const;
  /// This rank's sequences.
  static std::vector<RecordedDecoding::Row> rows_of(const Flight& flight,
                                                    const std::vector<Part>& parts);
  bool can_replay(const std::vector<Part>& parts) const;
  /// Starts a recorded step of these parts.
  Flight start(const std::vector<Part>& parts);
  /// Starts the step after the one of these parts, whose tokens the host does not know yet, unless
  /// more than the end of a sequence can stand in its way.
  std::optional<Flight> start_ahead(const std::vector<Part>& parts);
  /// The tokens that the parts' recorded step draws, which was started ahead or is started now, and
  /// the version of the weights that it read.
  std::vector<SampledToken> replay(std::vector<Part>& parts, std::int64_t& version);
  /// Parts of the step that was started ahead whose sequences still run.
  std::vector<Part> parts_ahead();
  /// Waits for this rank's tokens of a step.
  void read(Flight& flight);
  /// Waits for the step that was started ahead: after it nothing of the engine's is under way.
  void settle();
  Progress take(Sequence& sequence, SampledToken token, std::int64_t version);
  Progress end(const Sequence& sequence, Progress progress, FinishReason reason);

  assembly::ModelOnRanks& placed_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  EngineOptions options_;
  std::shared_ptr<const Adapter> adapter_;
  CachePool pool_;
  Scheduler scheduler_;
  /// Embedding and head, which every pass reads, or all that ranks divide, with the factors of the
  /// adapters above; null between release_weights() and a step.
  std::unique_ptr<parallel::Acquired> held_;
  std::unique_ptr<MergedAdapter> merged_;       ///< Null: adapters stay beside their layers.
  std::unique_ptr<RecordedDecoding> recorded_;  ///< Null: steps are queued launch by launch.
  std::optional<Flight> ahead_;  ///< A step that began before the last one's tokens were known.
  PassShape last_pass_;
  EngineCounts counts_;         ///< See take_counts(); without those of the scheduler.
  std::vector<Progress> done_;  ///< Requests that want nothing.
  RequestId next_id_ = 0;
  std::int64_t weights_version_ = 0;
};

/// Called for each piece of text of request `index` as it becomes certain.
using TextCallback = std::function<void(std::size_t index, const std::string& piece)>;

/// Generates all requests with an engine that has room for the longest of them. Results are in the
/// order of the requests. Throws as Engine::submit, naming the request.
std::vector<Completion> generate(assembly::ModelOnRanks& placed,
                                 const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                 const std::vector<Request>& requests, EngineOptions options,
                                 const TextCallback& on_text = {});

}  // namespace heddle::rollout
