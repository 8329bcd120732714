#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nn/expert_weights.h"
#include "nn/linear.h"
#include "nn/parameter.h"
#include "ops/linear/dropout.h"
#include "ops/moe/moe.h"

namespace heddle::nn {

/// Dropout of a low-rank change's input while training.
struct LowRankDropout {
  double probability = 0;
  std::uint64_t key = 0;  ///< Key of its masks, see ops::DropoutMask.
};

/// A low-rank change of a linear layer: y = x W^T + scaling (drop(x) A^T) B^T. A [rank,in],
/// B [out,rank].
class LowRank {
 public:
  /// `module` is the name of the layer without ".weight"; A and B are divided as its weight.
  LowRank(const std::string& module, std::int64_t in_features, std::int64_t out_features,
          double scaling, std::int64_t rank, LowRankDropout dropout,
          const Placement& weight_placement);

  Parameter& a() { return a_; }
  Parameter& b() { return b_; }
  const Parameter& a() const { return a_; }
  const Parameter& b() const { return b_; }
  std::int64_t rank() const { return a_.global_shape()[0]; }
  double scaling() const { return scaling_; }
  /// Mask of its input x [T,in] under draws [T]; nothing if there are none.
  std::optional<ops::DropoutMask> mask_of(const at::Tensor& x, const at::Tensor& draws);

 private:
  Parameter a_, b_;
  double scaling_;
  LowRankDropout dropout_;
  at::Tensor features_;            ///< [in] of this rank, their numbers in the whole input.
  bool features_in_runs_ = false;  ///< See ops::DropoutMask.
};

/// The factors that the experts of a layer have.
enum class ExpertFactors {
  kPairs,        ///< A pair each.
  kSharedOuter,  ///< One for all on the side of the hidden states, the other one each.
};

/// A low-rank change of one matrix of every routed expert of a layer, W_e + scaling B_e A_e. A
/// [E,rank,in], B [E,out,rank], with 1 for E where they share the factor. Without dropout, which
/// PEFT has not either.
class LowRankExperts {
 public:
  /// `parameter` is the name of the weights.
  LowRankExperts(const std::string& parameter, ExpertWeights& weights, double scaling,
                 std::int64_t rank, ExpertFactors factors);

  Parameter& a() { return a_; }
  Parameter& b() { return b_; }
  const Parameter& a() const { return a_; }
  const Parameter& b() const { return b_; }
  std::int64_t rank() const { return a_.global_shape()[1]; }
  double scaling() const { return scaling_; }
  ExpertFactors factors() const { return factors_; }
  /// Their number in the layer, on all ranks.
  std::int64_t experts() const { return experts_; }
  // The factors of the expert that is `e` on this rank, [rank,in] and [out,rank], without history.
  at::Tensor a_of(std::int64_t e) const;
  at::Tensor b_of(std::int64_t e) const;
  /// The change of the matrices, differentiable in A and B.
  ops::ExpertLowRank change() const;

 private:
  Parameter a_, b_;
  double scaling_;
  std::int64_t experts_;
  ExpertFactors factors_;
};

/// A linear layer with its change, null if it has none.
struct ChangedLinear {
  LowRank* change;
  Parameter* weight;
  std::optional<ops::DropoutMask> mask;  ///< Elements of the input that the change does not see.
};

/// The outputs of layers that share their input, of which one at least has a change: the input is
/// read once for all A, and each change is a second term of its layer's product. The graph holds
/// the parameters by handle; their gradients are accumulated by the products themselves.
std::vector<at::Tensor> changed_linears(const ops::KernelTable& kernels, const LinearInput& x,
                                        const std::vector<ChangedLinear>& layers);

}  // namespace heddle::nn
