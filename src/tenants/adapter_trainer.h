#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adapters/lora.h"
#include "assembly/model_on_ranks.h"
#include "ckpt/training_checkpoint.h"
#include "config/adapters.h"
#include "data/loader/loader.h"
#include "data/tokenizer/tokenizer.h"
#include "tenants/trained_set.h"
#include "train/loop_state.h"
#include "train/observer.h"
#include "train/optimizer.h"
#include "train/run_lock.h"
#include "train/untrained.h"

namespace heddle::tenants {

/// Results of a run of several adapters.
struct AdaptersSummary {
  struct Adapter {
    std::string name;
    train::Summary summary;
    std::string failure;  ///< Why it stopped before its end; empty: it did not.
  };
  std::vector<Adapter> adapters;
  std::int64_t rounds = 0;  ///< Joint steps, in which every adapter that has rows left makes one.
  bool stopped = false;     ///< On request, before the end.
};

/// `heddle sft` with `adapters:`: several adapters on one base model, each with rows, optimizer and
/// schedule of its own. In a round each makes a step, and their micro-batches share passes. Each
/// has the numbers of the run that would train it alone; with train.deterministic on the CPU the
/// bits too.
class AdapterTrainer {
 public:
  /// `observers`: one an adapter. `stop` is read after every round. Throws ConfigError for what is
  /// not built for several adapters, and as train::Trainer.
  AdapterTrainer(std::vector<config::AdapterRun> runs, std::vector<train::Observer*> observers,
                 const std::atomic<bool>& stop, std::shared_ptr<comm::World> world = nullptr);

  /// Trains, saves checkpoints and writes final/NAME, a PEFT directory each. An adapter whose loss
  /// or gradient is not finite stops where it is, and the others go on.
  AdaptersSummary run();

 private:
  struct Adapter {
    config::AdapterRun run;
    train::Observer* observer;
    std::shared_ptr<const data::Dataset> rows = {}, eval = {};  ///< eval null without data.eval.
    std::unique_ptr<adapters::LoraSet> factors = {};
    std::unique_ptr<train::Optimizer> optimizer = {};
    train::UntrainedWatch untrained = {};
    std::unique_ptr<data::Loader> loader = {};
    config::RunConfig paced = {};  ///< run.config with what is given in epochs and shares as steps.
    train::LoopState loop = {};
    bool is_done = false;
    std::string failure = {};
  };
  /// A round's step of one adapter.
  struct Begun {
    Adapter* adapter;
    data::Step step;
  };

  const config::RunConfig& shared() const { return adapters_.front().run.config; }
  void open(Adapter& adapter);
  /// Its gradients are summed no longer.
  static void end(Adapter& adapter);
  /// Loss on its data.eval. All ranks call it together.
  train::Evaluation evaluate(const Adapter& adapter);
  void evaluate_on_start();
  /// Adds the evaluation that is due after a step, if one is.
  void evaluate_if_due(Adapter& adapter, train::StepInfo& info);
  /// Adapters that have rows left; marks the others.
  std::vector<Begun> next_steps();
  void round(std::vector<Begun> steps);
  void finish_step(const Begun& begun, const SetStep& update, const StepResult& result,
                   double entropy, double seconds);
  /// Called by all ranks with the same message; nothing to do for an empty one.
  void warn(const Adapter& adapter, const std::string& message) const;
  std::vector<ckpt::TensorPart> state(bool with_copies) const;
  void save();
  static void check_same_run(const nlohmann::ordered_json& saved, const Adapter& adapter,
                             const std::string& checkpoint);
  void resume();
  void export_all() const;

  std::unique_ptr<train::RunLock> lock_;  ///< Rank 0 holds it while the run lasts.
  std::vector<Adapter> adapters_;
  const std::atomic<bool>& stop_;
  assembly::ModelOnRanks base_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  ckpt::TokenizerSource tokenizer_source_;
  nlohmann::ordered_json sources_;  ///< train::contents_of() base model and tokenizer
  std::unique_ptr<ckpt::CheckpointStore> checkpoints_;
  std::int64_t rounds_ = 0, saved_rounds_ = -1;
  ckpt::Path last_checkpoint_;  ///< Empty before the first.
};

}  // namespace heddle::tenants
