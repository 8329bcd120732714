#pragma once

#include <cstdint>

#include "ops/moe/moe.h"

namespace heddle::ops {

/// The form in which the weights of frozen experts are kept: moe_experts multiplies it in place of
/// the weights, whose memory is then free.
struct FrozenExperts {
  static constexpr const char* kName = "frozen_experts";
  using Dims = MoeExperts::Dims;
  struct Functions {
    /// Lays the form beside a weight [E,out,in], which has memory. Null: the weight itself is kept.
    void (*lay)(const at::Tensor& weight);
  };
};

/// Experts in e4m3, about scales * values.
struct EightBitExperts {
  at::Tensor values;  ///< [E,out,in]
  at::Tensor scales;  ///< [E] fp32
};

/// Lays them beside a weight; they go where it is detached, and live as long as it does.
void lay_experts_beside(const at::Tensor& weight, EightBitExperts experts);
/// The experts that lie beside a weight; null: none.
const EightBitExperts* experts_beside(const at::Tensor& weight);
/// Bytes of what lies beside it.
std::int64_t bytes_beside(const at::Tensor& weight);

}  // namespace heddle::ops
