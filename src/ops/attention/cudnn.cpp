// cuDNN's fused attention where all sequences have one length, or a few have round ones;
// libtorch's FlashAttention-2 elsewhere. At head dimension 256 on an H200 cuDNN takes 0.45
// (forward) and 0.6 (backward) of the time of the other. The entry points go through the
// dispatcher, so this compiles without CUDA.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logaddexp.h>

#include <vector>

#include "ops/attention/kernels.h"

namespace heddle::ops::attention_cudnn {
namespace {

/// cuDNN makes a plan for every shape it meets, once, in about a fifth of a second: rows cut at a
/// maximal length and full packs meet few shapes if only multiples of this count.
constexpr std::int64_t kLengthMultiple = 256;
/// Sequences of different lengths are launched one by one.
constexpr std::int64_t kFewSequences = 8;

/// Queries that see the same keys: all of them, or causally as many as there are queries.
struct Piece {
  std::int64_t first_query, queries, first_key, keys;
  bool is_causal;
};

/// The pieces of one sequence, which divide its keys: those that every query sees, and the last.
struct Plan {
  std::int64_t common_length = 0;             ///< All sequences in one launch, or
  std::vector<std::vector<Piece>> sequences;  ///< the pieces of each; else not cuDNN's.
};

std::int64_t common_length(const Attention::Inputs& in) {
  const std::int64_t count = in.q_sequences.count(), length = in.q_sequences.max_seqlen;
  if (count == 0 || length == 0 || length % kLengthMultiple != 0) return 0;
  if (in.q_sequences.total() != count * length ||
      in.q_sequences.cu_seqlens_host != in.k_sequences.cu_seqlens_host)
    return 0;
  return length;  // no sequence is longer than `length`, so all have it
}

Plan plan_of(const Attention::Inputs& in) {
  Plan plan;
  plan.common_length = common_length(in);
  const std::int64_t count = in.q_sequences.count();
  if (plan.common_length > 0 || count > kFewSequences) return plan;
  const std::vector<std::int32_t>&cu_q = in.q_sequences.cu_seqlens_host,
        &cu_k = in.k_sequences.cu_seqlens_host;
  for (std::size_t s = 0; s < static_cast<std::size_t>(count); ++s) {
    const std::int64_t n = cu_q[s + 1] - cu_q[s], m = cu_k[s + 1] - cu_k[s];
    if (n == 0 || n > m || n % kLengthMultiple != 0 || m % kLengthMultiple != 0) return {};
    std::vector<Piece> pieces = {{cu_q[s], n, cu_k[s] + m - n, n, /*is_causal=*/true}};
    if (m > n) pieces.push_back({cu_q[s], n, cu_k[s], m - n, /*is_causal=*/false});
    plan.sequences.push_back(std::move(pieces));
  }
  return plan;
}

/// [B*L,H,D] as [B,H,L,D] without a copy, whatever the token stride.
at::Tensor batched(const at::Tensor& x, std::int64_t length) {
  return x.unflatten(0, {x.size(0) / length, length}).transpose(1, 2);
}

at::Tensor packed(const at::Tensor& x) { return x.transpose(1, 2).flatten(0, 1); }

/// Output [n,H,D] of a launch, its log-sum-exp [B,H,L,1], and what the backward wants besides.
struct Launch {
  at::Tensor o, lse;
  std::vector<at::Tensor> random;  ///< seed, offset, and two that are not used
};

Launch launch(const Attention::Inputs& in, const at::Tensor& q, const at::Tensor& k,
              const at::Tensor& v, bool is_causal, bool keep) {
  auto [o, lse, cu_q, cu_k, max_q, max_k, seed, offset, debug] =
      at::_scaled_dot_product_cudnn_attention(
          q, k, v, /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/keep, /*dropout_p=*/0.0,
          is_causal, /*return_debug_mask=*/false, attention_scale(in));
  return {packed(o), lse, {seed, offset, cu_q, cu_k}};
}

Attention::Gradients launch_backward(const Attention::Inputs& in, const at::Tensor& grad_o,
                                     const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& o, const at::Tensor& lse,
                                     const std::vector<at::Tensor>& random, bool is_causal) {
  auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      grad_o, q, k, v, o, lse, random[0], random[1], /*attn_bias=*/at::Tensor(), random[2],
      random[3], q.size(2), k.size(2), /*dropout_p=*/0.0, is_causal, attention_scale(in));
  return {packed(dq), packed(dk), packed(dv)};
}

at::Tensor queries(const at::Tensor& x, const Piece& piece) {
  return batched(x.narrow(0, piece.first_query, piece.queries), piece.queries);
}
at::Tensor keys(const at::Tensor& x, const Piece& piece) {
  return batched(x.narrow(0, piece.first_key, piece.keys), piece.keys);
}

/// exp(lse - all) [1,H,n,1] as a factor of rows [n,H,D].
at::Tensor share(const at::Tensor& lse, const at::Tensor& all) {
  return at::exp(lse - all).squeeze(0).transpose(0, 1);
}

/// Softmax over the keys of all pieces from the softmax over each: outputs weighted by the pieces'
/// shares of the sum.
Attention::Forward forward_by_sequence(const Attention::Inputs& in, const Plan& plan, bool keep) {
  Attention::Forward result;
  result.o = at::empty(in.q.sizes(), in.q.options());
  for (const std::vector<Piece>& pieces : plan.sequences) {
    std::vector<Launch> parts;
    for (const Piece& piece : pieces) {
      parts.push_back(launch(in, queries(in.q, piece), keys(in.k, piece), keys(in.v, piece),
                             piece.is_causal, keep || pieces.size() > 1));
    }
    at::Tensor o = parts[0].o, lse = parts[0].lse;
    if (parts.size() > 1) {
      lse = at::logaddexp(parts[0].lse, parts[1].lse);
      o = parts[0].o * share(parts[0].lse, lse) + parts[1].o * share(parts[1].lse, lse);
    }
    result.o.narrow(0, pieces[0].first_query, pieces[0].queries).copy_(o);
    if (!keep) continue;
    result.saved.push_back(lse);
    for (const Launch& part : parts)
      result.saved.insert(result.saved.end(), part.random.begin(), part.random.end());
  }
  return result;
}

/// A piece's gradients need output and log-sum-exp of the whole softmax alone.
Attention::Gradients backward_by_sequence(const Attention::Inputs& in, const Plan& plan,
                                          const Attention::Forward& saved,
                                          const at::Tensor& grad_o) {
  Attention::Gradients all = {at::empty(in.q.sizes(), in.q.options()),
                              at::empty(in.k.sizes(), in.k.options()),
                              at::empty(in.v.sizes(), in.v.options())};
  auto next = saved.saved.begin();
  for (const std::vector<Piece>& pieces : plan.sequences) {
    const at::Tensor lse = *next++;
    at::Tensor dq = all.q.narrow(0, pieces[0].first_query, pieces[0].queries);
    for (const Piece& piece : pieces) {
      const std::vector<at::Tensor> random(next, next + 4);
      next += 4;
      const Attention::Gradients part =
          launch_backward(in, queries(grad_o, piece), queries(in.q, piece), keys(in.k, piece),
                          keys(in.v, piece), queries(saved.o, piece), lse, random, piece.is_causal);
      if (piece.is_causal) {
        dq.copy_(part.q);
      } else {
        dq.add_(part.q);
      }
      all.k.narrow(0, piece.first_key, piece.keys).copy_(part.k);
      all.v.narrow(0, piece.first_key, piece.keys).copy_(part.v);
    }
  }
  return all;
}

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  const Plan plan = plan_of(in);
  if (plan.common_length == 0) {
    return plan.sequences.empty() ? attention_flash_varlen::forward(in, keep)
                                  : forward_by_sequence(in, plan, keep);
  }
  const std::int64_t length = plan.common_length;
  Launch all = launch(in, batched(in.q, length), batched(in.k, length), batched(in.v, length),
                      /*is_causal=*/true, keep);
  Attention::Forward result;
  result.o = all.o;
  if (keep) {
    result.saved = {all.lse};
    result.saved.insert(result.saved.end(), all.random.begin(), all.random.end());
  }
  return result;
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o) {
  const Plan plan = plan_of(in);
  if (plan.common_length == 0) {
    return plan.sequences.empty() ? attention_flash_varlen::backward(in, saved, grad_o)
                                  : backward_by_sequence(in, plan, saved, grad_o);
  }
  const std::int64_t length = plan.common_length;
  return launch_backward(in, batched(grad_o, length), batched(in.q, length), batched(in.k, length),
                         batched(in.v, length), batched(saved.o, length), saved.saved[0],
                         {saved.saved.begin() + 1, saved.saved.end()}, /*is_causal=*/true);
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
