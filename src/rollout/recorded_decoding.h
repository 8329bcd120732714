#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Event.h>

#include "assembly/model_on_ranks.h"
#include "device/graph.h"
#include "nn/adapters.h"
#include "rollout/adapter_tables.h"
#include "rollout/cache_pool.h"
#include "rollout/experts.h"
#include "rollout/sampler.h"

namespace heddle::rollout {

/// Steps that continue sequences by one token each, from the token to the drawn one, recorded as
/// graphs of the device and replayed: a small model's step is hundreds of launches that the device
/// finishes faster than the host queues them. One graph for each bucket of batch sizes and lengths,
/// whose inputs lie at fixed addresses, those of adapters too: it serves rows of any sets up to a
/// rank. Rows that fill a bucket up work on a dummy slot.
class RecordedDecoding {
 public:
  /// One sequence.
  struct Row {
    std::int64_t token = 0;                     ///< Not yet in the cache.
    const Holding* held = nullptr;              ///< With room for it.
    std::shared_ptr<const nn::AdapterSet> set;  ///< Null: the base model.
  };

  /// Why the model's steps are queued launch by launch; empty: they can be recorded. With
  /// `gathers` a rank has whole weights while it generates, see EngineOptions::gather_weights.
  static std::string why_not(const assembly::ModelOnRanks& placed, bool gathers);

  /// `placed` and `pool` outlive it. `batches`: see CacheOptions::graph_batches.
  RecordedDecoding(assembly::ModelOnRanks& placed, CachePool& pool, std::int64_t capacity,
                   std::vector<std::int64_t> batches = {});
  ~RecordedDecoding();

  /// A step of so many rows has a graph.
  bool takes(std::int64_t rows) const { return batches_.empty() || rows <= batches_.back(); }
  /// Rows of these sets can share a step.
  bool can_mix(const AdapterTables::Sets& sets) const;
  /// Queues a step: the next token of each sequence, by its draw, all with one set of adapters or
  /// none unless they can mix; the caches are continued. At least one row; after the tokens of all
  /// steps before were read. With `tells_experts` it tells what routers choose for the tokens that
  /// it reads.
  void start(const std::vector<Row>& rows, const std::vector<Draw>& draws, bool tells_experts);
  /// Sequences of so many tokens that a step continues can be continued by start_next() after it.
  bool can_go_on(std::int64_t tokens) const;
  /// Queues the step after the one that was started last, for its sequences, which have room for
  /// the token that it draws; `rows` are as they will be then, their tokens unknown. All of its
  /// draws are plain.
  void start_next(const std::vector<Row>& rows);
  struct Told {
    std::vector<SampledToken> tokens;
    OwnExperts experts;  ///< On the host, with rows that fill up; empty unless they were asked for.
  };
  /// Results of the earliest step that was started and not read; waits for it, not for later ones.
  Told read();
  /// After the caches have moved; all steps were read.
  void forget();
  /// After parameters may have moved; all steps were read.
  void forget_if_moved();

 private:
  /// The numbers of the rows, on the host.
  struct Numbers {
    at::Tensor whole;  ///< [7,batch] int64: those of DrawTables, then length, token, slot, and 1
                       ///< for a sequence, 0 for a row that fills up.
    at::Tensor real;   ///< [3,batch] float64
  };

  struct Step {
    at::Tensor whole, real;  ///< Numbers, on the device.
    at::Tensor temperature;  ///< [batch] float32, of `real`.
    /// Contents of `whole` and `real`. Where tokens are drawn in the graph, it goes on to the next
    /// step's itself, so that nothing is brought there while the same sequences continue.
    Numbers known;
    at::Tensor pages;  ///< [batch,pages of the longest] int32
    at::Tensor pages_host;
    ops::Sequences sequences;
    std::weak_ptr<const nn::AdapterSet> set;  ///< To tell a new one at the address of an old one.
    at::Tensor runs, known_runs;              ///< See AdapterTables; the second on the host.
    at::Tensor logits;                        ///< [batch,V] of the last run.
    at::Tensor told;                          ///< See ops::SampleTokens::Next, of plain draws.
    OwnExperts experts;                       ///< Chosen in the last run.
    std::unique_ptr<device::Graph> graph;
    at::Tensor exchange;  ///< Memory of ops::decode_step; undefined: the layers run one by one.
  };

  struct Key {
    std::int64_t batch, longest;
    const nn::AdapterSet* set;  ///< All rows'; null where they have none, or tables say which.
    std::int64_t rank;          ///< Widest of sets in tables; 0: there are none.
    std::int64_t runs;          ///< Runs of such rows, see AdapterTables.
    bool draws;                 ///< Tokens are drawn in the graph.
    bool experts;               ///< Chosen experts are told.
    auto operator<=>(const Key&) const = default;
  };

  /// A step whose tokens were not read.
  struct Started {
    Key key;
    Step* step;
    std::int64_t count;                   ///< Sequences.
    std::vector<Draw> draws;              ///< Unless they are plain.
    std::vector<std::int64_t> positions;  ///< Where plain draws stand in their outputs.
    OwnExperts experts;                   ///< On their way to the host.
    c10::Event done;                      ///< All that it tells is there.
  };

  /// Adapters of the step's rows, if they have any in tables.
  std::optional<nn::RowAdapters> adapters_of(const Step& step, const Key& key) const;
  Step make_step(const Key& key, const std::shared_ptr<const nn::AdapterSet>& set) const;
  void run(Step& step, const Key& key) const;
  /// Logits of the step's tokens, by the layers one after another.
  at::Tensor run_layers(Step& step, const Key& key, const ops::CacheRows& rows) const;
  Numbers numbers_of(const std::vector<Row>& rows, const std::vector<Draw>& draws,
                     std::int64_t batch) const;
  /// Brings the rows' pages to where the graph reads them.
  void fill_pages(Step& step, const std::vector<Row>& rows) const;
  /// Queues a step whose inputs are there; `draws` unless they are plain.
  void queue(Step& step, const Key& key, std::int64_t count, std::vector<Draw> draws, bool is_new);
  /// The graph that the rows need, but for their runs; sets get slots.
  Key key_of(const std::vector<Row>& rows, const AdapterTables::Sets& sets, bool plain);
  void forget_steps();
  /// Of all parameters' addresses.
  std::uint64_t fingerprint() const;

  assembly::ModelOnRanks& placed_;
  CachePool& pool_;
  std::int64_t capacity_;
  std::vector<std::int64_t> batches_;
  std::pair<at::Tensor, at::Tensor> rotary_;  ///< See nn::CachedSequences.
  std::optional<AdapterTables> tables_;       ///< Unless the kernels read none.
  std::map<Key, Step> steps_;
  std::deque<Started> started_;
  const device::Graph* neighbour_ = nullptr;  ///< All graphs share its memory.
  std::uint64_t fingerprint_ = 0;
};

}  // namespace heddle::rollout
