// cuDNN's fused attention: libtorch's call of it where all sequences have one length, whose
// backward takes 0.86 of the time of the ragged one; libtorch's FlashAttention-2 where neither
// fits. At head dimension 256 on an H200 cuDNN takes 0.45 (forward) and 0.7 (backward) of the time
// of the other.
#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>

#include <vector>

#include "ops/attention/cuda/ragged.h"
#include "ops/attention/kernels.h"

namespace heddle::ops::attention_cudnn {
namespace {

/// libtorch makes a plan for every shape it meets, once, in about a fifth of a second: rows cut at
/// a maximal length and full packs meet few shapes if only multiples of this count.
constexpr std::int64_t kLengthMultiple = 256;

enum class Path { kOneLength, kRagged, kFlash };

Path path_of(const Attention::Inputs& in) {
  const std::int64_t count = in.q_sequences.count(), length = in.q_sequences.max_seqlen;
  // libtorch's call of cuDNN adds the gradients of q in any order; the others can be told not to.
  if (at::globalContext().deterministicAlgorithms())
    return ragged_fits(in) ? Path::kRagged : Path::kFlash;
  // No sequence is longer than `length`: if they fill the tokens, all have it.
  if (length > 0 && length % kLengthMultiple == 0 && in.q_sequences.total() == count * length &&
      in.q_sequences.cu_seqlens_host == in.k_sequences.cu_seqlens_host)
    return Path::kOneLength;
  return ragged_fits(in) ? Path::kRagged : Path::kFlash;
}

/// [B*L,H,D] as [B,H,L,D] without a copy, whatever the token stride.
at::Tensor batched(const at::Tensor& x, std::int64_t length) {
  return x.unflatten(0, {x.size(0) / length, length}).transpose(1, 2);
}

at::Tensor packed(const at::Tensor& x) { return x.transpose(1, 2).flatten(0, 1); }

Attention::Forward one_length_forward(const Attention::Inputs& in, bool keep) {
  const std::int64_t length = in.q_sequences.max_seqlen;
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

Attention::Gradients one_length_backward(const Attention::Inputs& in,
                                         const Attention::Forward& saved,
                                         const at::Tensor& grad_o) {
  const std::int64_t length = in.q_sequences.max_seqlen;
  const std::vector<at::Tensor>& kept = saved.saved;
  auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      batched(grad_o, length), batched(in.q, length), batched(in.k, length), batched(in.v, length),
      batched(saved.o, length), kept[0], kept[1], kept[2], /*attn_bias=*/at::Tensor(), kept[3],
      kept[4], length, length, /*dropout_p=*/0.0, /*is_causal=*/true, attention_scale(in));
  return {packed(dq), packed(dk), packed(dv)};
}

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  switch (path_of(in)) {
    case Path::kOneLength:
      return one_length_forward(in, keep);
    case Path::kRagged:
      return ragged_forward(in, keep);
    case Path::kFlash:
      break;
  }
  return attention_flash_varlen::forward(in, keep);
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o) {
  switch (path_of(in)) {
    case Path::kOneLength:
      return one_length_backward(in, saved, grad_o);
    case Path::kRagged:
      return ragged_backward(in, saved, grad_o);
    case Path::kFlash:
      break;
  }
  return attention_flash_varlen::backward(in, saved, grad_o);
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
