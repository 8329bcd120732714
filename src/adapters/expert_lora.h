#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "nn/expert_weights.h"

namespace heddle::adapters {

/// LoRA on one matrix of every routed expert of a layer, W_e + scaling B_e A_e: what PEFT calls
/// target_parameters. A [E,rank,in], B [E,out,rank]. Without dropout, which PEFT has not either.
class ExpertLora : public nn::ExpertAdapter {
 public:
  /// `parameter` is the name of the weights, for example "model.layers.0.mlp.experts.gate_up_proj".
  ExpertLora(std::string parameter, nn::ExpertWeights& weights, double scaling, std::int64_t rank,
             std::uint64_t seed);

  ops::ExpertLowRank change() override;
  void visit_parameters(const std::function<void(nn::Parameter&)>& visit) override;

  const std::string& parameter() const { return parameter_; }
  std::int64_t rank() const { return a_.global_shape()[1]; }
  double scaling() const { return scaling_; }
  /// A uniform in +-1/sqrt(in), B zero, as in Lora; keyed by seed, name and index.
  void initialize();
  /// scaling B_e A_e, [out,in], in at least fp32: what merging adds to the matrix of expert e.
  at::Tensor delta(std::int64_t e) const;

  nn::Parameter& a() { return a_; }
  nn::Parameter& b() { return b_; }
  /// The whole of A and B as PEFT stores them: A [E * rank, in] with the expert outer, B [out, rank
  /// * E] with the expert inner.
  at::Tensor peft_a(const at::Tensor& whole) const;
  at::Tensor peft_b(const at::Tensor& whole) const;
  /// The reverse. Throws ModelError that names both shapes if they do not fit.
  void set_from_peft(const at::Tensor& a, const at::Tensor& b);

 private:
  std::string parameter_;
  nn::Parameter a_, b_;
  double scaling_;
  std::uint64_t seed_;
};

}  // namespace heddle::adapters
