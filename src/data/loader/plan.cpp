#include "data/loader/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/errors.h"
#include "base/rng.h"

namespace heddle::data {
namespace {

std::vector<std::int64_t> sequences_of_epoch(const Dataset& dataset, const LoaderOptions& options,
                                             std::int64_t epoch) {
  std::vector<FileRows> files;
  for (const Dataset::File& file : dataset.files())
    files.push_back({file.first_row, file.rows, file.weight});
  return rows_of_epoch(files, options.seed, epoch);
}

/// Splits a micro-batch that has more sequences than the capacity allows; a row itself is never
/// split.
std::vector<std::vector<std::int64_t>> split_by_sequences(
    const std::vector<std::span<const std::int64_t>>& rows, std::int64_t most) {
  std::vector<std::vector<std::int64_t>> parts(1);
  for (const std::span<const std::int64_t> row : rows) {
    const bool is_full = most > 0 && !parts.back().empty() &&
                         static_cast<std::int64_t>(parts.back().size() + row.size()) > most;
    if (is_full) parts.emplace_back();
    parts.back().insert(parts.back().end(), row.begin(), row.end());
  }
  return parts;
}

}  // namespace

std::vector<std::int64_t> rows_of_epoch(std::span<const FileRows> files, std::uint64_t seed,
                                        std::int64_t epoch) {
  std::vector<std::int64_t> all;
  for (std::size_t number = 0; number < files.size(); ++number) {
    const FileRows& file = files[number];
    const auto passes = static_cast<std::int64_t>(std::floor(file.weight));
    for (std::int64_t pass = 0; pass < passes; ++pass) {
      for (std::int64_t row = 0; row < file.rows; ++row) all.push_back(file.first + row);
    }
    const double fraction = file.weight - static_cast<double>(passes);
    const auto extra = std::llround(fraction * static_cast<double>(file.rows));
    if (extra > 0) {
      std::vector<std::int64_t> chosen =
          seeded_permutation(file.rows, seed, fmt::format("data/part/{}/{}", number, epoch));
      chosen.resize(static_cast<std::size_t>(extra));
      std::sort(chosen.begin(), chosen.end());
      for (const std::int64_t row : chosen) all.push_back(file.first + row);
    }
  }
  return all;
}

std::vector<std::int64_t> seeded_permutation(std::int64_t count, std::uint64_t seed,
                                             std::string_view name) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  const CounterRng rng(seed, name);
  for (std::int64_t i = count - 1; i > 0; --i) {
    const auto other = rng.below(static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(i) + 1);
    std::swap(order[i], order[other]);
  }
  return order;
}

EpochPlan::EpochPlan(const Dataset& dataset, const LoaderOptions& options, std::int64_t epoch)
    : epoch_(epoch) {
  std::vector<std::int64_t> sequences = sequences_of_epoch(dataset, options, epoch);
  const auto count = static_cast<std::int64_t>(sequences.size());
  if (options.shuffle) {
    const auto order =
        seeded_permutation(count, options.seed, fmt::format("data/shuffle/{}", epoch));
    std::vector<std::int64_t> shuffled(sequences.size());
    for (std::size_t i = 0; i < order.size(); ++i) shuffled[i] = sequences[order[i]];
    sequences = std::move(shuffled);
  }
  if (options.packing) {
    groups_ =
        pack_in_windows(sequences, dataset.lengths(), options.max_length, options.packing_window);
  } else {
    groups_.items = std::move(sequences);
    groups_.starts.resize(static_cast<std::size_t>(count) + 1);
    std::iota(groups_.starts.begin(), groups_.starts.end(), 0);
  }
  // Packing puts rows of long sequences first: mix the packed rows once more.
  if (options.packing && options.shuffle) {
    order_ = seeded_permutation(groups_.size(), options.seed,
                                fmt::format("data/shuffle_packed/{}", epoch));
  } else {
    order_.resize(static_cast<std::size_t>(groups_.size()));
    std::iota(order_.begin(), order_.end(), 0);
  }
}

StepPlan plan_step(const Dataset& dataset, const LoaderOptions& options, const EpochPlan& plan,
                   std::int64_t first_row, std::int64_t last_row) {
  const auto count = static_cast<std::size_t>(last_row - first_row);
  std::vector<std::int64_t> lengths(count, 0);
  for (std::size_t i = 0; i < count; ++i) {
    for (const std::int64_t sequence : plan.row(first_row + static_cast<std::int64_t>(i))) {
      lengths[i] += dataset.lengths()[sequence];
    }
  }
  // Longest row first to the rank with the fewest tokens, so that ranks wait little for each other.
  std::vector<std::int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto world = static_cast<std::size_t>(options.world);
  if (world > 1) {
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return lengths[a] > lengths[b]; });
  }
  std::vector<std::vector<std::int64_t>> shares(world);
  std::vector<std::int64_t> loads(world, 0);
  for (const std::int64_t row : order) {
    const auto rank = std::min_element(loads.begin(), loads.end()) - loads.begin();
    shares[rank].push_back(row);
    loads[rank] += lengths[row];
  }

  const std::int64_t limit = micro_batch_limit(options.micro_batch_tokens, options.capacity);
  // One place stays for the dummy tail.
  const std::int64_t most_sequences =
      options.capacity.sequences > 0 ? options.capacity.sequences - 1 : 0;
  StepPlan step;
  step.micro_batches.resize(world);
  std::size_t most = 1;
  for (std::size_t rank = 0; rank < world; ++rank) {
    std::sort(shares[rank].begin(), shares[rank].end());
    const std::int64_t whole = std::max<std::int64_t>(loads[rank], 1);
    const Groups bins = pack_best_fit(shares[rank], lengths, limit > 0 ? limit : whole);
    auto& mine = step.micro_batches[rank];
    for (std::int64_t bin = 0; bin < bins.size(); ++bin) {
      std::vector<std::span<const std::int64_t>> rows;
      for (const std::int64_t row : bins[bin]) rows.push_back(plan.row(first_row + row));
      for (auto& part : split_by_sequences(rows, most_sequences)) mine.push_back(std::move(part));
    }
    most = std::max(most, mine.size());
  }
  for (auto& mine : step.micro_batches) mine.resize(most);
  return step;
}

std::int64_t micro_batch_limit(std::int64_t micro_batch_tokens, const BatchCapacity& capacity) {
  if (micro_batch_tokens <= 0) return capacity.tokens;
  if (capacity.tokens <= 0) return micro_batch_tokens;
  return std::min(micro_batch_tokens, capacity.tokens);
}

void check_longest_row(const Dataset& dataset, std::int64_t limit) {
  if (limit <= 0) return;
  const auto lengths = dataset.lengths();
  const auto longest = std::max_element(lengths.begin(), lengths.end());
  if (longest == lengths.end() || *longest <= limit) return;
  const Place place = dataset.place(longest - lengths.begin());
  throw_error<ConfigError>(
      "{}:{} has {} tokens but a micro-batch holds {}; raise train.micro_batch_tokens or lower "
      "data.max_length",
      place.file, place.line, *longest, limit);
}

}  // namespace heddle::data
