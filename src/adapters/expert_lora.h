#pragma once

#include <cstdint>
#include <string>

#include "nn/low_rank.h"

namespace heddle::adapters {

/// The adapter of one matrix of every routed expert of a layer: what PEFT calls target_parameters.
class ExpertLora : public nn::LowRankExperts {
 public:
  /// `parameter` is the name of the weights, for example "model.layers.0.mlp.experts.gate_up_proj".
  ExpertLora(std::string parameter, nn::ExpertWeights& weights, double scaling, std::int64_t rank,
             std::uint64_t seed, nn::ExpertFactors factors = nn::ExpertFactors::kPairs);

  const std::string& parameter() const { return parameter_; }
  /// A uniform in +-1/sqrt(in), B zero, as in Lora; keyed by seed, name and index.
  void initialize();
  /// scaling B_e A_e, [out,in], in at least fp32: what merging adds to the matrix of expert e.
  at::Tensor delta(std::int64_t e) const;

  /// The whole of A and B as PEFT stores them: A [E * rank, in] with the expert outer, B [out, rank
  /// * E] with the expert inner. PEFT knows no shared factors: they are repeated, on the host.
  at::Tensor peft_a(const at::Tensor& whole) const;
  at::Tensor peft_b(const at::Tensor& whole) const;
  /// PEFT's form but for a factor that the experts share, which is there once: A [rank, in], B
  /// [out, rank].
  at::Tensor compact_a(const at::Tensor& whole) const;
  at::Tensor compact_b(const at::Tensor& whole) const;
  /// The reverse of both forms. Throws ModelError that names the shapes if they do not fit, and
  /// where experts that are to share a factor have different ones.
  void set_from_peft(const at::Tensor& stored_a, const at::Tensor& stored_b);
  /// Takes A [E,rank,in] and B [E,out,rank], and throws as set_from_peft does.
  void set(const at::Tensor& whole_a, const at::Tensor& whole_b);

 private:
  /// The rows that `factor` has of one with an entry for each expert: all, or the first.
  at::Tensor as_shared(const at::Tensor& by_expert, const nn::Parameter& factor) const;

  std::string parameter_;
  std::uint64_t seed_;
};

}  // namespace heddle::adapters
