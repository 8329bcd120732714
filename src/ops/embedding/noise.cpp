#include "ops/embedding/noise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include "ops/autograd.h"
#include "ops/linear/random_bits.h"

namespace heddle::ops {

at::Tensor embedding_noise(std::uint64_t key, const at::Tensor& draws, const at::Tensor& scales,
                           std::int64_t hidden_size, c10::ScalarType dtype) {
  const NoGradient guard;
  TORCH_CHECK(draws.sizes() == scales.sizes(), "embedding_noise: ", draws.numel(), " draws and ",
              scales.numel(), " scales");
  at::Tensor noise = at::empty({draws.numel(), hidden_size}, scales.options().dtype(dtype));
  const at::Tensor wide = scales.to(dtype == at::kDouble ? at::kDouble : at::kFloat).unsqueeze(1);
  for_each_random_bits(
      key, draws, at::arange(hidden_size, draws.options()),
      [&](std::int64_t first, const at::Tensor& bits) {
        // The middles of 2^16 steps, so that the mean is 0.
        const at::Tensor unit = bits.to(wide.scalar_type()).add_(0.5).mul_(0x1p-15).sub_(1);
        noise.narrow(0, first, bits.size(0)).copy_(unit * wide.narrow(0, first, bits.size(0)));
      });
  return noise;
}

}  // namespace heddle::ops
