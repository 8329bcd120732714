#include "ops/attention/cuda/dense.h"

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

constexpr std::int64_t kLengthMultiple = 256;
/// More sequences, or shorter ones, are one launch of the ragged graph.
constexpr std::int64_t kFewSequences = 8, kLongSequence = 2048;

/// [B*L,H,D] as [B,H,L,D] without a copy, whatever the token stride.
at::Tensor batched(const at::Tensor& x, std::int64_t length) {
  return x.unflatten(0, {x.size(0) / length, length}).transpose(1, 2);
}

at::Tensor packed(const at::Tensor& x) { return x.transpose(1, 2).flatten(0, 1); }

/// q, k and v [B,H,L,D] of one launch, of q's and k's own lengths.
struct Operands {
  at::Tensor q, k, v;
  bool is_causal;
  double scale;
};

/// Output [B*L,H,D], log-sum-exp [B,H,L,1], and what the backward wants besides.
struct Launch {
  at::Tensor o, lse;
  std::vector<at::Tensor> random;  ///< seed, offset, and two that are not used
};

Launch launch(const Operands& on, bool keep) {
  auto [o, lse, cu_q, cu_k, max_q, max_k, seed, offset, debug] =
      at::_scaled_dot_product_cudnn_attention(
          on.q, on.k, on.v, /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/keep,
          /*dropout_p=*/0.0, on.is_causal, /*return_debug_mask=*/false, on.scale);
  return {packed(o), lse, {seed, offset, cu_q, cu_k}};
}

Attention::Gradients launch_backward(const Operands& on, const at::Tensor& grad_o,
                                     const Launch& saved) {
  const std::int64_t length = on.q.size(2);
  auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      batched(grad_o, length), on.q, on.k, on.v, batched(saved.o, length), saved.lse,
      saved.random[0], saved.random[1], /*attn_bias=*/at::Tensor(), saved.random[2],
      saved.random[3], length, on.k.size(2), /*dropout_p=*/0.0, on.is_causal, on.scale);
  return {packed(dq), packed(dk), packed(dv)};
}

Operands all_of(const Attention::Inputs& in) {
  const std::int64_t length = in.q_sequences.max_seqlen;
  return {batched(in.q, length), batched(in.k, length), batched(in.v, length), /*is_causal=*/true,
          attention_scale(in)};
}

/// Queries of one sequence that see the same keys: all of them, or causally as many as there are
/// queries.
struct Piece {
  std::int64_t first_query, queries, first_key, keys;
  bool is_causal;

  at::Tensor of_queries(const at::Tensor& x) const { return x.narrow(0, first_query, queries); }
  at::Tensor of_keys(const at::Tensor& x) const { return x.narrow(0, first_key, keys); }
  Operands of(const Attention::Inputs& in) const {
    return {batched(of_queries(in.q), queries), batched(of_keys(in.k), keys),
            batched(of_keys(in.v), keys), is_causal, attention_scale(in)};
  }
};

/// By sequence its pieces, the causal one first; none where these inputs are not to be cut.
std::vector<std::vector<Piece>> pieces_of(const Attention::Inputs& in) {
  const std::vector<std::int32_t>&cu_q = in.q_sequences.cu_seqlens_host,
        &cu_k = in.k_sequences.cu_seqlens_host;
  if (in.q_sequences.count() > kFewSequences) return {};
  std::vector<std::vector<Piece>> all;
  for (std::size_t s = 0; s + 1 < cu_q.size(); ++s) {
    const std::int64_t n = cu_q[s + 1] - cu_q[s], m = cu_k[s + 1] - cu_k[s];
    if (n < kLongSequence || n > m || n % kLengthMultiple != 0 || m % kLengthMultiple != 0)
      return {};
    all.push_back({{cu_q[s], n, cu_k[s] + m - n, n, /*is_causal=*/true}});
    if (m > n) all.back().push_back({cu_q[s], n, cu_k[s], m - n, /*is_causal=*/false});
  }
  return all;
}

/// exp(lse - all) [1,H,n,1] as a factor of rows [n,H,D].
at::Tensor share(const at::Tensor& lse, const at::Tensor& all) {
  return at::exp(lse - all).squeeze(0).transpose(0, 1);
}

}  // namespace

bool one_length_fits(const Attention::Inputs& in) {
  // No sequence is longer than `length`: if they fill the tokens, all have it.
  const std::int64_t count = in.q_sequences.count(), length = in.q_sequences.max_seqlen;
  return length > 0 && length % kLengthMultiple == 0 && in.q_sequences.total() == count * length &&
         in.q_sequences.cu_seqlens_host == in.k_sequences.cu_seqlens_host;
}

Attention::Forward one_length_forward(const Attention::Inputs& in, bool keep) {
  const Launch all = launch(all_of(in), keep);
  if (!keep) return {all.o, {}};
  return {all.o, {all.lse, all.random[0], all.random[1], all.random[2], all.random[3]}};
}

Attention::Gradients one_length_backward(const Attention::Inputs& in,
                                         const Attention::Forward& saved,
                                         const at::Tensor& grad_o) {
  return launch_backward(all_of(in), grad_o,
                         {saved.o, saved.saved[0], {saved.saved.begin() + 1, saved.saved.end()}});
}

Attention::Forward one_length_as_packed(const Attention::Forward& saved) {
  return {saved.o.contiguous(), {packed(saved.saved[0]).squeeze(-1).contiguous()}};
}

bool pieces_fit(const Attention::Inputs& in) {
  return in.q_sequences.cu_seqlens_host != in.k_sequences.cu_seqlens_host && !pieces_of(in).empty();
}

/// The softmax over all keys from those over each piece's: outputs weighted by the pieces' shares
/// of the sum.
Attention::Forward pieces_forward(const Attention::Inputs& in, bool keep) {
  Attention::Forward result;
  result.o = at::empty(in.q.sizes(), in.q.options());
  for (const std::vector<Piece>& pieces : pieces_of(in)) {
    std::vector<Launch> parts;
    for (const Piece& piece : pieces)
      parts.push_back(launch(piece.of(in), keep || pieces.size() > 1));
    at::Tensor o = parts[0].o, lse = parts[0].lse;
    if (parts.size() > 1) {
      lse = at::logaddexp(parts[0].lse, parts[1].lse);
      o = parts[0].o * share(parts[0].lse, lse) + parts[1].o * share(parts[1].lse, lse);
    }
    pieces[0].of_queries(result.o).copy_(o);
    if (!keep) continue;
    result.saved.push_back(lse);
    for (const Launch& part : parts)
      result.saved.insert(result.saved.end(), part.random.begin(), part.random.end());
  }
  return result;
}

/// A piece's gradients need output and log-sum-exp of the whole softmax alone.
Attention::Gradients pieces_backward(const Attention::Inputs& in, const Attention::Forward& saved,
                                     const at::Tensor& grad_o) {
  Attention::Gradients all = {at::empty(in.q.sizes(), in.q.options()),
                              at::empty(in.k.sizes(), in.k.options()),
                              at::empty(in.v.sizes(), in.v.options())};
  auto next = saved.saved.begin();
  for (const std::vector<Piece>& pieces : pieces_of(in)) {
    const at::Tensor lse = *next++;
    for (const Piece& piece : pieces) {
      const Launch whole = {piece.of_queries(saved.o), lse, {next, next + 4}};
      next += 4;
      const Attention::Gradients part =
          launch_backward(piece.of(in), piece.of_queries(grad_o), whole);
      at::Tensor dq = piece.of_queries(all.q);
      if (piece.is_causal) {
        dq.copy_(part.q);
      } else {
        dq.add_(part.q);
      }
      piece.of_keys(all.k).copy_(part.k);
      piece.of_keys(all.v).copy_(part.v);
    }
  }
  return all;
}

}  // namespace heddle::ops::attention_cudnn
