#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/group.h"
#include "comm/mesh.h"
#include "nn/parameter.h"
#include "parallel/summing.h"

namespace heddle::parallel {

/// Data parallelism of every kind over the parameters of one rank. Each parameter's rows (dimension
/// 0) are divided into equal runs over shard ranks x replicas: fsdp x cp and dp, or for experts
/// efsdp and edp, or for row tables (embedding and head) tp x cp x fsdp and dp. This rank owns one
/// run: it loads, updates and saves it, with its optimizer state, and nobody else does (ZeRO-1 over
/// the replicas, FSDP over the shard ranks).
///
///     one shard rank  values stay whole; gradients are reduce-scattered over the replicas, new
///                     rows gathered
///     otherwise       values exist while their unit runs: gathered over the shard ranks by
///                     acquire(), let go by release(); gradients reduce-scattered over the shard
///                     ranks, then the replicas
///
/// A unit is a block with its adapters, or what stands before or after the blocks. Its large
/// parameters are gathered into the memory where they are used and summed out of that of their
/// gradients, the small ones share a buffer; a gather is one collective per dtype all the same.
/// Whole gradients exist from their unit's backward, or the first of several that add to them,
/// until their sum is there: the sums of a few units are on their way at once.
/// "ZeRO" (arXiv 1910.02054), "FSDP" (arXiv 2304.11277).
class Sharding {
 public:
  /// Units whose gradients are on their way, and whole, at once: one for each of the two sums, and
  /// one that hides them.
  static constexpr std::size_t kUnitsUnderWay = 3;

  /// Shards over the ranks of the mesh; made only if there are several. Collective calls come in
  /// equal order on all of them.
  explicit Sharding(const comm::Mesh& mesh, Summing summing = Summing::kStep);
  ~Sharding();
  Sharding(const Sharding&) = delete;
  Sharding& operator=(const Sharding&) = delete;

  struct Member {
    nn::Parameter* parameter;
    c10::ScalarType dtype;
  };
  /// Divides parameters without memory and gives them to the unit `unit` (0, 1, ...); a unit may
  /// get several such lists. Their owned rows are uninitialised until they are loaded.
  void add(std::size_t unit, const std::vector<Member>& members, c10::Device device);
  /// A parameter that the first and the last pipeline stage both hold: their gradients are summed.
  void tie_over_stages(nn::Parameter& parameter);
  /// After owned rows were written, of what is trained or of all: lets the other replicas have
  /// them.
  void publish(bool with_frozen = false);
  /// After it is known what is trained, and the first publish(): frozen values are the same on all
  /// replicas from now on. Those that stay whole need no owned rows besides.
  void freeze_untrained();

  /// Starts the gather of a unit; acquire() then waits for less.
  void prefetch(std::size_t unit);
  /// Gives the unit's values their memory. Nothing to do if they have it.
  void acquire(std::size_t unit);
  bool is_acquired(std::size_t unit) const;
  /// Lets the unit's values go, unless an Acquired holds them.
  void release(std::size_t unit);
  /// After a micro-batch's backward of the unit, the last of the step or another one: starts the
  /// sum of its gradients over the data ranks if it is time, and then has taken them.
  void reduce(std::size_t unit, bool is_last = true);
  /// After this, gradient() of every reduced parameter is the sum over the step, of its owned rows.
  void finish_reduction();

 private:
  friend class Acquired;
  void hold(std::size_t unit, bool holds);

  /// The ranks over which a kind of parameter is divided.
  struct Division {
    comm::Group shard, replica;

    std::int64_t ranks() const { return shard.size() * replica.size(); }
    /// Position of this rank's run.
    std::int64_t place() const { return shard.rank() * replica.size() + replica.rank(); }
    /// Values exist while their unit runs.
    bool is_gathered() const { return shard.size() > 1; }
  };
  struct RunBuffer;
  struct Unit;
  struct Sum;
  struct Reduction;
  using UnderWay = std::vector<Reduction>;

  enum class Kind { kDense, kExpert, kRowTable };
  Kind kind_of(const nn::Parameter& parameter) const;
  const Division& division_of(Kind kind) const;
  static void make_owned(RunBuffer& buffer, const at::TensorOptions& options);
  static void gather_into_values(RunBuffer& buffer, const at::Tensor& runs);
  void start_publishing(Unit& unit, bool with_frozen);
  static void finish_publishing(Unit& unit);
  static void sum_over_replicas(Reduction& reduction);
  void take_sums(Reduction& reduction);
  static Sum sum_of(const Division& over, std::vector<nn::Parameter*> parameters);
  void sum_partial_gradients(const std::vector<nn::Parameter*>& parameters) const;
  std::pair<std::int64_t, std::int64_t> part_of(const nn::Parameter& parameter) const;
  at::Tensor among_parts(const at::Tensor& gradient, const nn::Parameter& parameter) const;

  comm::Group tensor_group_;  ///< tp
  comm::Group end_stages_;    ///< The first and the last along pp, of which this rank may be one.
  nn::Parameter* tied_ = nullptr;
  Division dense_;       ///< fsdp x cp and dp
  Division experts_;     ///< efsdp and edp
  Division row_tables_;  ///< tp x cp x fsdp and dp, if there is a tp
  std::vector<Unit> units_;
  Summing summing_;
  std::deque<UnderWay> reductions_;  ///< One for each call of reduce(), the oldest first.
  /// Sums of this step, in the order of their first arrival.
  std::vector<std::pair<nn::Parameter*, at::Tensor>> sums_;
  std::unordered_map<const nn::Parameter*, std::size_t> place_in_sums_;
};

/// Acquires units for its life, in which nobody else's release() lets them go; without a sharding
/// there is nothing to do. Units that are acquired already are left to whoever did that.
class Acquired {
 public:
  Acquired(Sharding* sharding, std::vector<std::size_t> units) : sharding_(sharding) {
    if (sharding_ == nullptr) return;
    for (const std::size_t unit : units) {
      if (sharding_->is_acquired(unit)) continue;
      sharding_->acquire(unit);
      sharding_->hold(unit, true);
      units_.push_back(unit);
    }
  }
  ~Acquired() {
    if (sharding_ == nullptr) return;
    for (const std::size_t unit : units_) {
      sharding_->hold(unit, false);
      sharding_->release(unit);
    }
  }
  Acquired(const Acquired&) = delete;
  Acquired& operator=(const Acquired&) = delete;

 private:
  Sharding* sharding_;
  std::vector<std::size_t> units_;
};

}  // namespace heddle::parallel
