#include "objective/value_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ops/autograd.h"

namespace heddle::objective {

ValueLossResult value_loss(const at::Tensor& values, const at::Tensor& old,
                           const at::Tensor& returns, double clip) {
  const ops::NoGradient guard;
  const at::Tensor error = values - returns;
  if (clip == 0) return {0.5 * error * error, error, at::zeros_like(error, at::kBool)};
  // Bounds of the value itself: old + (V - old) is rounded, and V within them would count as
  // clipped.
  const at::Tensor bounded = at::minimum(at::maximum(values, old - clip), old + clip) - returns;
  const at::Tensor free_loss = error * error, bounded_loss = bounded * bounded;
  // Within the bounds the two are equal; beyond them the clipped term does not change with V.
  const at::Tensor clipped = bounded_loss > free_loss;
  return {0.5 * at::maximum(free_loss, bounded_loss),
          at::where(clipped, at::zeros_like(error), error), clipped};
}

}  // namespace heddle::objective
