// Double-precision reference of the gated delta rule: the four lines of the recurrence, token by
// token, and their reverse-time derivative. For tests only; one call handles one (sequence, value
// head).
#pragma once

#include <cmath>
#include <vector>

namespace heddle::ops::cuda::gdn {

/// Row-major [tokens, K] or [tokens, V] arrays of one head; q and k already normalised.
struct OracleHead {
  int tokens = 0, dim = 0;
  double scale = 1.0;
  std::vector<double> q, k, v, g, beta, initial, d_o, d_final;     // in; states [K, V]
  std::vector<double> o, final, dq, dk, dv, dg, dbeta, d_initial;  // out
};

namespace oracle {

/// S <- e^g S + k u^T with u = beta (v - e^g S^T k); o = scale S^T q. u and e may be null.
inline void step(const OracleHead& h, int t, std::vector<double>& s, double* e_out, double* o_out) {
  const int d = h.dim;
  const double gamma = std::exp(h.g[t]);
  const double *q = &h.q[size_t(t) * d], *k = &h.k[size_t(t) * d], *v = &h.v[size_t(t) * d];
  std::vector<double> e(v, v + d);
  for (int i = 0; i < d; ++i) {
    double* row = &s[size_t(i) * d];
    for (int j = 0; j < d; ++j) {
      row[j] *= gamma;
      e[j] -= row[j] * k[i];
    }
  }
  for (int i = 0; i < d; ++i) {
    double* row = &s[size_t(i) * d];
    const double f = k[i] * h.beta[t];
    for (int j = 0; j < d; ++j) row[j] += f * e[j];
  }
  if (e_out) std::copy(e.begin(), e.end(), e_out);
  if (o_out) {
    std::fill(o_out, o_out + d, 0.0);
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j) o_out[j] += h.scale * q[i] * s[size_t(i) * d + j];
  }
}

}  // namespace oracle

inline void oracle_run(OracleHead& h) {
  const int n = h.tokens, d = h.dim, segment = 64;
  const size_t nd = size_t(n) * d;
  h.o.assign(nd, 0);
  h.dq.assign(nd, 0);
  h.dk.assign(nd, 0);
  h.dv.assign(nd, 0);
  h.dg.assign(n, 0);
  h.dbeta.assign(n, 0);
  std::vector<double> s = h.initial;
  std::vector<std::vector<double>> checkpoint;
  for (int t = 0; t < n; ++t) {
    if (t % segment == 0) checkpoint.push_back(s);
    oracle::step(h, t, s, nullptr, &h.o[size_t(t) * d]);
  }
  h.final = s;
  std::vector<double> ds = h.d_final, e(size_t(segment) * d), de(d), du(d), key(d);
  std::vector<std::vector<double>> before(segment);
  for (int c = (n - 1) / segment; n > 0 && c >= 0; --c) {
    const int end = std::min(n, (c + 1) * segment);
    s = checkpoint[c];
    for (int t = c * segment; t < end; ++t) {
      before[t % segment] = s;
      oracle::step(h, t, s, &e[size_t(t % segment) * d], nullptr);
    }
    for (int t = end - 1; t >= c * segment; --t) {
      const std::vector<double>& s0 = before[t % segment];
      const double gamma = std::exp(h.g[t]), beta = h.beta[t];
      const double *q = &h.q[size_t(t) * d], *k = &h.k[size_t(t) * d], *go = &h.d_o[size_t(t) * d],
                   *et = &e[size_t(t % segment) * d];
      double* dq = &h.dq[size_t(t) * d];
      double* dk = &h.dk[size_t(t) * d];
      std::fill(du.begin(), du.end(), 0.0);
      for (int i = 0; i < d; ++i) {
        double* row = &ds[size_t(i) * d];
        const double* r0 = &s0[size_t(i) * d];
        double a = 0, b = 0;
        for (int j = 0; j < d; ++j) {
          a += (gamma * r0[j] + k[i] * beta * et[j]) * go[j];
          row[j] += h.scale * q[i] * go[j];
          du[j] += row[j] * k[i];
          b += row[j] * beta * et[j];
        }
        dq[i] = h.scale * a;
        dk[i] = b;
      }
      double db = 0;
      for (int j = 0; j < d; ++j) {
        db += du[j] * et[j];
        de[j] = beta * du[j];
        h.dv[size_t(t) * d + j] = de[j];
      }
      h.dbeta[t] = db;
      double dgamma = 0;
      for (int i = 0; i < d; ++i) {
        double* row = &ds[size_t(i) * d];
        const double* r0 = &s0[size_t(i) * d];
        double b = 0;
        for (int j = 0; j < d; ++j) {
          b += r0[j] * de[j];
          dgamma += (row[j] - k[i] * de[j]) * r0[j];
          row[j] = gamma * (row[j] - k[i] * de[j]);
        }
        dk[i] -= gamma * b;
      }
      h.dg[t] = dgamma * gamma;
    }
  }
  h.d_initial = ds;
}

}  // namespace heddle::ops::cuda::gdn
