// One problem of the check: its inputs by kind of data, a launch of both passes on buffers of its
// own, and the error of what came out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "args.h"
#include "oracle.h"
#include "test_support.h"

namespace heddle::ops::cuda::gdn {

using bf16 = __nv_bfloat16;

/// The data kinds of docs/gdn.md, section 9, and three of the hardest inverses.
enum Kind { kLogSigmoid, kNoDecay, kStrong, kCorrelated, kIdentical, kAlternating, kBetaEdges };
inline constexpr const char* kKindNames[] = {"logsigmoid/16", "no decay",  "strong gate",
                                             "correlated",    "same keys", "alternating keys",
                                             "beta 0 and 1"};
/// Keys of one direction: the decay hardly matters there.
inline bool is_parallel(Kind kind) { return kind == kIdentical || kind == kAlternating; }

struct Case {
  std::vector<int> lengths;
  int k_heads, v_heads, dim;
  Kind kind;
  bool states, normalize;
  int pad = 0;             // extra elements between tokens of every bf16 tensor
  int segment_chunks = 0;  // as in the shape
};

struct Outputs {
  std::vector<bf16> o, dq, dk, dv;
  std::vector<float> final, dg, dbeta, d_initial;
  bool operator==(const Outputs& x) const {
    auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return same(o, x.o) && same(dq, x.dq) && same(dk, x.dk) && same(dv, x.dv) &&
           same(final, x.final) && same(dg, x.dg) && same(dbeta, x.dbeta) &&
           same(d_initial, x.d_initial);
  }
};

struct Problem {
  Case c;
  int tokens = 0;
  std::vector<int> cu{0};
  std::vector<bf16> q, k, v, d_o;  // rows of heads * dim + pad
  std::vector<float> g, beta, initial, d_final;

  explicit Problem(const Case& cs, int seed) : c(cs) {
    for (int n : c.lengths) cu.push_back(tokens += n);
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    auto fill = [&](std::vector<bf16>& x, int heads) {
      x.resize(size_t(tokens) * (heads * c.dim + c.pad));
      for (auto& e : x) e = __float2bfloat16(normal(rng));
    };
    fill(q, c.k_heads);
    fill(k, c.k_heads);
    fill(v, c.v_heads);
    fill(d_o, c.v_heads);
    if (c.kind == kCorrelated || is_parallel(c.kind)) {
      std::vector<float> base(size_t(c.k_heads) * c.dim);
      for (auto& e : base) e = normal(rng);
      float noise = c.kind == kCorrelated ? 0.5f : 0.f;
      for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < c.k_heads * c.dim; ++i) {
          float sign = c.kind == kAlternating && t % 2 == 1 ? -1.f : 1.f;
          k[size_t(t) * (c.k_heads * c.dim + c.pad) + i] =
              __float2bfloat16(sign * base[i] + noise * normal(rng));
        }
    }
    if (!c.normalize)  // keys of about unit length: longer ones make the recurrence unstable
      for (auto* x : {&q, &k})
        for (auto& e : *x) e = __float2bfloat16(__bfloat162float(e) / (1.1f * std::sqrt(c.dim)));
    g.resize(size_t(tokens) * c.v_heads);
    beta.resize(g.size());
    std::vector<float> a(c.v_heads);
    for (auto& e : a) e = 16 * uniform(rng);
    for (size_t i = 0; i < g.size(); ++i) {
      int h = i % c.v_heads;
      float x = normal(rng), y = normal(rng);
      g[i] = -std::log1p(std::exp(-x)) / 16;
      beta[i] = __bfloat162float(__float2bfloat16(1 / (1 + std::exp(-y))));
      if (c.kind == kNoDecay || (c.kind == kLogSigmoid && h < c.v_heads / 4)) g[i] = 0;
      if (c.kind == kStrong) g[i] = -a[h] * std::log1p(std::exp(x + 1));
      if (c.kind == kCorrelated) beta[i] = 0.9f;
      if (is_parallel(c.kind)) beta[i] = 0.97f;
      constexpr float kEdges[] = {0.f, 1e-30f, 1e-6f, 1e-3f, 0.999f, 1.f};
      if (c.kind == kBetaEdges) beta[i] = kEdges[(i / c.v_heads + i) % 6];
    }
    if (c.states) {
      initial.resize(size_t(c.lengths.size()) * c.v_heads * c.dim * c.dim);
      d_final.resize(initial.size());
      for (auto& e : initial) e = normal(rng);
      for (auto& e : d_final) e = normal(rng);
    }
  }

  int64_t stride(int heads) const { return int64_t(heads) * c.dim + c.pad; }

  /// garbage: byte that fills every buffer the library writes.
  Outputs run(GatedDeltaNetKernel kernel, int garbage = 0xff, bool graph = false) const {
    GatedDeltaNetShape shape{tokens, int(c.lengths.size()), c.k_heads, c.v_heads,
                             c.dim,  c.segment_chunks};
    GatedDeltaNetOptions options{float(1 / std::sqrt(double(c.dim))), c.normalize, kernel};
    Buffer<bf16> bq(q), bk(k), bv(v), bdo(d_o), o(v.size()), dq(q.size()), dk(k.size()),
        dv(v.size());
    Buffer<float> bg(g), bb(beta), bi(initial), bf(d_final), fs(initial.size()), dg(g.size()),
        db(g.size()), di(initial.size());
    Buffer<int> bcu(cu);
    Buffer<char> saved(gated_delta_net_saved_bytes(shape, true)),
        workspace(gated_delta_net_workspace_bytes(shape));
    for (auto* b : {&saved, &workspace}) b->poison(garbage);
    int64_t sk = stride(c.k_heads), sv = stride(c.v_heads);
    GatedDeltaNetInputs in{
        {bq.p, sk}, {bk.p, sk}, {bv.p, sv}, bg.p, bb.p, bcu.p, c.states ? bi.p : nullptr};
    GatedDeltaNetForward fwd{{o.p, sv}, c.states ? fs.p : nullptr, saved.p, true};
    GatedDeltaNetBackward bwd;
    bwd.d_o = {bdo.p, sv};
    bwd.d_final_state = c.states ? bf.p : nullptr;
    bwd.saved = saved.p;
    bwd.workspace = workspace.p;
    bwd.dq = {dq.p, sk};
    bwd.dk = {dk.p, sk};
    bwd.dv = {dv.p, sv};
    bwd.dg = dg.p;
    bwd.dbeta = db.p;
    bwd.d_initial_state = c.states ? di.p : nullptr;
    cudaStream_t s;
    GDN_CUDA(cudaStreamCreate(&s));
    GDN_CUDA(cudaDeviceSynchronize());
    if (graph) GDN_CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    gated_delta_net_forward(shape, options, in, fwd, s);
    gated_delta_net_backward(shape, options, in, bwd, s);
    if (graph) {
      cudaGraph_t gr;
      cudaGraphExec_t ex;
      GDN_CUDA(cudaStreamEndCapture(s, &gr));
      GDN_CUDA(cudaGraphInstantiate(&ex, gr, 0));
      for (int i = 0; i < 2; ++i) GDN_CUDA(cudaGraphLaunch(ex, s));
      GDN_CUDA(cudaStreamSynchronize(s));
      cudaGraphExecDestroy(ex);
      cudaGraphDestroy(gr);
    }
    GDN_CUDA(cudaStreamSynchronize(s));
    cudaStreamDestroy(s);
    return {o.host(), dq.host(), dk.host(), dv.host(), fs.host(), dg.host(), db.host(), di.host()};
  }
};

/// Relative L2 error of each output, summed over heads and sequences.
struct Errors {
  static constexpr int kCount = 8;
  static constexpr const char* kNames[kCount] = {"o",  "dq",    "dk",    "dv",
                                                 "dg", "dbeta", "state", "dstate"};
  double diff[kCount] = {}, ref[kCount] = {};
  void add(int i, double got, double want) {
    diff[i] += (got - want) * (got - want);
    ref[i] += want * want;
  }
  double rel(int i) const { return ref[i] > 0 ? std::sqrt(diff[i] / ref[i]) : std::sqrt(diff[i]); }
};

/// Errors of a launch against the recurrence in double.
inline Errors compare(const Problem& p, const Outputs& out) {
  const Case& c = p.c;
  const int d = c.dim, group = c.v_heads / c.k_heads, n_seq = int(c.lengths.size());
  std::vector<OracleHead> heads(size_t(n_seq) * c.v_heads);
  std::vector<double> rq, rk;  // [token, k_head] 1 / norm
  for (auto [x, r] : {std::pair{&p.q, &rq}, {&p.k, &rk}})
    for (int t = 0; t < p.tokens; ++t)
      for (int h = 0; h < c.k_heads; ++h) {
        double s = 1e-6;
        for (int i = 0; i < d; ++i) {
          double e = __bfloat162float((*x)[t * p.stride(c.k_heads) + h * d + i]);
          s += e * e;
        }
        r->push_back(c.normalize ? 1 / std::sqrt(s) : 1.0);
      }
  std::vector<std::thread> pool;
  int workers = std::max(1u, std::thread::hardware_concurrency());
  for (int w = 0; w < workers; ++w)
    pool.emplace_back([&, w] {
      for (size_t i = w; i < heads.size(); i += workers) {
        OracleHead& h = heads[i];
        int seq = i / c.v_heads, hv = i % c.v_heads, hk = hv / group, t0 = p.cu[seq];
        h.tokens = c.lengths[seq];
        h.dim = d;
        h.scale = 1 / std::sqrt(double(d));
        for (int t = t0; t < t0 + h.tokens; ++t) {
          for (int e = 0; e < d; ++e) {
            size_t ik = t * p.stride(c.k_heads) + hk * d + e,
                   iv = t * p.stride(c.v_heads) + hv * d + e;
            h.q.push_back(__bfloat162float(p.q[ik]) * rq[size_t(t) * c.k_heads + hk]);
            h.k.push_back(__bfloat162float(p.k[ik]) * rk[size_t(t) * c.k_heads + hk]);
            h.v.push_back(__bfloat162float(p.v[iv]));
            h.d_o.push_back(__bfloat162float(p.d_o[iv]));
          }
          h.g.push_back(p.g[size_t(t) * c.v_heads + hv]);
          h.beta.push_back(p.beta[size_t(t) * c.v_heads + hv]);
        }
        h.initial.assign(size_t(d) * d, 0);
        h.d_final = h.initial;
        if (c.states)
          for (int e = 0; e < d * d; ++e) {
            h.initial[e] = p.initial[i * d * d + e];
            h.d_final[e] = p.d_final[i * d * d + e];
          }
        oracle_run(h);
      }
    });
  for (auto& t : pool) t.join();
  Errors err;
  for (int seq = 0; seq < n_seq; ++seq)
    for (int hk = 0; hk < c.k_heads; ++hk)
      for (int t = 0; t < c.lengths[seq]; ++t) {
        std::vector<double> y[2], dy[2];
        for (int side = 0; side < 2; ++side) {
          dy[side].assign(d, 0);
          for (int m = 0; m < group; ++m) {
            const OracleHead& h = heads[size_t(seq) * c.v_heads + hk * group + m];
            for (int e = 0; e < d; ++e) dy[side][e] += (side ? h.dk : h.dq)[size_t(t) * d + e];
            const auto& src = side ? h.k : h.q;
            y[side].assign(src.begin() + size_t(t) * d, src.begin() + size_t(t + 1) * d);
          }
          int token = p.cu[seq] + t;
          double r = (side ? rk : rq)[size_t(token) * c.k_heads + hk], dot = 0;
          for (int e = 0; e < d; ++e) dot += y[side][e] * dy[side][e];
          for (int e = 0; e < d; ++e)
            err.add(1 + side,
                    __bfloat162float(
                        (side ? out.dk : out.dq)[token * p.stride(c.k_heads) + hk * d + e]),
                    c.normalize ? r * (dy[side][e] - y[side][e] * dot) : dy[side][e]);
        }
      }
  for (size_t i = 0; i < heads.size(); ++i) {
    const OracleHead& h = heads[i];
    int seq = i / c.v_heads, hv = i % c.v_heads;
    for (int t = 0; t < h.tokens; ++t) {
      int token = p.cu[seq] + t;
      for (int e = 0; e < d; ++e) {
        size_t iv = token * p.stride(c.v_heads) + hv * d + e;
        err.add(0, __bfloat162float(out.o[iv]), h.o[size_t(t) * d + e]);
        err.add(3, __bfloat162float(out.dv[iv]), h.dv[size_t(t) * d + e]);
      }
      err.add(4, out.dg[size_t(token) * c.v_heads + hv], h.dg[t]);
      if (is_parallel(c.kind)) {  // dg cancels to nothing: its error counts beside its terms
        double read = 0;
        for (int e = 0; e < d; ++e) read += h.q[size_t(t) * d + e] * h.dq[size_t(t) * d + e];
        err.ref[4] += read * read;
      }
      // For beta near 0 and 1 what counts is the gradient before the sigmoid.
      double chain = c.kind == kBetaEdges ? h.beta[t] * (1 - h.beta[t]) : 1;
      err.add(5, out.dbeta[size_t(token) * c.v_heads + hv] * chain, h.dbeta[t] * chain);
    }
    if (c.states)
      for (int e = 0; e < d * d; ++e) {
        err.add(6, out.final[i * d * d + e], h.final[e]);
        err.add(7, out.d_initial[i * d * d + e], h.d_initial[e]);
      }
  }
  return err;
}

}  // namespace heddle::ops::cuda::gdn
