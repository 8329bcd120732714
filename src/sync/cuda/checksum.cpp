// Joins the kernel of the checksum with ATen.
#include "sync/checksum.h"

#include <ATen/ops/full.h>

#include "base/splitmix.h"
#include "ops/cuda/tensor.h"
#include "ops/splitmix.h"
#include "sync/cuda/checksum_kernel.h"

namespace heddle::sync {

at::Tensor cuda_checksum(const at::Tensor& words, std::uint64_t seed) {
  const ops::cuda::OnDevice on(words);
  const auto* const first =
      reinterpret_cast<const std::uint64_t*>(words.const_data_ptr<std::int64_t>());
  TORCH_CHECK(reinterpret_cast<std::uintptr_t>(first) % 16 == 0,
              "checksum: the words must begin at a multiple of 16 bytes");
  at::Tensor sum =
      at::full({}, ops::splitmix::number(splitmix::bits(seed, words.nbytes())), words.options());
  cuda::add_checksum(first, words.numel(),
                     reinterpret_cast<std::uint64_t*>(sum.mutable_data_ptr<std::int64_t>()),
                     on.stream());
  return sum;
}

}  // namespace heddle::sync
