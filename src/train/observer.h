#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/metrics.h"
#include "data/loader/dataset.h"
#include "objective/evaluation.h"

namespace heddle::train {

/// Rows of data.train or data.eval.
struct DataInfo {
  std::string name;  ///< "train", "eval"
  std::vector<std::pair<std::string, data::DatasetReport>> files;
  /// Tokens that 10, 50, 90 and 99 % of the rows do not exceed.
  std::array<std::int64_t, 4> lengths = {};
};

/// Facts of the start-up table.
struct RunInfo {
  std::string model_type;
  std::vector<std::pair<std::string, std::int64_t>>
      parameters;  ///< By kind: "embedding", "linear attention", ...
  std::int64_t total_parameters = 0, trainable_parameters = 0;
  std::int64_t ranks = 1;
  std::string layout;                 ///< The mesh in words.
  std::vector<std::string> pipeline;  ///< The schedule of a usual step, a line a rank; empty: none.
  std::vector<std::string> idle;      ///< Ranks without work, see idle_ranks().
  std::string device;
  std::string dtype;
  std::vector<std::pair<std::string, std::int64_t>>
      memory;  ///< Memory of this rank, by purpose, bytes; activations are an estimate.
  std::vector<std::string> kernels;    ///< "gated_delta_rule: cpu.chunk"
  std::vector<std::string> undecayed;  ///< Parameters without weight decay.
  std::vector<std::string> defaulted;  ///< Model values that config.json did not give.
  std::string data_summary;
  std::vector<DataInfo> data;             ///< Empty where the model generates its rows.
  std::vector<std::string> bad_examples;  ///< The first few messages of skipped rows.
  std::int64_t tokens_per_epoch = 0, steps_per_epoch = 0, total_steps = 0, first_step = 0;
  double packing_efficiency = 1;
};

using objective::Evaluation;

/// One optimizer step.
struct StepInfo {
  std::int64_t step = 0;  ///< From 1.
  double epoch = 0;
  double loss = 0, lr = 0, grad_norm = 0;
  std::int64_t tokens = 0, loss_tokens = 0;
  double seconds = 0, tokens_per_s = 0, mfu = 0;  ///< mfu 0: unknown
  std::int64_t memory_bytes = 0;
  Metrics metrics;  ///< All other figures of the step.

  void add(const Evaluation& evaluation) {
    metrics.set(metric::kEvalLoss, evaluation.loss);
    metrics.add_evaluation(evaluation.metrics);
  }
};

struct Summary {
  std::int64_t steps = 0;
  double first_loss = 0, last_loss = 0;
  double best_eval = 0;              ///< Value of best_metric.
  std::string best_metric = "loss";  ///< See eval.metric.
  bool has_eval = false;
  bool stopped = false;        ///< On request, before the end.
  bool stopped_early = false;  ///< No improvement for early_stop_patience evaluations.
  double seconds = 0;
  std::filesystem::path output;  ///< final/, empty if stopped.
  /// Class of transformers that an adapter acts on; empty without adapters.
  std::string adapted_class;
};

/// Receives what happens in a run; the trainer knows nothing of terminals and files of metrics.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_tokenize(const std::string& file, double fraction, std::int64_t rows) {}
  virtual void on_start(const RunInfo& info) {}
  virtual void on_resume(std::int64_t step, const std::filesystem::path& checkpoint) {}
  virtual void on_step(const StepInfo& step) {}
  /// Before the on_step of the same step; step 0 is before the first.
  virtual void on_evaluation(std::int64_t step, const Evaluation& evaluation, bool best) {}
  virtual void on_checkpoint(std::int64_t step, const std::filesystem::path& path) {}
  /// A warning that the log has already, for what keeps a record of the run.
  virtual void on_warning(const std::string& message) {}
  virtual void on_finish(const Summary& summary) {}
  /// Instead of on_start, on_finish and what lies between, for a run that had ended before: `limit`
  /// is the key and value that ended it. The summary is that of the earlier run, without seconds.
  virtual void on_already_finished(const Summary& summary, const std::string& limit) {}
};

}  // namespace heddle::train
