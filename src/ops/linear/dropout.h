#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Random numbers for masks, from tokens [T] int64 (data::Batch::token_numbers) and the step, from
/// 1: other numbers for every pair. On the device of `tokens`.
at::Tensor dropout_draws(const at::Tensor& tokens, std::uint64_t step);

/// Choice of the dropped elements of a [T,k] input: a function of key, draw and feature alone, so
/// that it depends on neither layout nor device. 64 random bits serve four features: those of
/// feature f are bits 16 (f mod 4) and up of splitmix64 of key, draw and f / 4. What changes from
/// step to step lies on the device, so that a recorded step can be replayed.
struct DropoutMask {
  std::uint64_t key = 0;
  at::Tensor draws;        ///< [T] int64, see dropout_draws.
  at::Tensor features;     ///< [k] int64, their numbers, from 0.
  double probability = 0;  ///< Probability of dropping an element, rounded to a multiple of 2^-16.
  /// The features come in runs of 8 consecutive ones from multiples of 8.
  bool in_runs = false;

  /// Bound of 16 bits: below it an element is dropped.
  std::int64_t threshold() const;
  /// Factor of the others.
  double kept() const { return 65536 / static_cast<double>(65536 - threshold()); }
};

/// [T,k] of 0, where an element is dropped, and kept().
at::Tensor dropout_factors(const DropoutMask& mask, c10::ScalarType dtype);

/// Low-rank changes of layers that share an input, each of which sees its own elements of it.
struct DroppedFactors {
  at::Tensor a;                     ///< [sum of r,k]: the factors in front, one below the other
  std::vector<std::int64_t> ranks;  ///< Rank of each.
  std::vector<DropoutMask> masks;
};

}  // namespace heddle::ops
