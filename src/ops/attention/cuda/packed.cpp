// Joins the kernels of packed_backward.cu with ATen.
#include "ops/attention/cuda/packed.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/attention/cuda/packed_backward.h"
#include "ops/attention/kernels.h"
#include "ops/cuda/element.h"
#include "ops/cuda/tensor.h"

namespace heddle::ops::attention_cudnn {
namespace {

/// As the copy engine can read it: heads side by side, tokens on multiples of 16 bytes.
at::Tensor readable(const at::Tensor& x) {
  const bool fits = x.stride(2) == 1 && x.stride(1) == x.size(2) && x.stride(0) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return fits ? x : x.contiguous();
}

}  // namespace

bool packed_fits(const Attention::Inputs& in) {
  return in.q.scalar_type() == at::kBFloat16 && in.q.size(2) == cuda::kPackedBackwardDim &&
         in.q_sequences.cu_seqlens_host == in.k_sequences.cu_seqlens_host && cuda::has_sm90a();
}

bool packed_is_balanced(const Attention::Inputs& in) {
  const std::vector<std::int32_t>& ends = in.q_sequences.cu_seqlens_host;
  std::int64_t longest = 0, pairs = 0;
  for (std::size_t s = 0; s + 1 < ends.size(); ++s) {
    const std::int64_t tiles =
        (ends[s + 1] - ends[s] + cuda::kPackedBackwardRows - 1) / cuda::kPackedBackwardRows;
    longest = std::max(longest, tiles);
    pairs += tiles * (tiles + 1) / 2;
  }
  // A tenth more than an even share still costs less than what cuDNN's takes longer.
  return 10 * longest * cuda::multiprocessors() <= 11 * pairs * in.k.size(1);
}

Attention::Gradients packed_gradients(const Attention::Inputs& in, const Attention::Forward& saved,
                                      const at::Tensor& grad_o) {
  const cuda::OnDevice on(in.q);
  const at::Tensor q = in.q.contiguous(), dy = grad_o.contiguous(), k = readable(in.k),
                   v = readable(in.v);
  Attention::Gradients result = {at::empty(q.sizes(), q.options()),
                                 at::empty(k.sizes(), k.options()),
                                 at::empty(v.sizes(), v.options())};
  if (q.size(0) == 0) return result;
  const cuda::PackedBackwardShape shape = {
      q.size(0),   in.q_sequences.count(), q.size(1), k.size(1), k.stride(0),
      v.stride(0), attention_scale(in)};
  at::Tensor delta = at::empty({shape.delta_floats()}, q.options().dtype(at::kFloat)),
             work = at::empty({shape.work_ints()}, q.options().dtype(at::kInt));
  cuda::packed_backward(
      shape,
      {q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), saved.o.const_data_ptr(),
       dy.const_data_ptr(), saved.saved[0].const_data_ptr<float>(),
       in.q_sequences.cu_seqlens.const_data_ptr<std::int32_t>(), result.q.mutable_data_ptr(),
       result.k.mutable_data_ptr(), result.v.mutable_data_ptr(), delta.mutable_data_ptr<float>(),
       work.mutable_data_ptr<std::int32_t>()},
      on.stream());
  return result;
}

}  // namespace heddle::ops::attention_cudnn
