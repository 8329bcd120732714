#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "device/graph.h"
#include "nn/cache.h"
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
    std::int64_t token = 0;  ///< Not yet in the cache.
    std::int64_t slot = 0;
    std::int64_t length = 0;  ///< Tokens in the cache.
    Draw draw;
  };

  /// Why the model's steps are queued launch by launch; empty: they can be recorded.
  static std::string why_not(const assembly::ModelOnRanks& placed);

  /// `placed` and `cache` outlive it; no sequence has `dummy_slot`.
  RecordedDecoding(assembly::ModelOnRanks& placed, nn::Cache& cache, std::int64_t capacity,
                   std::int64_t dummy_slot);

  /// The next token of each sequence; the caches are continued. At least one row.
  std::vector<SampledToken> step(const std::vector<Row>& rows);
  /// After parameters have moved.
  void forget();

 private:
  struct Step {
    at::Tensor whole;  ///< [6,batch] int64: those of DrawTables, then token, slot, length.
    at::Tensor real;   ///< [3,batch] float64
    ops::Sequences sequences;
    at::Tensor drawn;  ///< [batch,2]: what the last run drew.
    std::unique_ptr<device::Graph> graph;
  };

  Step make_step(std::int64_t batch) const;
  void run(Step& step, std::int64_t longest) const;

  assembly::ModelOnRanks& placed_;
  nn::Cache& cache_;
  std::int64_t capacity_, dummy_slot_;
  std::map<std::pair<std::int64_t, std::int64_t>, Step> steps_;  ///< By batch and longest.
  const device::Graph* neighbour_ = nullptr;                     ///< All graphs share its memory.
};

}  // namespace heddle::rollout
