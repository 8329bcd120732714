#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "data/tokenizer/tokenizer.h"
#include "nn/cache.h"
#include "rollout/recorded_decoding.h"
#include "rollout/sampler.h"
#include "rollout/text_stream.h"

namespace heddle::rollout {

struct Request {
  std::vector<std::int32_t> prompt;  ///< At least one token.
  std::int64_t max_new_tokens = 128;
  SamplingOptions sampling;  ///< Its seed is the request's own random stream.
  std::vector<std::int32_t>
      stop_ids;  ///< End of generation; the token itself is part of the output.
  std::vector<std::string> stop_strings;  ///< Cut from the text where the first of them begins.
};

enum class FinishReason { kStop, kLength, kAborted };

struct Completion {
  std::vector<std::int32_t> output_ids;
  std::vector<double> logprobs;                ///< [output_ids], of the model's own distribution.
  std::vector<std::int64_t> weights_versions;  ///< [output_ids], of the weights that drew each.
  std::string text;                            ///< Decoded without special tokens.
  FinishReason finish_reason = FinishReason::kLength;
};

struct EngineOptions {
  std::int64_t max_sequences = 16;     ///< Generated at the same time.
  std::int64_t prefill_tokens = 4096;  ///< Prompt tokens of one pass on each data rank, at most.
  std::int64_t capacity = 4096;        ///< Tokens of a sequence, prompt and output, at most.
  bool record_steps = true;            ///< As graphs, where RecordedDecoding can.
};

using RequestId = std::int64_t;

/// A step's news for a request.
struct Progress {
  RequestId id = 0;
  std::string text;  ///< Text that became certain: whole UTF-8, not a part of a stop string.
  std::optional<SampledToken> token;     ///< Drawn in this step.
  std::optional<Completion> completion;  ///< Set for a request that finished.
};

/// Generates with continuous batching over the ranks of a model: a sequence that ends gives its
/// slot to the next request. A request's tokens depend on its own seed and on neither the other
/// requests nor the order, the batch size or an interruption, up to the rounding of products over
/// other numbers of rows.
///
/// All ranks of the model make the same calls in the same order and get the same results. Every
/// data rank has a share of the slots; each pass is planned for all of them at once, so that all
/// ranks run equally many.
class Engine {
 public:
  /// `placed` outlives the engine. Throws ConfigError for ranks that divide sequences (cp).
  Engine(assembly::ModelOnRanks& placed, std::shared_ptr<const data::Tokenizer> tokenizer,
         const EngineOptions& options);

  /// Ids count from 0. Throws DataError for an empty prompt, an id outside the vocabulary, and for
  /// a request that exceeds the capacity.
  RequestId submit(Request request);
  /// One pass: over waiting prompts if there are any, else one token for every sequence. Reports
  /// the requests that got a token or finished. Throws ModelError, with the request and the first
  /// layer, where logits are not finite.
  std::vector<Progress> step();
  /// Nothing waits or runs.
  bool is_idle() const { return waiting_.empty() && running_.empty(); }
  /// Ends a request and returns what it has. Throws InternalError for one that is not under way.
  Completion abort(RequestId id);
  /// Takes a running request's slot away: it goes on later, and its tokens pass through the model
  /// again. Does nothing to one that waits.
  void preempt(RequestId id);

  /// Number of the weights that draw the next tokens, 0 at first.
  std::int64_t weights_version() const { return weights_version_; }
  /// After the model's parameters have other values: what the caches hold is of the old ones, so
  /// running requests are preempted.
  void weights_changed(std::int64_t version);

 private:
  struct Sequence {
    RequestId id;
    Request request;
    TextStream text;
    std::vector<std::int32_t> tokens;  ///< Prompt and output.
    Completion completion = {};
    std::int64_t slot = -1;   ///< Of all data ranks' slots; -1: it waits.
    std::int64_t cached = 0;  ///< How many of its tokens the caches hold.

    std::int64_t pending() const { return static_cast<std::int64_t>(tokens.size()) - cached; }
    bool is_prompt() const { return cached == 0 || pending() > 1; }
  };
  /// Tokens of one sequence in a pass.
  struct Part {
    Sequence* sequence;
    std::int64_t count;
    std::int64_t data_rank;
    std::int64_t last_row = 0;  ///< Row of the sequence in its data rank's pass.
  };

  void check(const Request& request) const;
  std::int64_t data_rank_of(std::int64_t slot) const;
  void admit(std::vector<Progress>& progress);
  std::int64_t free_slot() const;
  std::vector<Part> plan() const;
  /// Hidden states of this rank's rows; undefined where the last stage is elsewhere.
  at::Tensor run(std::vector<Part>& parts);
  std::vector<SampledToken> draw(const at::Tensor& hidden, const std::vector<Part>& parts) const;
  std::vector<SampledToken> replay(const std::vector<Part>& parts);
  Progress take(Sequence& sequence, const SampledToken& token);

  assembly::ModelOnRanks& placed_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  EngineOptions options_;
  std::unique_ptr<parallel::Acquired> ends_;  ///< Embedding and head, which every pass reads.
  nn::Cache cache_;
  std::unique_ptr<RecordedDecoding> recorded_;  ///< Null: steps are queued launch by launch.
  std::int64_t own_slots_;   ///< Behind them in the caches are those of dummy sequences.
  std::vector<bool> taken_;  ///< [slots of all data ranks]
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  ///< In the order of their admission.
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
