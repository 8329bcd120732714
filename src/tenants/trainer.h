#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace heddle::adapters {
class LoraSet;
}
namespace heddle::assembly {
struct ModelOnRanks;
}

namespace heddle::tenants {

/// Number of a set of adapters in a Trainer; never given twice.
using SetId = std::int64_t;

/// A new set: A drawn from `seed`, B zero, scale alpha / rank.
struct SetOptions {
  std::int64_t rank = 32;
  double alpha = 32;
  std::uint64_t seed = 0;
  bool attn = true;      ///< Projections of attention and of the gated DeltaNet.
  bool mlp = true;       ///< Dense MLPs, shared and routed experts; never the router.
  bool unembed = false;  ///< The language-model head.
  /// Routed experts of a layer share the factor on the side of the hidden states.
  bool shared_expert_factors = false;
};

/// Purpose for which the directory of a set is written.
enum class SavedFor {
  kTraining,  ///< To go on: moments, steps and gradients that wait for a step beside the weights.
  kSampling,  ///< The weights alone.
  kPeft,      ///< The weights alone, for PEFT and what reads its files.
};

/// One sequence. Position t predicts target_tokens[t]: the caller has shifted. Soft targets give a
/// position several targets, or none: the cells that are filled of a matrix [T,target_width].
struct Datum {
  std::vector<std::int64_t> tokens;         ///< [T]
  std::vector<std::int64_t> target_tokens;  ///< [R]: [T] without soft targets.
  /// Loss inputs by name, [R] each: weights, logprobs, advantages, ... (see check()).
  std::map<std::string, std::vector<float>> inputs;
  std::int64_t target_width = 0;             ///< 0: no soft targets.
  std::vector<std::int64_t> target_cells{};  ///< [R] ascending places in the matrix, row by row.

  bool has_soft_targets() const { return target_width > 0; }
};

/// Sequences of one set with one loss: a sum over tokens and sequences.
struct Work {
  SetId set = 0;
  std::string loss_fn;
  std::map<std::string, double> config;  ///< Numbers of the loss: clip_low_threshold, beta, ...
  std::vector<Datum> data;
  bool forward_only = false;  ///< Changes no gradient.
};

struct DatumOutput {
  std::vector<float> logprobs;          ///< [R] of the target tokens.
  std::vector<float> elementwise_loss;  ///< [R]
};

struct WorkResult {
  std::vector<DatumOutput> data;          ///< One a datum.
  std::map<std::string, double> metrics;  ///< "NAME:REDUCTION", at least "loss:sum".
  /// Unless empty, why the work was refused (as check() says it): nothing of it ran.
  std::string error;
};

/// AdamW with decoupled weight decay and bias correction by the set's own steps.
struct AdamParams {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-12, weight_decay = 0;
  double grad_clip_norm = 0;  ///< 0: no clipping.
};

/// The next update of a set.
struct SetUpdate {
  SetId set = 0;
  AdamParams params;
};

struct StepResult {
  double grad_norm = 0;  ///< Before clipping; 0 without gradients.
  /// False where the norm is not finite: the gradients were dropped and nothing else changed.
  bool updated = true;
  /// Unless empty, why the set has no gradients: a forward_backward failed after the last step.
  /// They were dropped, and nothing else changed.
  std::string error = {};
  /// Unless empty, factors that no gradient has reached, said once.
  std::string warning = {};
};

struct TrainerOptions {
  /// A pass holds about so many tokens; a longer sequence has a pass of its own.
  std::int64_t pass_tokens = 16384;
  /// Promises that a set gets the same bits whatever else is in its passes. False: sets share the
  /// products of the base model's weights, faster and within rounding of the same, unless the
  /// process is deterministic (device::set_deterministic) for another reason. Refused on other
  /// devices than the CPU, whose library products are not shown to keep the promise.
  bool deterministic = false;
  /// On a GPU passes whose lengths and sets' structures come again are recorded as graphs of the
  /// device and replayed, bit for bit the same; says so in last_passes().
  bool records = true;
};

/// A pass over sequences of several sets.
struct PassShape {
  std::int64_t sequences = 0, tokens = 0, sets = 0;
  bool recorded = false;  ///< Replayed as a graph, not queued launch by launch.
};

/// Many sets of adapters trained on one frozen base model. Work of several sets shares passes; each
/// set has its own factors, gradients, optimizer state and steps, and nothing that one does reaches
/// another. Calls come from one thread at a time.
class Trainer {
 public:
  /// `base`: of a recipe with Purpose::kTenants, and outlives the Trainer. Throws ConfigError for a
  /// layout on which tenants are not built.
  Trainer(assembly::ModelOnRanks& base, const TrainerOptions& options);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Throws ConfigError for options that the model does not take.
  SetId create(const SetOptions& options);
  void remove(SetId set);
  const SetOptions& options(SetId set) const;
  /// Steps of its optimizer so far.
  std::int64_t steps(SetId set) const;

  /// Throws DataError that names datum, input and what was expected unless forward_backward() takes
  /// the work. Touches no state that training changes, but the list of sets.
  void check(const Work& work) const;
  /// Adds the gradients of every work to those of its set, and gives its outputs. A work that
  /// check() refuses carries the reason in its result and leaves the others alone. Where a pass
  /// fails, DeviceError for want of memory, the gradients of all sets of the call are dropped, and
  /// their next updates refused.
  std::vector<WorkResult> forward_backward(std::span<const Work> works);
  /// Passes of the last forward_backward().
  const std::vector<PassShape>& last_passes() const;
  /// One update of a set from the gradients since its last one, which it clears; without gradients
  /// as from zeros.
  StepResult optim_step(SetId set, const AdamParams& params);
  /// optim_step() of several sets, none of them twice: the bits of each by itself, in launches that
  /// all share.
  std::vector<StepResult> optim_steps(std::span<const SetUpdate> updates);
  /// Drops those since its last step, as where a step has failed; with `refuses_step`, as where a
  /// pass has, the next update is refused.
  void drop_gradients(SetId set, bool refuses_step);

  /// Writes a directory, so that load() goes on with the same bits from one for training. A factor
  /// that experts share is there once (ckpt::AdapterForm::kCompact), and repeated for PEFT; without
  /// one all are PEFT directories. Appears whole under its name. Throws ConfigError if something
  /// stands there and not `overwrite`; FileError.
  void save(SetId set, const std::filesystem::path& directory, SavedFor purpose,
            bool overwrite = false) const;
  /// A new set from such a directory, in whatever form, or from PEFT's. Throws ModelError; for
  /// `with_optimizer` also where the directory was saved without.
  SetId load(const std::filesystem::path& directory, bool with_optimizer);

  /// Whether all of its weights are finite.
  bool is_finite(SetId set) const;
  /// A copy of the set as it is now, which no later step changes: what a pass or a request of the
  /// engine names. Lives as long as it is held, not longer than the base.
  std::shared_ptr<const adapters::LoraSet> snapshot(SetId set) const;
  /// Writes such a copy, as save() for sampling.
  void save_snapshot(const adapters::LoraSet& set, const std::filesystem::path& directory) const;
  /// Such a copy of a saved directory.
  std::shared_ptr<const adapters::LoraSet> load_snapshot(
      const std::filesystem::path& directory) const;
  /// Memory of a set on the device: factors, gradients and optimizer state.
  std::int64_t bytes(SetId set) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace heddle::tenants
