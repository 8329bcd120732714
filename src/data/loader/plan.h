#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "data/loader/loader.h"
#include "data/packing/packing.h"

namespace heddle::data {

/// The order of one epoch: rows (packed rows, or single sequences) of data-set rows. Depends on
/// data, seed, file weights and packing only.
class EpochPlan {
 public:
  EpochPlan(const Dataset& dataset, const LoaderOptions& options, std::int64_t epoch);

  std::int64_t epoch() const { return epoch_; }
  std::int64_t rows() const { return groups_.size(); }
  std::span<const std::int64_t> row(std::int64_t index) const { return groups_[order_[index]]; }
  std::int64_t sequences() const { return static_cast<std::int64_t>(groups_.items.size()); }

 private:
  std::int64_t epoch_;
  Groups groups_;
  std::vector<std::int64_t> order_;
};

/// Rows of a file in a data set, of which an epoch has `weight` times as many.
struct FileRows {
  std::int64_t first = 0, rows = 0;
  double weight = 1;
};

/// The rows of an epoch, file by file: whole passes, and a seeded part of a file for the fraction
/// of its weight. Every epoch has as many.
std::vector<std::int64_t> rows_of_epoch(std::span<const FileRows> files, std::uint64_t seed,
                                        std::int64_t epoch);

/// 0..count-1 in the order given by (seed, name): Fisher-Yates over a counter-based generator.
std::vector<std::int64_t> seeded_permutation(std::int64_t count, std::uint64_t seed,
                                             std::string_view name);

/// The rows of one global batch dealt to ranks and cut into micro-batches: micro_batches[rank][m]
/// lists data-set rows. Every rank has as many micro-batches; the last ones may be empty. Rows stay
/// whole.
struct StepPlan {
  std::vector<std::vector<std::vector<std::int64_t>>> micro_batches;
};
StepPlan plan_step(const Dataset& dataset, const LoaderOptions& options, const EpochPlan& plan,
                   std::int64_t first_row, std::int64_t last_row);

/// The most tokens of a micro-batch: the smaller of micro_batch_tokens and the static capacity; 0 =
/// no limit.
std::int64_t micro_batch_limit(std::int64_t micro_batch_tokens, const BatchCapacity& capacity);

/// Throws ConfigError that names the longest row when it does not fit a micro-batch of `limit`
/// tokens (0 = no limit).
void check_longest_row(const Dataset& dataset, std::int64_t limit);

}  // namespace heddle::data
