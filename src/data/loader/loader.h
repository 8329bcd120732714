#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/batch.h"
#include "data/loader/dataset.h"

namespace heddle::data {

struct LoaderOptions {
  std::int64_t global_batch_size =
      8;  ///< rows per optimizer step over all ranks: sequences, or packed rows
  std::int64_t micro_batch_tokens =
      0;  ///< a micro-batch holds at most so many tokens; 0 = no limit
  bool packing = false;
  std::int64_t max_length = 0;         ///< tokens of a packed row; needed with packing
  std::int64_t packing_window = 8192;  ///< rows looked at together when packing
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::int64_t epochs = 1;     ///< 0 = without end (then max_steps must be set)
  std::int64_t max_steps = 0;  ///< 0 = until the epochs are over
  int rank = 0;                ///< data rank (dp x fsdp), not the world's
  int world = 1;
  int prefetch_steps = 2;       ///< steps prepared ahead by a thread; 0 = prepared in next()
  BatchCapacity capacity = {};  ///< of every micro-batch; `tokens` then bounds micro-batches like
                                ///< micro_batch_tokens
};

/// Work of one optimizer step on this rank.
struct Step {
  std::int64_t step = 0;   ///< from 0
  std::int64_t epoch = 0;  ///< from 0
  /// As many on every rank; a rank without rows left gets batches of one dummy token and no loss.
  std::vector<Batch> micro_batches;
  // Over all ranks and micro-batches:
  double loss_weight_sum = 0;
  std::int64_t loss_rows = 0;
  std::int64_t tokens = 0;  ///< real ones
  std::int64_t sequences = 0;
  std::int64_t rows =
      0;  ///< of the global batch: global_batch_size, or fewer at the end of an epoch
};

/// Sizes of the first epoch (packing differs slightly between epochs) and of the whole run.
struct LoaderInfo {
  std::int64_t sequences_per_epoch = 0;
  std::int64_t rows_per_epoch = 0;  ///< packed rows, or sequences without packing
  std::int64_t tokens_per_epoch = 0;
  std::int64_t loss_tokens_per_epoch = 0;
  std::int64_t steps_per_epoch = 0;
  std::int64_t total_steps = 0;
  double packing_efficiency = 1;  ///< tokens / (packed rows x max_length); 1 without packing
  double mean_row_tokens = 0;
};

class EpochPlan;

/// Gives the micro-batches of one optimizer step after the other. The order depends only on data,
/// seed and packing, not on rank, world or threads; a Loader that is told a cursor continues
/// exactly where the other stood.
class Loader {
 public:
  /// Throws ConfigError for options that do not fit each other or the data (a row longer than a
  /// micro-batch).
  Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next step, or nothing when epochs or max_steps are over. Rethrows what went wrong in the
  /// thread.
  std::optional<Step> next();

  /// The place after the last step that next() returned, to be kept in a checkpoint.
  nlohmann::json cursor() const;
  /// Continues from a cursor. global_batch_size, micro-batches and world may have changed; throws
  /// DataError that names what differs when data, seed, shuffling or packing changed, since the
  /// order is then another.
  void seek(const nlohmann::json& cursor);

  const LoaderInfo& info() const { return info_; }
  const LoaderOptions& options() const { return options_; }
  const Dataset& dataset() const { return *dataset_; }

 private:
  class Producer;

  std::shared_ptr<const Dataset> dataset_;
  LoaderOptions options_;
  LoaderInfo info_;
  std::unique_ptr<Producer> producer_;
};

/// One pass over a data set in its own order, for evaluation and scoring: micro-batches of whole
/// rows.
class EvaluationLoader {
 public:
  struct Options {
    std::int64_t micro_batch_tokens = 0;  ///< 0 = one row at a time
    int rank = 0;
    int world = 1;
    std::int64_t max_rows = 0;  ///< the first rows only; 0 = all
    BatchCapacity capacity = {};
  };
  /// Throws ConfigError when a row is longer than a micro-batch.
  EvaluationLoader(std::shared_ptr<const Dataset> dataset, Options options);

  /// This rank's next micro-batch, or nothing at the end; as many on every rank, some with a dummy
  /// token only.
  std::optional<Batch> next();
  std::int64_t batches() const { return rounds_; }

 private:
  std::shared_ptr<const Dataset> dataset_;
  Options options_;
  std::vector<std::int64_t> starts_;  ///< micro-batch m holds rows [starts_[m], starts_[m+1])
  std::int64_t rounds_ = 0;
  std::int64_t next_ = 0;
};

}  // namespace heddle::data
