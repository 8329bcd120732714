#include "rollout/pool_size.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <bit>

#include "base/errors.h"
#include "base/log.h"
#include "runtime/free_memory.h"

namespace heddle::rollout {

using comm::Dim;

namespace {

/// Share of the free memory that the pools of an engine take that has the device for itself.
constexpr double kMemoryFraction = 0.9;

struct Bytes {
  std::int64_t slot = 0, page = 0;
};

/// Memory of this rank's layers.
Bytes bytes_of(const models::Model& model, const CachePool::Size& size) {
  Bytes bytes;
  for (const nn::LayerCache& layer : model.make_cache({.slots = 1,
                                     .pages = 1,
                                     .page_tokens = size.page_tokens,
                                     .state_dtype = size.state_dtype})) {
    for (const at::Tensor& memory : {layer.conv, layer.state})
      bytes.slot += memory.defined() ? static_cast<std::int64_t>(memory.nbytes()) : 0;
    for (const at::Tensor& memory : {layer.keys, layer.values})
      bytes.page += memory.defined() ? static_cast<std::int64_t>(memory.nbytes()) : 0;
  }
  return bytes;
}

double gib(double bytes) { return bytes / (1 << 30); }

/// Memory that the pools of an engine may take.
struct Budget {
  double fraction, free;
  Bytes bytes;

  Budget(const assembly::ModelOnRanks& placed, const EngineOptions& options,
         const CachePool::Size& size)
      : fraction(options.caches.memory_fraction > 0 ? options.caches.memory_fraction
                                                    : kMemoryFraction),
        free(static_cast<double>(runtime::free_bytes(placed.context))),
        bytes(bytes_of(*placed.model, size)) {}

  double slots(const CachePool::Size& size) const {
    return static_cast<double>((size.slots + size.dummy_slots) * bytes.slot);
  }
  /// With the page of rows that fill a pass up.
  double pages(std::int64_t count) const { return static_cast<double>((count + 1) * bytes.page); }
  /// Pages besides the slots of that size, at most `wanted`, on the rank that has fewest.
  std::int64_t affordable(const assembly::ModelOnRanks& placed, const CachePool::Size& size,
                          std::int64_t wanted) const {
    const double left = fraction * free - slots(size);
    std::int64_t count = wanted;
    if (left < pages(wanted)) {
      const double held = left / static_cast<double>(std::max<std::int64_t>(bytes.page, 1));
      count = std::max<std::int64_t>(0, static_cast<std::int64_t>(held) - 1);
    }
    at::Tensor missing = at::full({1}, wanted - count, at::kLong);
    placed.context.mesh.world_group().all_reduce_max(missing);
    return wanted - missing.item<std::int64_t>();
  }
};

/// Pages of `sequences` sequences of so many pages each, or as many as there is memory for. Slots
/// of kept states beyond the usual ones give way to them.
void take_memory(const assembly::ModelOnRanks& placed, const EngineOptions& options,
                 std::int64_t sequences, std::int64_t sequence_pages, CachePool::Size& size) {
  const Budget budget(placed, options, size);
  const std::int64_t wanted = sequences * sequence_pages;
  size.pages = budget.affordable(placed, size, wanted);
  const std::int64_t usual = sequences + EngineOptions{}.kept_states;
  if (size.pages < wanted && size.slots > usual) {
    size.slots = usual;
    size.pages = budget.affordable(placed, size, wanted);
  }
  if (size.pages < sequence_pages) {
    throw_error<ConfigError>(
        "the states of {} sequences ({:.3g} GiB) and the pages of one of {} tokens ({:.3g} GiB) do "
        "not fit into {} of the {:.3g} GiB that are free (rollout.memory_fraction): give fewer "
        "sequences (rollout.max_sequences), shorter ones, or a larger share",
        size.slots, gib(budget.slots(size)), options.capacity, gib(budget.pages(sequence_pages)),
        budget.fraction, gib(budget.free));
  }
  if (size.pages < wanted) {
    log::info(
        "rollout: pages for {} tokens of {} that all sequences have at full length, by {} of the "
        "{:.3g} GiB that are free (rollout.memory_fraction): sequences may be interrupted",
        size.pages * size.page_tokens, wanted * size.page_tokens, budget.fraction,
        gib(budget.free));
  }
}

}  // namespace

std::int64_t rank_sequences(const assembly::ModelOnRanks& placed, const EngineOptions& options) {
  const std::int64_t ranks = placed.context.mesh.data_size();
  return (options.max_sequences + ranks - 1) / ranks;
}

std::optional<c10::ScalarType> stored_as(StateDtype dtype) {
  if (dtype == StateDtype::kBFloat16) return at::kBFloat16;
  return std::nullopt;
}

CachePool::Size pool_size(const assembly::ModelOnRanks& placed, const EngineOptions& options) {
  const comm::Mesh& mesh = placed.context.mesh;
  if (mesh.size(Dim::kCp) > 1) {
    throw_error<ConfigError>(
        "parallel.cp is {}: expected 1 for generation, a cache holds whole sequences; divide the "
        "model with parallel.tp, pp, ep or fsdp",
        mesh.size(Dim::kCp));
  }
  const std::int64_t page = options.caches.kv_page;
  if (page < 1 || !std::has_single_bit(static_cast<std::uint64_t>(page)))
    throw_error<ConfigError>("rollout.kv_page: expected a power of two, found {}", page);
  const std::int64_t sequence_pages = (options.capacity + page - 1) / page;
  CachePool::Size size;
  size.ranks = mesh.data_size();
  size.own_rank = mesh.data_rank();
  size.slots = rank_sequences(placed, options) + options.kept_states;
  size.dummy_slots = std::max<std::int64_t>(1, mesh.size(Dim::kTp));
  size.page_tokens = page;
  size.state_dtype = stored_as(options.caches.state_dtype);
  if (size.state_dtype && placed.model->config().gated_delta_net() == nullptr) {
    throw ConfigError(
        "rollout.state_dtype: bfloat16 is for recurrent states, and the model has no Gated "
        "DeltaNet layer: expected float32");
  }
  size.pages = options.pages;
  if (options.pages == 0)
    take_memory(placed, options, rank_sequences(placed, options), sequence_pages, size);
  if (size.pages < sequence_pages) {
    throw_error<ConfigError>(
        "{} pages of {} tokens do not hold one sequence of {} tokens: give {} or more", size.pages,
        page, options.capacity, sequence_pages);
  }
  return size;
}

}  // namespace heddle::rollout
