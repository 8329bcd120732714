#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "device/upload.h"
#include "ops/attention/kernels.h"
#include "ops/compute_type.h"

namespace heddle::ops::attention_reference {
namespace {

/// Rows of queries worked on at once: bounds the scores to [Hq,kRows,n].
constexpr std::int64_t kRows = 256;

/// A block of queries of one sequence and the keys that it sees, heads first and grouped by KV
/// head: query rows [q_begin, q_begin + q_count) and keys [k_begin, k_begin + k_count).
struct Block {
  std::int64_t q_begin, q_count, k_begin, k_count;
  std::int64_t diagonal;  ///< Row i sees keys up to and including diagonal + i of the block's keys.
};

template <class F>
void for_each_block(const Attention::Inputs& in, F&& f) {
  for (std::int64_t s = 0; s < in.q_sequences.count(); ++s) {
    const auto i = static_cast<std::size_t>(s);
    const std::int64_t q0 = in.q_sequences.cu_seqlens_host[i],
                       m = in.q_sequences.cu_seqlens_host[i + 1] - q0;
    const std::int64_t k0 = in.k_sequences.cu_seqlens_host[i],
                       n = in.k_sequences.cu_seqlens_host[i + 1] - k0;
    for (std::int64_t row = 0; row < m; row += kRows) {
      const std::int64_t rows = std::min(kRows, m - row);
      const std::int64_t seen = std::clamp<std::int64_t>(n - m + row + rows, 0, n);
      f(Block{q0 + row, rows, k0, seen, n - m + row});
    }
  }
}

/// [t,h,D] rows as [Hkv, h/Hkv * t, D]: all queries of a KV head in one matrix.
at::Tensor grouped(const at::Tensor& x, std::int64_t begin, std::int64_t count, std::int64_t hkv,
                   c10::ScalarType type) {
  const at::Tensor rows = x.narrow(0, begin, count).to(type).transpose(0, 1);  // [h,t,D]
  return rows.reshape({hkv, x.size(1) / hkv * count, x.size(2)});
}

/// Back to [t,h,D].
at::Tensor ungrouped(const at::Tensor& x, std::int64_t heads, std::int64_t count) {
  return x.reshape({heads, count, x.size(2)}).transpose(0, 1);
}

/// Scaled and masked scores [Hkv, g * rows, keys].
at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const Block& block, double scale) {
  at::Tensor s = at::matmul(q, k.transpose(1, 2)) * scale;
  const auto options = q.options().dtype(at::kLong);
  const at::Tensor last = at::arange(block.q_count, options) + block.diagonal;
  const at::Tensor hidden = at::arange(block.k_count, options).unsqueeze(0) > last.unsqueeze(1);
  const std::int64_t groups = q.size(1) / block.q_count;
  s.view({q.size(0), groups, block.q_count, block.k_count})
      .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  return s;
}

}  // namespace

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  const c10::ScalarType type = compute_type(in.q);
  const std::int64_t hq = in.q.size(1), hkv = in.k.size(1);
  Attention::Forward result;
  result.o = at::empty(in.q.sizes(), in.q.options());
  at::Tensor lse = at::zeros({in.q.size(0), hq}, in.q.options().dtype(type));
  for_each_block(in, [&](const Block& block) {
    at::Tensor o_rows = result.o.narrow(0, block.q_begin, block.q_count);
    const at::Tensor q = grouped(in.q, block.q_begin, block.q_count, hkv, type);
    const at::Tensor k = grouped(in.k, block.k_begin, block.k_count, hkv, type);
    const at::Tensor v = grouped(in.v, block.k_begin, block.k_count, hkv, type);
    const at::Tensor s = scores(q, k, block, attention_scale(in));
    // A query that sees no key gets zero, not NaN.
    at::Tensor row_lse = at::logsumexp(s, {-1}, /*keepdim=*/true);
    row_lse.masked_fill_(row_lse == -std::numeric_limits<double>::infinity(), 0);
    o_rows.copy_(ungrouped(at::matmul(at::exp(s - row_lse), v), hq, block.q_count));
    lse.narrow(0, block.q_begin, block.q_count)
        .copy_(ungrouped(row_lse, hq, block.q_count).squeeze(-1));
  });
  if (keep) result.saved = {lse};
  return result;
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o) {
  const c10::ScalarType type = compute_type(in.q);
  const std::int64_t hq = in.q.size(1), hkv = in.k.size(1);
  const double scale = attention_scale(in);
  at::Tensor dq = at::zeros(in.q.sizes(), in.q.options());
  at::Tensor dk = at::zeros(in.k.sizes(), in.k.options().dtype(type));
  at::Tensor dv = at::zeros(in.v.sizes(), in.v.options().dtype(type));
  for_each_block(in, [&](const Block& block) {
    const auto keys = [&](const at::Tensor& x) {
      return grouped(x, block.k_begin, block.k_count, hkv, type);
    };
    const auto queries = [&](const at::Tensor& x) {
      return grouped(x, block.q_begin, block.q_count, hkv, type);
    };
    const at::Tensor q = queries(in.q), k = keys(in.k), v = keys(in.v);
    const at::Tensor d_o = queries(grad_o), o = queries(saved.o);
    const at::Tensor lse = queries(saved.saved[0].unsqueeze(-1));
    const at::Tensor p = at::exp(scores(q, k, block, scale) - lse);
    const at::Tensor dp = at::matmul(d_o, v.transpose(1, 2));
    const at::Tensor ds = p * (dp - at::sum(d_o * o, {-1}, /*keepdim=*/true)) * scale;
    dq.narrow(0, block.q_begin, block.q_count)
        .copy_(ungrouped(at::matmul(ds, k), hq, block.q_count));
    dk.narrow(0, block.k_begin, block.k_count)
        .add_(ungrouped(at::matmul(ds.transpose(1, 2), q), hkv, block.k_count));
    dv.narrow(0, block.k_begin, block.k_count)
        .add_(ungrouped(at::matmul(p.transpose(1, 2), d_o), hkv, block.k_count));
  });
  return {dq, dk.to(in.k.scalar_type()), dv.to(in.v.scalar_type())};
}

at::Tensor decode(const AttentionDecode::Inputs& in, const CacheRows& rows) {
  append_to_caches(in, rows);
  const c10::ScalarType type = compute_type(in.q);
  const std::int64_t hq = in.q.size(1), hkv = in.k.size(1), d = in.q.size(2);
  at::Tensor o = at::empty(in.q.sizes(), in.q.options());
  for (std::int64_t b = 0; b < rows.count(); ++b) {
    const auto sequence = static_cast<std::size_t>(b);
    std::vector<std::int64_t> places;
    rows.append_places(sequence, 0, rows.lengths_host[sequence] + 1, in.k_cache.size(1), places);
    const at::Tensor seen = device::upload(places, in.q.device());
    const auto keys_of = [&](const at::Tensor& cache) {
      return cache.flatten(0, 1).index_select(0, seen).to(type);
    };
    const at::Tensor query = in.q.select(0, b).to(type).reshape({hkv, hq / hkv, d});
    const at::Tensor k = keys_of(in.k_cache).permute({1, 2, 0});
    const at::Tensor v = keys_of(in.v_cache).transpose(0, 1);
    const at::Tensor p = at::softmax(at::matmul(query, k) * in.scale, -1);
    o.select(0, b).copy_(at::matmul(p, v).view({hq, d}));
  }
  return o;
}

}  // namespace heddle::ops::attention_reference

namespace heddle::ops::output_gate_reference {

at::Tensor forward(const at::Tensor& x, const at::Tensor& gate) {
  return (x.to(compute_type(x)) * at::sigmoid(gate.to(compute_type(x))))
      .to(x.scalar_type())
      .contiguous();
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const at::Tensor& gate,
                                           const at::Tensor& grad_y) {
  const c10::ScalarType type = compute_type(x);
  const at::Tensor s = at::sigmoid(gate.to(type));
  const at::Tensor dx = grad_y.to(type) * s;
  return {dx.to(x.scalar_type()), (dx * x * (1 - s)).to(gate.scalar_type())};
}

}  // namespace heddle::ops::output_gate_reference
