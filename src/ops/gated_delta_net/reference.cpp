#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "device/upload.h"
#include "ops/compute_type.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops::gated_delta_rule_reference {
namespace {

constexpr std::int64_t kChunk = 64;
constexpr double kNormEps = 1e-6;

/// Chunks of all sequences, "time-major": step c holds the c-th chunk of every sequence that has
/// one, longest sequences first, so that each step is a slice of the chunk axis and the states of
/// the sequences still running are a prefix.
struct Chunks {
  std::int64_t count = 0;               // N
  std::vector<std::int64_t> step_rows;  // chunks in each step
  at::Tensor tokens;                    // [N*64] token of each row, 0 where padded
  at::Tensor padded;                    // [N*64] bool; undefined where every row is a token
  at::Tensor slots;                     // [T] row of each token
  at::Tensor order, rank;               // [S] sorted position -> sequence, and back

  Chunks(const Sequences& sequences, c10::Device device) {
    const std::int64_t S = sequences.count();
    const std::vector<std::int32_t>& cu = sequences.cu_seqlens_host;
    std::vector<std::int64_t> sorted(S), position(S);
    std::iota(sorted.begin(), sorted.end(), 0);
    const auto chunks_of = [&](std::int64_t s) {
      return (cu[s + 1] - cu[s] + kChunk - 1) / kChunk;
    };
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](std::int64_t a, std::int64_t b) { return chunks_of(a) > chunks_of(b); });
    for (std::int64_t i = 0; i < S; ++i) position[sorted[i]] = i;
    std::vector<std::int64_t> token, pad, slot(sequences.total());
    const std::int64_t steps = S == 0 ? 0 : chunks_of(sorted[0]);
    for (std::int64_t c = 0; c < steps; ++c) {
      std::int64_t rows = 0;
      for (; rows < S && chunks_of(sorted[rows]) > c; ++rows) {
        const std::int64_t first = cu[sorted[rows]] + c * kChunk;
        for (std::int64_t i = 0; i < kChunk; ++i) {
          const bool real = first + i < cu[sorted[rows] + 1];
          if (real) slot[first + i] = static_cast<std::int64_t>(token.size());
          token.push_back(real ? first + i : 0);
          pad.push_back(!real);
        }
      }
      step_rows.push_back(rows);
      count += rows;
    }
    tokens = device::upload(token, device);
    if (static_cast<std::int64_t>(token.size()) > sequences.total())
      padded = device::upload(pad, device).to(at::kBool);
    slots = device::upload(slot, device);
    order = device::upload(sorted, device);
    rank = device::upload(position, device);
  }

  /// x [T,H,...] to [N,H,64,...] in `type`, zero where padded.
  at::Tensor gather(const at::Tensor& x, c10::ScalarType type) const {
    at::Tensor rows = x.index_select(0, tokens).to(type);
    if (padded.defined()) {
      std::vector<std::int64_t> mask_shape(x.dim(), 1);
      mask_shape[0] = rows.size(0);
      rows = rows.masked_fill(padded.view(mask_shape), 0);
    }
    std::vector<std::int64_t> shape{count, kChunk};
    shape.insert(shape.end(), x.sizes().begin() + 1, x.sizes().end());
    return rows.view(shape).transpose(1, 2).contiguous();
  }
  /// The inverse: x [N,H,64,...] to [T,H,...].
  at::Tensor scatter(const at::Tensor& x, c10::ScalarType type) const {
    std::vector<std::int64_t> shape{count * kChunk, x.size(1)};
    shape.insert(shape.end(), x.sizes().begin() + 3, x.sizes().end());
    return x.transpose(1, 2).reshape(shape).index_select(0, slots).to(type);
  }
};

at::Tensor transposed(const at::Tensor& x) { return x.transpose(-1, -2); }

/// Everything of a chunk that does not depend on the state; [N,Hv,...] in the compute type, q and k
/// [N,Hk,...].
struct Prepared {
  std::int64_t Hk, Hv, K, V;
  double scale;
  c10::ScalarType type;
  Chunks chunks;
  at::Tensor rq, rk;         // [N,Hk,64,1] factors that make unit rows
  at::Tensor q, k, v, beta;  // q normalised and scaled, k normalised, v, beta [N,Hv,64,1]
  at::Tensor eG, tail_decay, chunk_decay;  // e^G and e^(G_C - G) [N,Hv,64,1], e^G_C [N,Hv,1,1]
  at::Tensor decay;                        // e^(G_i - G_j) for i >= j, else 0 [N,Hv,64,64]
  at::Tensor M;                            // stril(decay * k k^T)
  at::Tensor inverse;                      // (I + diag(beta) M)^-1
  at::Tensor P;                            // tril(decay * q k^T)

  explicit Prepared(const GatedDeltaRule::Inputs& in)
      : Hk(in.q.size(1)),
        Hv(in.v.size(1)),
        K(in.q.size(2)),
        V(in.v.size(2)),
        scale(in.options.scale != 0 ? in.options.scale : 1 / std::sqrt(static_cast<double>(K))),
        type(compute_type(in.q)),
        chunks(in.sequences, in.q.device()) {
    q = chunks.gather(in.q, type);
    k = chunks.gather(in.k, type);
    if (in.options.normalize_qk) {
      rq = at::rsqrt(at::sum(q * q, {-1}, true) + kNormEps);
      rk = at::rsqrt(at::sum(k * k, {-1}, true) + kNormEps);
      q.mul_(rq * scale);
      k.mul_(rk);
    } else {
      q.mul_(scale);
    }
    // Value heads that share a key head share these products.
    const at::Tensor kk = repeat_heads(at::matmul(k, transposed(k)));
    const at::Tensor qk = repeat_heads(at::matmul(q, transposed(k)));
    v = chunks.gather(in.v, type);
    beta = chunks.gather(in.beta, type).unsqueeze(-1);
    // Padded rows have g = 0, so G stays at the last real value.
    const at::Tensor G = at::cumsum(chunks.gather(in.g, type), -1).unsqueeze(-1);
    const at::Tensor G_C = G.narrow(-2, kChunk - 1, 1);
    eG = at::exp(G);
    tail_decay = at::exp(G_C - G);
    chunk_decay = at::exp(G_C);
    const at::Tensor upper = at::ones({kChunk, kChunk}, in.q.options().dtype(at::kBool)).triu(1);
    decay =
        at::exp((G - transposed(G)).masked_fill(upper, -std::numeric_limits<double>::infinity()));
    M = (decay * kk).tril(-1);
    inverse = unit_lower_inverse(beta * M);
    P = decay * qk;
  }

  /// rows [N,Hk,64,K] for every value head, each row times its factor [N,Hv,64,1].
  at::Tensor scaled(const at::Tensor& rows, const at::Tensor& factor) const {
    return (rows.unsqueeze(2) * factor.view({factor.size(0), Hk, Hv / Hk, kChunk, 1}))
        .view({factor.size(0), Hv, kChunk, rows.size(3)});
  }
  at::Tensor repeat_heads(const at::Tensor& x) const {
    return x.unsqueeze(2)
        .expand({x.size(0), Hk, Hv / Hk, kChunk, x.size(3)})
        .reshape({x.size(0), Hv, kChunk, x.size(3)});
  }
  at::Tensor sum_heads(const at::Tensor& x) const {
    return at::sum(x.view({x.size(0), Hk, Hv / Hk, kChunk, x.size(3)}), {2});
  }
  /// The gradient of the raw q or k [T,Hk,K] from that of y, the unit rows times `factor`.
  at::Tensor through_norm(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& r,
                          double factor, c10::ScalarType out) const {
    at::Tensor dx = sum_heads(dy) * factor;
    if (r.defined()) {
      const at::Tensor unit = y / factor;
      dx = r * (dx - unit * at::sum(unit * dx, {-1}, true));
    }
    return chunks.scatter(dx, out);
  }
  /// [S,Hv,K,V] in sorted order, for the state at the start.
  at::Tensor sorted_states(const at::Tensor& states, const Sequences& sequences,
                           const at::Tensor& like) const {
    if (!states.defined()) {
      return at::zeros({sequences.count(), Hv, K, V}, like.options().dtype(type));
    }
    return states.to(type).index_select(0, chunks.order);
  }
};

/// 1 in the blocks of [n, n] below the diagonal that join two neighbours of `size` into one of
/// twice the size, 0 elsewhere.
at::Tensor joining_blocks(std::int64_t n, std::int64_t size, const at::Tensor& like) {
  const at::Tensor index = at::arange(n, like.options().dtype(at::kLong));
  const at::Tensor half = index.bitwise_and(size), pair = index.bitwise_and(-2 * size);
  const at::Tensor same = pair.unsqueeze(1) == pair;
  return (same.logical_and(half.unsqueeze(1) > half)).to(like.scalar_type());
}

/// Views [rows*Hv, ...] of the chunks of one step.
at::Tensor slice(const at::Tensor& x, std::int64_t first, std::int64_t rows) {
  return x.narrow(0, first, rows).flatten(0, 1);
}

}  // namespace

at::Tensor unit_lower_inverse(const at::Tensor& lower) {
  const std::int64_t C = lower.size(-1);
  constexpr std::int64_t kBlock = 16;
  const at::Tensor flat = lower.reshape({-1, C, C});
  const std::int64_t blocks = C / kBlock;
  // Diagonal blocks [B * blocks, 16, 16], all in one batch: a product of this size is what a matrix
  // unit does at once.
  std::vector<at::Tensor> diagonal;
  for (std::int64_t b = 0; b < blocks; ++b) {
    diagonal.push_back(flat.narrow(1, b * kBlock, kBlock).narrow(2, b * kBlock, kBlock));
  }
  const at::Tensor L = at::stack(diagonal, 1).flatten(0, 1);
  // Merges of size 1, 2, 4, 8: with X the inverse of the blocks of one size and L_s the blocks of L
  // that join two of them, X - X L_s X is that of twice the size; all else in the product is zero.
  at::Tensor X = at::eye(kBlock, L.options()) - L * joining_blocks(kBlock, 1, L);
  for (std::int64_t size = 2; size < kBlock; size *= 2) {
    X = at::baddbmm(X, at::bmm(X, L * joining_blocks(kBlock, size, L)), X, 1, -1);
  }
  X = X.view({-1, blocks, kBlock, kBlock});
  at::Tensor inverse = at::zeros_like(flat);
  for (std::int64_t b = 0; b < blocks; ++b) {
    inverse.narrow(1, b * kBlock, kBlock).narrow(2, b * kBlock, kBlock).copy_(X.select(1, b));
  }
  // T21 = -T22 L21 T11, block size 16, 32, ...
  for (std::int64_t size = kBlock; size < C; size *= 2) {
    for (std::int64_t at = 0; at < C; at += 2 * size) {
      const auto block = [&](const at::Tensor& m, std::int64_t i, std::int64_t j) {
        return m.narrow(1, at + i * size, size).narrow(2, at + j * size, size);
      };
      block(inverse, 1, 0)
          .copy_(at::bmm(block(inverse, 1, 1), at::bmm(block(flat, 1, 0), block(inverse, 0, 0)))
                     .neg());
    }
  }
  return inverse.view(lower.sizes());
}

GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& in, bool keep) {
  const Prepared p(in);
  const at::Tensor read = p.scaled(p.k, p.eG);           // [N,Hv,64,K]
  const at::Tensor write = p.scaled(p.k, p.tail_decay);  // [N,Hv,64,K]
  const at::Tensor solve = p.inverse * transposed(p.beta);
  at::Tensor U = at::empty_like(p.v);
  at::Tensor entry = at::empty({p.chunks.count, p.Hv, p.K, p.V}, p.v.options());
  at::Tensor S = p.sorted_states(in.initial_state, in.sequences, p.v);
  std::int64_t first = 0;
  for (const std::int64_t rows : p.chunks.step_rows) {
    at::Tensor state = S.narrow(0, 0, rows).flatten(0, 1), u = slice(U, first, rows);
    entry.narrow(0, first, rows).copy_(S.narrow(0, 0, rows));
    const at::Tensor W =
        at::baddbmm(slice(p.v, first, rows), slice(read, first, rows), state, 1, -1);
    at::bmm_out(u, slice(solve, first, rows), W);
    state.mul_(slice(p.chunk_decay, first, rows))
        .baddbmm_(transposed(slice(write, first, rows)), u);
    first += rows;
  }
  GatedDeltaRuleForward out;
  const at::Tensor o = at::bmm(p.scaled(p.q, p.eG).flatten(0, 1), entry.flatten(0, 1))
                           .baddbmm_(p.P.flatten(0, 1), U.flatten(0, 1));
  out.o = p.chunks.scatter(o.view_as(U), in.v.scalar_type());
  if (in.options.want_final_state) out.final_state = S.index_select(0, p.chunks.rank);
  if (keep) out.saved = {U, entry};
  return out;
}

GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs& in,
                                 const GatedDeltaRuleForward& forward, const at::Tensor& grad_o,
                                 const at::Tensor& grad_final_state) {
  const Prepared p(in);
  const at::Tensor &U = forward.saved.at(0), &entry = forward.saved.at(1);
  const at::Tensor dO = grad_o.defined() ? p.chunks.gather(grad_o, p.type) : at::zeros_like(p.v);
  const at::Tensor q = p.repeat_heads(p.q), k = p.repeat_heads(p.k);
  const at::Tensor read = p.eG * k, write = p.tail_decay * k;
  const at::Tensor transposed_inverse = transposed(p.inverse).contiguous();
  const at::Tensor from_output = at::matmul(transposed(p.P), dO);    // P^T dO
  const at::Tensor to_state = at::matmul(transposed(p.eG * q), dO);  // (e^G Q)^T dO
  at::Tensor dWh = at::empty_like(p.v), leaving = at::empty_like(entry);
  at::Tensor dS = p.sorted_states(grad_final_state, in.sequences, p.v);
  std::int64_t first = p.chunks.count;
  for (auto step = p.chunks.step_rows.rbegin(); step != p.chunks.step_rows.rend(); ++step) {
    const std::int64_t rows = *step;
    first -= rows;
    at::Tensor state = dS.narrow(0, 0, rows).flatten(0, 1);
    leaving.narrow(0, first, rows).copy_(dS.narrow(0, 0, rows));
    const at::Tensor dU =
        at::baddbmm(slice(from_output, first, rows), slice(write, first, rows), state);
    at::Tensor dwh = slice(dWh, first, rows);
    at::bmm_out(dwh, slice(transposed_inverse, first, rows), dU);
    const at::Tensor dv = slice(p.beta, first, rows) * dwh;
    state.mul_(slice(p.chunk_decay, first, rows))
        .add_(slice(to_state, first, rows))
        .baddbmm_(transposed(slice(read, first, rows)), dv, 1, -1);
  }

  const at::Tensor dWh_U = at::matmul(dWh, transposed(U));
  const at::Tensor dWh_S = at::matmul(dWh, transposed(entry));  // [N,Hv,64,K]
  const at::Tensor D = (p.decay * p.beta * dWh_U).tril(-1).neg();
  const at::Tensor dP = p.decay * at::matmul(dO, transposed(U));
  const at::Tensor dq = p.eG * at::matmul(dO, transposed(entry)) + at::matmul(dP, k);
  const at::Tensor through_state = p.tail_decay * at::matmul(U, transposed(leaving));
  const at::Tensor dk_write =
      through_state + at::matmul(transposed(dP), q) + at::matmul(transposed(D), k);
  const at::Tensor dk_read = at::matmul(D, k) - p.eG * p.beta * dWh_S;

  const at::Tensor dot = [](const at::Tensor& a, const at::Tensor& b) {
    return at::sum(a * b, {-1});
  }(dWh, p.v);
  const at::Tensor dbeta = dot - at::sum(p.eG * dWh_S * k, {-1}) - at::sum(dWh_U * p.M, {-1});
  at::Tensor dG = at::sum(q * dq + k * (dk_read - dk_write), {-1});
  // <dS_C, S_C>, with S_C written out as decayed entry state plus what the chunk wrote.
  dG.select(-1, kChunk - 1)
      .add_(p.chunk_decay.flatten(1) * at::sum(leaving * entry, {-1, -2}) +
            at::sum(k * through_state, {-1, -2}));
  const at::Tensor dg = dG.flip({-1}).cumsum(-1).flip({-1});

  GatedDeltaRuleGradients grads;
  grads.q = p.through_norm(dq, p.q, p.rq, p.scale, in.q.scalar_type());
  grads.k = p.through_norm(dk_write + dk_read, p.k, p.rk, 1, in.k.scalar_type());
  grads.v = p.chunks.scatter(p.beta * dWh, in.v.scalar_type());
  grads.g = p.chunks.scatter(dg, in.g.scalar_type());
  grads.beta = p.chunks.scatter(dbeta, in.beta.scalar_type());
  if (in.initial_state.defined()) {
    grads.initial_state = dS.index_select(0, p.chunks.rank).to(in.initial_state.scalar_type());
  }
  return grads;
}

at::Tensor decode(const GatedDeltaRuleDecode::Inputs& in, const CacheRows& cache_rows) {
  const c10::ScalarType type = compute_type(in.q);
  const std::int64_t B = in.q.size(0), Hk = in.q.size(1), K = in.q.size(2), Hv = in.v.size(1),
                     V = in.v.size(2);
  const auto rows = [&](const at::Tensor& x, double factor) {
    at::Tensor y = x.to(type);
    if (in.normalize_qk) y = y * at::rsqrt(at::sum(y * y, {-1}, true) + kNormEps);
    return (y * factor).unsqueeze(2).expand({B, Hk, Hv / Hk, K}).reshape({B * Hv, 1, K});
  };
  const at::Tensor query = rows(in.q, in.scale), key = rows(in.k, 1);
  at::Tensor S = in.states.index_select(0, cache_rows.slots).to(type).view({B * Hv, K, V}) *
                 at::exp(in.g.to(type)).view({B * Hv, 1, 1});
  const at::Tensor u = in.beta.to(type).reshape({B * Hv, 1, 1}) *
                       (in.v.to(type).reshape({B * Hv, 1, V}) - at::bmm(key, S));
  S = at::baddbmm(S, transposed(key), u);
  in.states.index_copy_(0, cache_rows.slots, S.view({B, Hv, K, V}).to(in.states.scalar_type()));
  return at::bmm(query, S).view({B, Hv, V}).to(in.v.scalar_type());
}

}  // namespace heddle::ops::gated_delta_rule_reference
