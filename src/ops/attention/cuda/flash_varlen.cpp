// libtorch's FlashAttention-2 for packed sequences. The entry points go through the dispatcher, so
// this compiles without CUDA; the registry offers the kernel on CUDA devices only.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <fmt/format.h>

#include <optional>
#include <string>

#include "ops/attention/kernels.h"

namespace heddle::ops::attention_flash_varlen {

std::optional<std::string> refuse(const Attention::Dims& dims) {
  if (dims.head_dim > 256 || dims.head_dim % 8 != 0)
    return fmt::format("head_dim {} is not a multiple of 8 up to 256", dims.head_dim);
  return std::nullopt;
}

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  TORCH_CHECK(in.q.is_cuda(), "cuda.flash_varlen: q is on ", in.q.device());
  auto [o, lse, rng_state, unused, debug] = at::_flash_attention_forward(
      in.q, in.k, in.v, in.q_sequences.cu_seqlens, in.k_sequences.cu_seqlens,
      in.q_sequences.max_seqlen, in.k_sequences.max_seqlen, /*dropout_p=*/0.0, /*is_causal=*/true,
      /*return_debug_mask=*/false, attention_scale(in));
  Attention::Forward result;
  result.o = o;
  if (keep) result.saved = {lse, rng_state, unused};
  return result;
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o) {
  auto [dq, dk, dv] = at::_flash_attention_backward(
      grad_o.contiguous(), in.q, in.k, in.v, saved.o, saved.saved[0], in.q_sequences.cu_seqlens,
      in.k_sequences.cu_seqlens, in.q_sequences.max_seqlen, in.k_sequences.max_seqlen,
      /*dropout_p=*/0.0, /*is_causal=*/true, saved.saved[1], saved.saved[2], attention_scale(in));
  return {dq, dk, dv};
}

void add(Registry& registry) {
  registry.add<Attention>(
      KernelInfo::cuda("cuda.flash_varlen", {c10::ScalarType::BFloat16, c10::ScalarType::Half}),
      {forward, backward}, {.refuse = refuse});
}

}  // namespace heddle::ops::attention_flash_varlen
