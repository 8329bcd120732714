#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/compute_type.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops::gated_delta_rule_sequential {
namespace {

constexpr double kNormEps = 1e-6;
constexpr std::int64_t kReplay = 64;  // tokens between kept states

at::Tensor to_double(const at::Tensor& x) {
  return x.defined() ? x.to(at::kDouble).contiguous() : x;
}

/// All inputs in double, q and k normalised and q scaled.
struct Problem {
  std::int64_t T, Hk, Hv, K, V, group;
  double scale;
  bool normalize;
  at::Tensor q, k, v, g, beta, initial;
  std::vector<double> rq, rk;  // [T,Hk] factors that made unit rows

  explicit Problem(const GatedDeltaRule::Inputs& in)
      : T(in.q.size(0)), Hk(in.q.size(1)), Hv(in.v.size(1)), K(in.q.size(2)), V(in.v.size(2)) {
    group = Hv / Hk;
    scale = in.options.scale != 0 ? in.options.scale : 1 / std::sqrt(static_cast<double>(K));
    normalize = in.options.normalize_qk;
    q = to_double(in.q).clone();
    k = to_double(in.k).clone();
    v = to_double(in.v);
    g = to_double(in.g);
    beta = to_double(in.beta);
    initial = to_double(in.initial_state);
    rq = unit_rows(q, scale);
    rk = unit_rows(k, 1);
  }

  std::vector<double> unit_rows(at::Tensor& x, double factor) const {
    std::vector<double> r(static_cast<std::size_t>(T * Hk), 1);
    double* data = x.mutable_data_ptr<double>();
    for (std::int64_t row = 0; row < T * Hk; ++row) {
      double sum = 0;
      for (std::int64_t i = 0; i < K; ++i) sum += data[row * K + i] * data[row * K + i];
      if (normalize) r[row] = 1 / std::sqrt(sum + kNormEps);
      for (std::int64_t i = 0; i < K; ++i) data[row * K + i] *= r[row] * factor;
    }
    return r;
  }

  const double* q_row(std::int64_t t, std::int64_t h) const {
    return q.const_data_ptr<double>() + (t * Hk + h / group) * K;
  }
  const double* k_row(std::int64_t t, std::int64_t h) const {
    return k.const_data_ptr<double>() + (t * Hk + h / group) * K;
  }
  const double* v_row(std::int64_t t, std::int64_t h) const {
    return v.const_data_ptr<double>() + (t * Hv + h) * V;
  }
  double gamma(std::int64_t t, std::int64_t h) const {
    return std::exp(g.const_data_ptr<double>()[t * Hv + h]);
  }
  double beta_at(std::int64_t t, std::int64_t h) const {
    return beta.const_data_ptr<double>()[t * Hv + h];
  }

  /// S^T k before the update of token t, then the update. `e` receives v - gamma S^T k.
  void advance(std::vector<double>& S, std::int64_t t, std::int64_t h,
               std::vector<double>& e) const {
    const double* kt = k_row(t, h);
    const double* vt = v_row(t, h);
    const double decay = gamma(t, h), b = beta_at(t, h);
    for (std::int64_t j = 0; j < V; ++j) e[j] = vt[j];
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < V; ++j) {
        S[i * V + j] *= decay;
        e[j] -= S[i * V + j] * kt[i];
      }
    }
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < V; ++j) S[i * V + j] += kt[i] * b * e[j];
    }
  }

  std::vector<double> start(std::int64_t s, std::int64_t h) const {
    std::vector<double> S(static_cast<std::size_t>(K * V), 0);
    if (initial.defined()) {
      const double* from = initial.const_data_ptr<double>() + (s * Hv + h) * K * V;
      S.assign(from, from + K * V);
    }
    return S;
  }
};

/// The gradient of x from that of y = x r factor, r = (sum x^2 + eps)^-1/2, in place.
void through_norm(at::Tensor& dy, const at::Tensor& y, const std::vector<double>& r, double factor,
                  bool normalize, std::int64_t K) {
  double* d = dy.mutable_data_ptr<double>();
  const double* unit = y.const_data_ptr<double>();
  for (std::size_t row = 0; row < r.size(); ++row) {
    double dot = 0;
    for (std::int64_t i = 0; i < K; ++i) dot += d[row * K + i] * unit[row * K + i];
    for (std::int64_t i = 0; i < K; ++i) {
      double& value = d[row * K + i];
      value =
          normalize ? r[row] * (factor * value - unit[row * K + i] / factor * dot) : factor * value;
    }
  }
}

}  // namespace

GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& in, bool) {
  const Problem p(in);
  GatedDeltaRuleForward out;
  at::Tensor o = at::empty({p.T, p.Hv, p.V}, at::kDouble);
  at::Tensor final_state = at::empty({in.sequences.count(), p.Hv, p.K, p.V}, at::kDouble);
  std::vector<double> e(static_cast<std::size_t>(p.V));
  for (std::int64_t s = 0; s < in.sequences.count(); ++s) {
    for (std::int64_t h = 0; h < p.Hv; ++h) {
      std::vector<double> S = p.start(s, h);
      for (std::int64_t t = in.sequences.cu_seqlens_host[s];
           t < in.sequences.cu_seqlens_host[s + 1]; ++t) {
        p.advance(S, t, h, e);
        double* row = o.mutable_data_ptr<double>() + (t * p.Hv + h) * p.V;
        for (std::int64_t j = 0; j < p.V; ++j) row[j] = 0;
        for (std::int64_t i = 0; i < p.K; ++i) {
          for (std::int64_t j = 0; j < p.V; ++j) row[j] += S[i * p.V + j] * p.q_row(t, h)[i];
        }
      }
      std::copy(S.begin(), S.end(),
                final_state.mutable_data_ptr<double>() + (s * p.Hv + h) * p.K * p.V);
    }
  }
  out.o = o.to(in.v.scalar_type());
  if (in.options.want_final_state) out.final_state = final_state.to(compute_type(in.v));
  return out;
}

GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs& in, const GatedDeltaRuleForward&,
                                 const at::Tensor& grad_o, const at::Tensor& grad_final_state) {
  const Problem p(in);
  const at::Tensor dO = to_double(grad_o), dfinal = to_double(grad_final_state);
  at::Tensor dq = at::zeros({p.T, p.Hk, p.K}, at::kDouble), dk = at::zeros_like(dq);
  at::Tensor dv = at::zeros({p.T, p.Hv, p.V}, at::kDouble);
  at::Tensor dg = at::zeros({p.T, p.Hv}, at::kDouble), dbeta = at::zeros_like(dg);
  at::Tensor dinitial = at::zeros({in.sequences.count(), p.Hv, p.K, p.V}, at::kDouble);
  const std::int64_t K = p.K, V = p.V, KV = K * V;
  std::vector<double> e(static_cast<std::size_t>(V)), de(e), Sk(e);
  for (std::int64_t s = 0; s < in.sequences.count(); ++s) {
    const std::int64_t begin = in.sequences.cu_seqlens_host[s];
    const std::int64_t end = in.sequences.cu_seqlens_host[s + 1];
    for (std::int64_t h = 0; h < p.Hv; ++h) {
      std::vector<std::vector<double>> kept;
      std::vector<double> S = p.start(s, h);
      for (std::int64_t t = begin; t < end; ++t) {
        if ((t - begin) % kReplay == 0) kept.push_back(S);
        p.advance(S, t, h, e);
      }
      std::vector<double> dS(static_cast<std::size_t>(KV), 0);
      if (dfinal.defined()) {
        const double* from = dfinal.const_data_ptr<double>() + (s * p.Hv + h) * KV;
        dS.assign(from, from + KV);
      }
      for (std::int64_t block = static_cast<std::int64_t>(kept.size()) - 1; block >= 0; --block) {
        const std::int64_t first = begin + block * kReplay;
        const std::int64_t last = std::min(end, first + kReplay);
        std::vector<std::vector<double>> before;  // the state before each token of the block
        S = kept[block];
        for (std::int64_t t = first; t < last; ++t) {
          before.push_back(S);
          p.advance(S, t, h, e);
        }
        for (std::int64_t t = last - 1; t >= first; --t) {
          const std::vector<double>& S0 = before[t - first];
          const double *q = p.q_row(t, h), *k = p.k_row(t, h), *v = p.v_row(t, h);
          const double decay = p.gamma(t, h), beta = p.beta_at(t, h);
          double* dq_row = dq.mutable_data_ptr<double>() + (t * p.Hk + h / p.group) * K;
          double* dk_row = dk.mutable_data_ptr<double>() + (t * p.Hk + h / p.group) * K;
          double* dv_row = dv.mutable_data_ptr<double>() + (t * p.Hv + h) * V;
          for (std::int64_t j = 0; j < V; ++j) Sk[j] = de[j] = 0;
          for (std::int64_t i = 0; i < K; ++i) {
            for (std::int64_t j = 0; j < V; ++j) Sk[j] += S0[i * V + j] * k[i];
          }
          for (std::int64_t j = 0; j < V; ++j) e[j] = v[j] - decay * Sk[j];
          if (dO.defined()) {
            const double* d = dO.const_data_ptr<double>() + (t * p.Hv + h) * V;
            for (std::int64_t i = 0; i < K; ++i) {
              for (std::int64_t j = 0; j < V; ++j) {
                dS[i * V + j] += q[i] * d[j];
                dq_row[i] += (decay * S0[i * V + j] + k[i] * beta * e[j]) * d[j];
              }
            }
          }
          double dbeta_t = 0, dgamma = 0;
          for (std::int64_t i = 0; i < K; ++i) {
            for (std::int64_t j = 0; j < V; ++j) {
              de[j] += dS[i * V + j] * k[i];
              dk_row[i] += dS[i * V + j] * beta * e[j];
            }
          }
          for (std::int64_t j = 0; j < V; ++j) {
            dbeta_t += de[j] * e[j];
            de[j] *= beta;
            dv_row[j] = de[j];
            dgamma -= de[j] * Sk[j];
          }
          for (std::int64_t i = 0; i < K; ++i) {
            for (std::int64_t j = 0; j < V; ++j) {
              dk_row[i] -= decay * S0[i * V + j] * de[j];
              dgamma += dS[i * V + j] * S0[i * V + j];
              dS[i * V + j] = decay * (dS[i * V + j] - k[i] * de[j]);
            }
          }
          dbeta.mutable_data_ptr<double>()[t * p.Hv + h] = dbeta_t;
          dg.mutable_data_ptr<double>()[t * p.Hv + h] = dgamma * decay;
        }
      }
      std::copy(dS.begin(), dS.end(), dinitial.mutable_data_ptr<double>() + (s * p.Hv + h) * KV);
    }
  }
  through_norm(dq, p.q, p.rq, p.scale, p.normalize, K);
  through_norm(dk, p.k, p.rk, 1, p.normalize, K);
  GatedDeltaRuleGradients grads;
  grads.q = dq.to(in.q.scalar_type());
  grads.k = dk.to(in.k.scalar_type());
  grads.v = dv.to(in.v.scalar_type());
  grads.g = dg.to(in.g.scalar_type());
  grads.beta = dbeta.to(in.beta.scalar_type());
  if (in.initial_state.defined()) grads.initial_state = dinitial.to(in.initial_state.scalar_type());
  return grads;
}

}  // namespace heddle::ops::gated_delta_rule_sequential
