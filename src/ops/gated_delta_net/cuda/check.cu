// Checks of the CUDA gated delta rule against the double-precision recurrence; exit status 1 on
// failure.
//   gdn_cuda_check [portable|hopper|all] [long|small]
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check_problem.h"

namespace heddle::ops::cuda::gdn {
namespace {

/// The larger; NaN is larger than any number.
double larger(double a, double b) { return std::isnan(b) ? INFINITY : std::max(a, b); }

int failures = 0;
void expect(bool ok, const std::string& what) {
  if (!ok) ++failures;
  if (!ok) std::printf("FAILED %s\n", what.c_str());
}

/// Bounds: bf16 operands give 2e-3 to 1e-2 (docs/gdn.md, section 9); dg of correlated keys is the
/// worst.
void check_case(const Case& c, GatedDeltaNetKernel kernel, int seed) {
  Problem p(c, seed);
  Outputs out = p.run(kernel);
  Errors e = compare(p, out);
  bool hard = c.kind == kCorrelated || is_parallel(c.kind);
  std::string line, name = std::string(kKindNames[c.kind]) + " " + std::to_string(c.k_heads) + "/" +
                           std::to_string(c.v_heads) + "x" + std::to_string(c.dim) + " T=";
  for (size_t i = 0; i < c.lengths.size() && i < 8; ++i)
    name += (i ? "," : "") + std::to_string(c.lengths[i]);
  if (c.segment_chunks > 0) name += " split at " + std::to_string(c.segment_chunks);
  bool ok = true;
  for (int i = 0; i < Errors::kCount; ++i) {
    char buf[64];
    std::snprintf(buf, sizeof buf, " %s %.1e", Errors::kNames[i], e.rel(i));
    if (e.ref[i] > 0 || e.diff[i] > 0) line += buf;
    double bound = i == 4 ? (hard ? 6e-2 : 2e-2) : hard ? 1.5e-2 : 8e-3;
    if (!(e.rel(i) <= bound)) ok = false;
  }
  std::printf("%-44s%s\n", name.c_str(), line.c_str());
  expect(ok, name);
  expect(p.run(kernel, 0x5a) == out, name + ": bitwise repeatable");
}

/// The saved inverse T' = (I + M diag(beta))^-1 of every chunk against substitution in double. What
/// bf16 rounds is at most 1, by 2^-9, and the merges of blocks in fp16 may add half of that; an
/// expansion in powers, or merges in bf16, lose more. On the diagonal and above nothing is rounded.
void check_inverse(GatedDeltaNetKernel kernel, int dim, Kind kind, float beta, int seed) {
  Problem p({{37, 191}, 1, 2, dim, kind, false, true}, seed);
  if (beta > 0) std::fill(p.beta.begin(), p.beta.end(), beta);
  GatedDeltaNetShape shape{p.tokens, 2, 1, 2, dim};
  GatedDeltaNetOptions options{1.f, true, kernel};
  Buffer<bf16> q(p.q), k(p.k), v(p.v), o(p.v.size());
  Buffer<float> g(p.g), b(p.beta);
  Buffer<int> cu(p.cu);
  Buffer<char> saved(gated_delta_net_saved_bytes(shape, true));
  GatedDeltaNetInputs in{{q.p, dim}, {k.p, dim}, {v.p, 2 * dim}, g.p, b.p, cu.p};
  GatedDeltaNetForward out{{o.p, 2 * dim}, nullptr, saved.p};
  gated_delta_net_forward(shape, options, in, out, nullptr);
  GDN_CUDA(cudaDeviceSynchronize());
  const bf16* solve = forward_args(shape, options, in, out).solve;
  constexpr int kChunks = 4;
  std::vector<bf16> images(size_t(kChunks) * 2 * 4096);
  GDN_CUDA(cudaMemcpy(images.data(), solve, images.size() * 2, cudaMemcpyDeviceToHost));
  double worst = 0, upper = 0;
  const int first[kChunks + 1] = {0, 37, 101, 165, 228};
  for (int c = 0; c < kChunks; ++c)
    for (int h = 0; h < 2; ++h) {
      int n = first[c + 1] - first[c];
      auto key = [&](int i, int e) { return __bfloat162float(p.k[(first[c] + i) * dim + e]); };
      auto dot = [&](int i, int j) {
        double sum = 0;
        for (int e = 0; e < dim; ++e) sum += double(key(i, e)) * key(j, e);
        return sum;
      };
      std::vector<double> lower(4096), inverse(4096), r(n);
      for (int i = 0; i < n; ++i) r[i] = 1 / std::sqrt(dot(i, i) + 1e-6);
      for (int i = 0; i < n; ++i) {
        double decay = 0;  // from token j to token i
        for (int j = i - 1; j >= 0; --j) {
          decay += p.g[(first[c] + j + 1) * 2 + h];
          lower[i * 64 + j] =
              std::exp(decay) * dot(i, j) * r[i] * r[j] * p.beta[(first[c] + j) * 2 + h];
        }
      }
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j <= i; ++j) {
          double x = i == j;
          for (int m = j; m < i; ++m) x -= lower[i * 64 + m] * inverse[m * 64 + j];
          inverse[i * 64 + j] = x;
        }
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 64; ++j) {
          // 16-byte pieces of a row are exchanged by XOR with row % 8.
          int at = (c * 2 + h) * 4096 + i * 64 + (j / 8 ^ i % 8) * 8 + j % 8;
          double error = std::fabs(__bfloat162float(images[at]) - inverse[i * 64 + j]);
          worst = larger(worst, error);
          if (i <= j) upper = larger(upper, error);
        }
    }
  char beta_text[16] = "as usual";
  if (beta > 0) std::snprintf(beta_text, sizeof beta_text, "%g", beta);
  std::printf("inverse, %s, beta %s, head dimension %d: largest error %.1e\n", kKindNames[kind],
              beta_text, dim, worst);
  expect(worst <= 3e-3 && upper == 0, "inverse");
}

/// Two sequences alone, and beside many others: with more segments and heads a CTA of the wgmma
/// kernels owns all of V's columns instead of half.
void check_columns(GatedDeltaNetKernel kernel, Kind kind, int seed) {
  std::vector<int> lengths = {700, 330};  // more chunks than stages of a pipeline
  lengths.resize(27, 3);
  Problem many({lengths, 2, 4, 128, kind, true, true, 0, 1 << 20}, seed);
  Problem few({{700, 330}, 2, 4, 128, kind, true, true, 0, 1 << 20}, seed);
  auto first = [](auto& to, const auto& from) { std::copy_n(from.begin(), to.size(), to.begin()); };
  first(few.q, many.q);
  first(few.k, many.k);
  first(few.v, many.v);
  first(few.d_o, many.d_o);
  first(few.g, many.g);
  first(few.beta, many.beta);
  first(few.initial, many.initial);
  first(few.d_final, many.d_final);
  Outputs all = many.run(kernel), half = few.run(kernel);
  Errors e;
  auto compare = [&](int i, const auto& got, const auto& want) {
    for (size_t n = 0; n < got.size(); ++n) e.add(i, double(float(got[n])), double(float(want[n])));
  };
  compare(0, half.o, all.o);
  compare(1, half.dq, all.dq);
  compare(2, half.dk, all.dk);
  compare(3, half.dv, all.dv);
  compare(4, half.dg, all.dg);
  compare(5, half.dbeta, all.dbeta);
  compare(6, half.final, all.final);
  compare(7, half.d_initial, all.d_initial);
  double worst = 0;
  for (int i = 0; i < Errors::kCount; ++i) worst = larger(worst, e.rel(i));
  std::printf("few and many sequences, %s: largest difference %.1e\n", kKindNames[kind], worst);
  expect(worst <= 8e-3, "few and many sequences");
}

/// The middle sequence is NaN; its neighbours must not notice.
void check_isolation(GatedDeltaNetKernel kernel, int segment_chunks) {
  Case c{{65, 37, 130}, 2, 4, 128, kLogSigmoid, true, true, 0, segment_chunks};
  Problem clean(c, 77), dirty(c, 77);
  for (int t = dirty.cu[1]; t < dirty.cu[2]; ++t) {
    for (auto* x : {&dirty.q, &dirty.k})
      std::fill_n(x->begin() + t * dirty.stride(2), 256, __float2bfloat16(NAN));
    for (auto* x : {&dirty.v, &dirty.d_o})
      std::fill_n(x->begin() + t * dirty.stride(4), 512, __float2bfloat16(NAN));
    for (auto* x : {&dirty.g, &dirty.beta}) std::fill_n(x->begin() + t * 4, 4, NAN);
  }
  for (auto* x : {&dirty.initial, &dirty.d_final})
    std::fill_n(x->begin() + size_t(4) * 128 * 128, size_t(4) * 128 * 128, NAN);
  Outputs a = clean.run(kernel), b = dirty.run(kernel);
  bool same = true;
  auto rows = [&](const auto& x, const auto& y, size_t width, size_t first, size_t last) {
    same &= std::memcmp(&x[first * width], &y[first * width],
                        (last - first) * width * sizeof(x[0])) == 0;
  };
  for (int s : {0, 2}) {
    size_t t0 = clean.cu[s], t1 = clean.cu[s + 1];
    rows(a.o, b.o, 512, t0, t1);
    rows(a.dv, b.dv, 512, t0, t1);
    rows(a.dq, b.dq, 256, t0, t1);
    rows(a.dk, b.dk, 256, t0, t1);
    rows(a.dg, b.dg, 4, t0, t1);
    rows(a.dbeta, b.dbeta, 4, t0, t1);
    rows(a.final, b.final, size_t(4) * 128 * 128, s, s + 1);
    rows(a.d_initial, b.d_initial, size_t(4) * 128 * 128, s, s + 1);
  }
  expect(same, "NaN in a neighbouring sequence leaks");
  std::printf("isolation of a NaN sequence: %s\n", same ? "ok" : "FAILED");
}

void check_graph(GatedDeltaNetKernel kernel, int segment_chunks) {
  Problem p({{100, 0, 300}, 2, 4, 128, kLogSigmoid, true, true, 8, segment_chunks}, 5);
  bool same = p.run(kernel) == p.run(kernel, 0x5a, true);
  expect(same, "graph capture");
  std::printf("CUDA graph capture and replay: %s\n", same ? "ok" : "FAILED");
}

void check_all(GatedDeltaNetKernel kernel, const std::string& extent) {
  std::printf("-- %s\n",
              kernel == GatedDeltaNetKernel::kHopper ? "hopper (wgmma)" : "portable (mma.sync)");
  bool portable = kernel == GatedDeltaNetKernel::kPortable;  // which alone has head dimension 256
  if (extent == "small") {
    for (int split : {0, 1})
      check_case({{29, 0, 65, 300}, 1, 2, 128, kLogSigmoid, true, true, 8, split}, kernel, 1);
    std::vector<int> many(kSplitValues + 10);  // enough sequences for CTAs of all columns of V
    for (size_t i = 0; i < many.size(); ++i) many[i] = i * 37 % 331;
    check_case({many, 1, 1, 128, kLogSigmoid, true, true}, kernel, 2);
    for (int split : {0, 1})
      if (portable)
        check_case({{29, 0, 130}, 1, 2, 256, kLogSigmoid, true, true, 8, split}, kernel, 3);
    return;
  }
  int seed = 1;
  for (int n : {1, 29, 63, 64, 65, 129})
    check_case({{n}, 1, 1, 128, kLogSigmoid, true, true}, kernel, ++seed);
  check_case({{0, 1, 0, 200, 64, 0, 0, 31}, 2, 2, 128, kLogSigmoid, true, true, 8}, kernel, ++seed);
  for (int group : {1, 2, 3, 4})
    check_case({{320}, 2, 2 * group, 128, kLogSigmoid, false, true}, kernel, ++seed);
  check_case({{300, 150}, 2, 4, 128, kLogSigmoid, true, false}, kernel, ++seed);
  for (Kind kind : {kNoDecay, kStrong, kCorrelated, kIdentical, kAlternating, kBetaEdges})
    check_case({{1024}, 1, 4, 128, kind, !is_parallel(kind), true}, kernel, ++seed);
  std::vector<int> many(
      300);  // enough sequence-heads for the unsplit kernels, and several ring turns
  for (int i = 0; i < 300; ++i) many[i] = i * 37 % 451;
  check_case({many, 1, 2, 128, kLogSigmoid, true, true}, kernel, ++seed);
  for (int group : {1, 2, 3, 4})
    check_case({{129, 1, 0, 300}, 2, 2 * group, 64, kLogSigmoid, true, true}, kernel, ++seed);
  for (Kind kind : {kLogSigmoid, kNoDecay, kCorrelated, kIdentical, kAlternating})
    for (float beta : {0.f, 1.f}) check_inverse(kernel, 128, kind, beta, ++seed);
  for (Kind kind : {kCorrelated, kIdentical, kAlternating})
    check_inverse(kernel, 64, kind, 0, ++seed);
  for (Kind kind : {kLogSigmoid, kNoDecay, kStrong}) check_columns(kernel, kind, ++seed);
  if (portable) {
    for (int group : {1, 2, 3, 4})
      check_case({{63, 1, 0, 129}, 2, 2 * group, 256, kLogSigmoid, true, true, 8}, kernel, ++seed);
    for (Kind kind : {kNoDecay, kStrong, kCorrelated, kIdentical, kAlternating, kBetaEdges})
      check_case({{300}, 1, 2, 256, kind, !is_parallel(kind), true}, kernel, ++seed);
    for (Kind kind : {kLogSigmoid, kNoDecay, kStrong})
      check_case({{65, 0, 321}, 1, 2, 256, kind, true, true, 0, 1}, kernel, ++seed);
    check_case({{130, 70}, 2, 4, 256, kLogSigmoid, true, false}, kernel, ++seed);
    check_inverse(kernel, 256, kCorrelated, 0, ++seed);
  }
  for (int pieces : {1, 2, 5})
    for (Kind kind : {kLogSigmoid, kNoDecay, kStrong, kCorrelated, kAlternating, kBetaEdges})
      check_case({{65, 0, 700, 29, 321}, 1, 4, 128, kind, true, true, 0, pieces}, kernel, ++seed);
  check_case({{300, 150}, 2, 4, 128, kLogSigmoid, true, false, 0, 1}, kernel, ++seed);
  check_case({{129, 1, 0, 500}, 2, 4, 64, kLogSigmoid, true, true, 0, 2}, kernel, ++seed);
  check_isolation(kernel, 0);
  check_isolation(kernel, 1);
  check_graph(kernel, 0);
  check_graph(kernel, 1);
  if (extent == "long")
    for (int split : {1 << 20, 16})
      for (Kind kind : {kLogSigmoid, kNoDecay, kStrong, kCorrelated})
        check_case({{8192}, 2, 4, 128, kind, false, true, 0, split}, kernel, ++seed);
}

}  // namespace
}  // namespace heddle::ops::cuda::gdn

int main(int argc, char** argv) {
  using namespace heddle::ops::cuda;
  std::string which = argc > 1 ? argv[1] : "all", extent = argc > 2 ? argv[2] : "";
  if (which != "hopper") gdn::check_all(GatedDeltaNetKernel::kPortable, extent);
  if (which != "portable" && gated_delta_net_kernel_for_device() == GatedDeltaNetKernel::kHopper)
    gdn::check_all(GatedDeltaNetKernel::kHopper, extent);
  std::printf(gdn::failures ? "%d checks FAILED\n" : "all checks passed\n", gdn::failures);
  return gdn::failures != 0;
}
