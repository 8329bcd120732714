#pragma once

#include <ATen/core/Tensor.h>

namespace heddle::objective {

struct ValueLossResult {
  at::Tensor loss;      ///< [n]
  at::Tensor d_values;  ///< [n] derivatives of each token's loss by its value.
  at::Tensor clipped;  ///< [n] bool: the clipped term is the larger one, so that nothing is learnt.
};

/// Loss of a critic's values [n] of tokens: 1/2 max((V - R)^2, (clip(V, V_old +- clip) - R)^2), as
/// in PPO's published code (openai/baselines, ppo2); `clip` 0: 1/2 (V - R)^2. `old` [n]: the values
/// that advantages were computed with; `returns` [n]: R. Without gradients.
ValueLossResult value_loss(const at::Tensor& values, const at::Tensor& old,
                           const at::Tensor& returns, double clip);

}  // namespace heddle::objective
