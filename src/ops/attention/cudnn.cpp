// cuDNN's fused attention where all sequences have one length, libtorch's FlashAttention-2
// elsewhere. At head dimension 256 on an H200 cuDNN takes 0.45 (forward) and 0.6 (backward) of the
// time of the other. The entry points go through the dispatcher, so this compiles without CUDA.
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>

#include <vector>

#include "ops/attention/kernels.h"

namespace heddle::ops::attention_cudnn {
namespace {

/// cuDNN makes a plan for every shape it meets, once, in about a fifth of a second: rows cut at a
/// maximal length and full packs meet few shapes if only multiples of this count.
constexpr std::int64_t kLengthMultiple = 256;

/// The one length of all sequences if cuDNN is to take them, else 0.
std::int64_t common_length(const Attention::Inputs& in) {
  const std::vector<std::int32_t>& cu = in.q_sequences.cu_seqlens_host;
  const std::int64_t count = in.q_sequences.count(), length = in.q_sequences.max_seqlen;
  if (count == 0 || length == 0 || length % kLengthMultiple != 0) return 0;
  if (in.q_sequences.total() != count * length || cu != in.k_sequences.cu_seqlens_host) return 0;
  return length;  // no sequence is longer than `length`, so all have it
}

/// [B*L,H,D] as [B,H,L,D] without a copy, whatever the token stride.
at::Tensor batched(const at::Tensor& x, std::int64_t length) {
  return x.unflatten(0, {x.size(0) / length, length}).transpose(1, 2);
}

at::Tensor packed(const at::Tensor& x) { return x.transpose(1, 2).flatten(0, 1); }

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  const std::int64_t length = common_length(in);
  if (length == 0) return attention_flash_varlen::forward(in, keep);
  auto [o, lse, cu_q, cu_k, max_q, max_k, seed, offset, debug] =
      at::_scaled_dot_product_cudnn_attention(
          batched(in.q, length), batched(in.k, length), batched(in.v, length),
          /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/keep, /*dropout_p=*/0.0,
          /*is_causal=*/true, /*return_debug_mask=*/false, attention_scale(in));
  Attention::Forward result;
  result.o = packed(o);
  if (keep) result.saved = {lse, seed, offset, cu_q, cu_k};
  return result;
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o) {
  const std::int64_t length = common_length(in);
  if (length == 0) return attention_flash_varlen::backward(in, saved, grad_o);
  auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      batched(grad_o, length), batched(in.q, length), batched(in.k, length), batched(in.v, length),
      batched(saved.o, length), saved.saved[0], saved.saved[1], saved.saved[2],
      /*attn_bias=*/at::Tensor(), saved.saved[3], saved.saved[4], length, length,
      /*dropout_p=*/0.0, /*is_causal=*/true, attention_scale(in));
  return {packed(dq), packed(dk), packed(dv)};
}

}  // namespace

void add(Registry& registry) {
  registry.add<Attention>({.op = "",
                           .name = "cuda.cudnn_or_flash_varlen",
                           .device = c10::DeviceType::CUDA,
                           .dtypes = {c10::ScalarType::BFloat16, c10::ScalarType::Half},
                           .is_reference = false,
                           .refuse = attention_flash_varlen::refuse,
                           .on_chip_bytes = {}},
                          {forward, backward, attention_reference::step});
}

}  // namespace heddle::ops::attention_cudnn
