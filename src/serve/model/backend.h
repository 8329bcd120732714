#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "serve/metrics/pass_metrics.h"
#include "serve/model/generation.h"
#include "tenants/trainer.h"

namespace heddle::serve {

/// Facts of the base model that clients are told.
struct ModelFacts {
  std::string name;                ///< By which clients ask for it.
  std::string directory;           ///< Tokenizer and configuration lie there.
  std::string architecture;        ///< model_type of config.json
  std::int64_t vocabulary = 0;     ///< Token ids below this are valid.
  std::int64_t max_context = 0;    ///< Tokens of prompt and answer, or of a training sequence.
  std::int64_t max_sequences = 0;  ///< Answers generated at the same time.
  std::vector<std::int32_t> end_tokens;  ///< End an answer unless the client says otherwise.
};

/// A base model that adapters are trained on and that generates. Its calls come from one thread.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const ModelFacts& facts() const = 0;

  // As tenants::Trainer.
  virtual tenants::SetId create(const tenants::SetOptions& options) = 0;
  virtual void remove(tenants::SetId set) = 0;
  virtual std::vector<tenants::WorkResult> forward_backward(
      std::span<const tenants::Work> works) = 0;
  virtual std::vector<tenants::StepResult> optim_steps(
      std::span<const tenants::SetUpdate> updates) = 0;
  virtual void drop_gradients(tenants::SetId set, bool refuses_step) = 0;
  virtual bool is_finite(tenants::SetId set) = 0;
  virtual void save(tenants::SetId set, const std::filesystem::path& directory,
                    tenants::SavedFor purpose) = 0;
  virtual tenants::SetId load(const std::filesystem::path& directory, bool with_optimizer) = 0;
  /// The set's weights as they are now, which no later step changes.
  virtual std::shared_ptr<const adapters::LoraSet> snapshot(tenants::SetId set) = 0;
  /// Writes such weights as a directory that load_snapshot() reads.
  virtual void save_snapshot(const std::shared_ptr<const adapters::LoraSet>& weights,
                             const std::filesystem::path& directory) = 0;
  /// The weights of a directory that save() wrote, or of a PEFT adapter.
  virtual std::shared_ptr<const adapters::LoraSet> load_snapshot(
      const std::filesystem::path& directory) = 0;

  /// An answer, or a piece of one, of a submitted generation.
  struct Event {
    GenerationId id = 0;
    std::optional<GeneratedToken> token;
    std::optional<GenerationResult> result;  ///< All samples are there; the generation has ended.
    std::string failure = {};                ///< Why it ended without a result.
    bool is_users = false;                   ///< The failure is of the client's own adapter.
  };
  /// Throws DataError for a request that the model does not take.
  virtual GenerationId submit(const Generation& generation) = 0;
  virtual void abort(GenerationId id) = 0;
  virtual bool is_generating() const = 0;
  /// One pass over what is being generated.
  virtual std::vector<Event> step() = 0;

  /// Passes since the last call.
  virtual std::vector<ModelPass> take_passes() { return {}; }
  /// Answers that wait and run.
  virtual ModelQueue queue() const { return {}; }
};

}  // namespace heddle::serve
