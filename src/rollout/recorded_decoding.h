#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "device/graph.h"
#include "nn/adapters.h"
#include "rollout/cache_pool.h"
#include "rollout/sampler.h"

namespace heddle::rollout {

/// Steps that continue sequences by one token each, from the token to the drawn one, recorded as
/// graphs of the device and replayed: a small model's step is hundreds of launches that the device
/// finishes faster than the host queues them. One graph for each bucket of batch sizes and lengths,
/// whose inputs lie at fixed addresses. Rows that fill a bucket up work on a dummy slot.
class RecordedDecoding {
 public:
  /// One sequence.
  struct Row {
    std::int64_t token = 0;         ///< Not yet in the cache.
    const Holding* held = nullptr;  ///< With room for it.
    Draw draw;
  };

  /// Why the model's steps are queued launch by launch; empty: they can be recorded.
  static std::string why_not(const assembly::ModelOnRanks& placed);

  /// `placed` and `pool` outlive it.
  RecordedDecoding(assembly::ModelOnRanks& placed, CachePool& pool, std::int64_t capacity);

  /// The next token of each sequence, all with this set of adapters or none; the caches are
  /// continued. At least one row.
  std::vector<SampledToken> step(const std::vector<Row>& rows,
                                 const std::shared_ptr<const nn::AdapterSet>& set);
  /// After the caches have moved.
  void forget();
  /// After parameters may have moved.
  void forget_if_moved();

 private:
  struct Step {
    at::Tensor whole;  ///< [6,batch] int64: those of DrawTables, then token, slot, length.
    at::Tensor real;   ///< [3,batch] float64
    at::Tensor pages;  ///< [batch,pages of the longest] int32
    at::Tensor pages_host;
    ops::Sequences sequences;
    std::weak_ptr<const nn::AdapterSet> set;  ///< To tell a new one at the address of an old one.
    at::Tensor logits;                        ///< [batch,V] of the last run.
    at::Tensor drawn;                         ///< [batch,3], see TokenTable, of plain draws.
    std::unique_ptr<device::Graph> graph;
  };

  /// Batch, longest, the rows' adapters, and whether the tokens are drawn in the graph.
  using Key = std::tuple<std::int64_t, std::int64_t, const nn::AdapterSet*, bool>;

  Step make_step(const Key& key, const std::shared_ptr<const nn::AdapterSet>& set) const;
  void run(Step& step, const Key& key) const;
  /// Brings the rows' numbers to where the graph reads them.
  void fill(Step& step, const std::vector<Row>& rows) const;
  /// Of all parameters' addresses.
  std::uint64_t fingerprint() const;

  assembly::ModelOnRanks& placed_;
  CachePool& pool_;
  std::int64_t capacity_;
  std::map<Key, Step> steps_;
  const device::Graph* neighbour_ = nullptr;  ///< All graphs share its memory.
  std::uint64_t fingerprint_ = 0;
};

}  // namespace heddle::rollout
