#include "ops/attention/attention.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <limits>

#include "ops/attention/attention_decode.h"
#include "ops/builtin.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(any<Attention>(), name, dtype);
}

Sequences packed(std::vector<std::int32_t> boundaries) {
  return Sequences::from_host(std::move(boundaries), device());
}

std::function<Tensors(const Tensors&)> run(const KernelTable& kernels, const Sequences& q,
                                           const Sequences& k) {
  return [&kernels, q, k](const Tensors& in) {
    return Tensors{attention(kernels, {in[0], in[1], in[2], q, k, 0})};
  };
}

/// One sequence by the textbook: all scores at once.
at::Tensor dense(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t groups = q.size(1) / k.size(1), m = q.size(0), n = k.size(0);
  const at::Tensor keys = k.repeat_interleave(groups, 1).permute({1, 2, 0});
  const at::Tensor values = v.repeat_interleave(groups, 1).transpose(0, 1);
  at::Tensor scores = at::matmul(q.transpose(0, 1), keys) / std::sqrt(double(q.size(2)));
  const at::Tensor hidden = at::ones({m, n}, q.options().dtype(at::kBool)).triu(n - m + 1);
  scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  return at::matmul(at::softmax(scores, -1), values).transpose(0, 1);
}

TEST(Attention, EqualsTheDenseFormulaPerSequence) {
  const Sequences q = packed({0, 3, 3, 33, 34}), k = packed({0, 7, 9, 39, 60});
  const Tensors in = {randn({34, 4, 10}, at::kDouble, 1), randn({60, 2, 10}, at::kDouble, 2),
                      randn({60, 2, 10}, at::kDouble, 3)};
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    const at::Tensor o = run(kernels, q, k)(in)[0];
    for (std::int64_t s = 0; s < q.count(); ++s) {
      const auto i = static_cast<std::size_t>(s);
      const std::int64_t q0 = q.cu_seqlens_host[i], k0 = k.cu_seqlens_host[i];
      const std::int64_t m = q.cu_seqlens_host[i + 1] - q0, n = k.cu_seqlens_host[i + 1] - k0;
      if (m == 0) continue;
      EXPECT_TRUE(close(
          o.narrow(0, q0, m),
          dense(in[0].narrow(0, q0, m), in[1].narrow(0, k0, n), in[2].narrow(0, k0, n)), 1e-12))
          << name << " sequence " << s;
    }
  }
}

TEST(Attention, GradientsMatchFiniteDifferences) {
  const Sequences q = packed({0, 1, 1, 6}), k = packed({0, 2, 3, 8});
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    EXPECT_TRUE(gradients_match(run(kernels, q, k),
                                {randn({6, 4, 5}, at::kDouble, 1), randn({8, 2, 5}, at::kDouble, 2),
                                 randn({8, 2, 5}, at::kDouble, 3)}))
        << name;
  }
}

TEST(Attention, KernelEqualsReference) {
  const Sequences sequences = packed({0, 1, 1, 30, 93, 157, 222, 351, 735});
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype), reference = table("reference", dtype);
    for (const auto& [hq, hkv, dim] :
         {std::tuple{4, 2, 64}, {3, 1, 24}, {2, 2, 128}, {8, 1, 37}, {2, 1, 256}}) {
      SCOPED_TRACE(std::string(c10::toString(dtype)) + " D " + std::to_string(dim));
      const Tensors in = {randn({735, hq, dim}, dtype, 1), randn({735, hkv, dim}, dtype, 2),
                          randn({735, hkv, dim}, dtype, 3)};
      const auto f = run(kernel, sequences, sequences);
      const auto g = run(reference, sequences, sequences);
      const double tolerance = tolerance_of(dtype);
      EXPECT_TRUE(close(f(in)[0], g(in)[0], tolerance));
      const Tensors actual = gradients_of(f, in), expected = gradients_of(g, in);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(close(actual[i], expected[i], 2 * tolerance)) << i;
      }
    }
  }
}

TEST(Attention, KernelEqualsReferenceWithMoreKeysThanQueriesAndFewer) {
  const Sequences q = packed({0, 5, 70, 75, 75, 335}), k = packed({0, 205, 270, 272, 277, 410});
  const KernelTable kernel = table(kOwn, at::kFloat), reference = table("reference", at::kFloat);
  const Tensors in = {randn({335, 4, 64}, at::kFloat, 1), randn({410, 2, 64}, at::kFloat, 2),
                      randn({410, 2, 64}, at::kFloat, 3)};
  EXPECT_TRUE(close(run(kernel, q, k)(in)[0], run(reference, q, k)(in)[0], 3e-6));
  const Tensors actual = gradients_of(run(kernel, q, k), in);
  const Tensors expected = gradients_of(run(reference, q, k), in);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(close(actual[i], expected[i], 1e-5)) << i;
}

TEST(Attention, SurvivesHugeScoresAndSeesNoNaNOfANeighbour) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  const Sequences sequences = packed({0, 70, 140, 200});
  Tensors in = {randn({200, 2, 64}, at::kFloat, 1) * 100, randn({200, 1, 64}, at::kFloat, 2) * 100,
                randn({200, 1, 64}, at::kFloat, 3)};
  const at::Tensor clean = run(kernel, sequences, sequences)(in)[0];
  EXPECT_FALSE(clean.isnan().any().item().toBool());
  const Tensors clean_gradients = gradients_of(run(kernel, sequences, sequences), in);
  for (at::Tensor& x : in) {
    x.narrow(0, 70, 70).fill_(std::numeric_limits<float>::quiet_NaN());
  }
  const at::Tensor o = run(kernel, sequences, sequences)(in)[0];
  const Tensors gradients = gradients_of(run(kernel, sequences, sequences), in);
  for (const std::int64_t begin : {0, 140}) {
    EXPECT_TRUE(identical(o.narrow(0, begin, 60), clean.narrow(0, begin, 60)));
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(
          identical(gradients[i].narrow(0, begin, 60), clean_gradients[i].narrow(0, begin, 60)));
    }
  }
}

TEST(Attention, ReadsStridedViews) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype);
    const Sequences sequences = packed({0, 100, 131});
    const Tensors in = {randn({131, 4, 32}, dtype, 1), randn({131, 2, 32}, dtype, 2),
                        randn({131, 2, 32}, dtype, 3)};
    const auto views = [&] {
      Tensors result;
      for (const at::Tensor& x : in) result.push_back(with_poisoned_gaps(x));
      return result;
    };
    EXPECT_TRUE(identical(run(kernel, sequences, sequences)(views())[0],
                          run(kernel, sequences, sequences)(in)[0]));
  }
}

TEST(Attention, SameBitsForEveryThreadCount) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  const Sequences sequences = packed({0, 301, 333, 600});
  const Tensors in = {randn({600, 4, 64}, at::kFloat, 1), randn({600, 2, 64}, at::kFloat, 2),
                      randn({600, 2, 64}, at::kFloat, 3)};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Tensors one = gradients_of(run(kernel, sequences, sequences), in);
  at::set_num_threads(2);
  const Tensors two = gradients_of(run(kernel, sequences, sequences), in);
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(identical(one[i], two[i])) << i;
}

TEST(AttentionDecode, EqualsTheLastRowOfAttention) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    for (const char* name : {"reference", kOwn}) {
      const KernelTable kernels = table_of(any<AttentionDecode>(), name, dtype);
      for (const std::int64_t dim : {64, 24, 128}) {
        const std::vector<std::int64_t> lengths = {0, 129, 299};
        const std::vector<std::vector<std::int32_t>> pages = {{7}, {0, 12, 5}, {13, 1, 10, 6, 8}};
        const CacheRows rows = CacheRows::from_host({3, 0, 4}, lengths, pages, device());
        const at::Tensor q = randn({3, 6, dim}, dtype, 1);
        // The new tokens are columns of a wider row, as those of a joined projection.
        const at::Tensor fresh = randn({3, 4, dim}, dtype, 2);
        at::Tensor k =
            at::full({14, 64, 2, dim}, std::numeric_limits<double>::quiet_NaN(), q.options());
        at::Tensor v = k.clone();
        const auto places = [&](std::size_t b, std::int64_t first, std::int64_t count) {
          std::vector<std::int64_t> found;
          rows.append_places(b, first, count, 64, found);
          return at::tensor(found, at::kLong).to(device());
        };
        for (std::size_t b = 0; b < 3; ++b) {
          k.flatten(0, 1).index_copy_(0, places(b, 0, lengths[b]),
                                      randn({lengths[b], 2, dim}, dtype, 10 + b));
          v.flatten(0, 1).index_copy_(0, places(b, 0, lengths[b]),
                                      randn({lengths[b], 2, dim}, dtype, 20 + b));
        }
        const at::Tensor o = attention_decode(
            kernels, {q, fresh.narrow(1, 0, 2), fresh.narrow(1, 2, 2), k, v, 0}, rows);
        EXPECT_TRUE(k.select(0, 9).isnan().all().item<bool>()) << "a page of no sequence";
        for (std::size_t b = 0; b < 3; ++b) {
          const auto row = static_cast<std::int64_t>(b);
          const at::Tensor seen = places(b, 0, lengths[b] + 1);
          const at::Tensor keys = k.flatten(0, 1).index_select(0, seen),
                           values = v.flatten(0, 1).index_select(0, seen);
          EXPECT_TRUE(identical(keys[lengths[b]], fresh.select(0, row).narrow(0, 0, 2)));
          EXPECT_TRUE(identical(values[lengths[b]], fresh.select(0, row).narrow(0, 2, 2)));
          const at::Tensor expected = dense(q.narrow(0, row, 1).to(at::kDouble),
                                            keys.to(at::kDouble), values.to(at::kDouble));
          EXPECT_TRUE(close(o.narrow(0, row, 1), expected, tolerance_of(dtype))) << name << b;
        }
      }
      const at::Tensor one = randn({1, 2, 8}, dtype, 1), cache = randn({2, 4, 2, 8}, dtype, 1);
      const auto decode = [&](std::int32_t page, std::int64_t length) {
        attention_decode(kernels, {randn({1, 6, 8}, dtype, 1), one, one, cache, cache, 0},
                         CacheRows::from_host({0}, {length}, {{page}}, device()));
      };
      EXPECT_THROW(decode(0, 4), c10::Error) << "no room";
      EXPECT_THROW(decode(2, 0), c10::Error) << "no such page";
    }
  }
}

TEST(OutputGate, GradientsMatchAndKernelEqualsReference) {
  const auto gate_table = [](const char* name, c10::ScalarType dtype) {
    return table_of(any<OutputGate>(), name, dtype);
  };
  const auto f = [](const KernelTable& kernels) {
    return [&kernels](const Tensors& in) { return Tensors{output_gate(kernels, in[0], in[1])}; };
  };
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = gate_table(name, at::kDouble);
    EXPECT_TRUE(gradients_match(
        f(kernels), {randn({3, 2, 7}, at::kDouble, 1), randn({3, 2, 7}, at::kDouble, 2)}));
  }
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = gate_table(kOwn, dtype), reference = gate_table("reference", dtype);
    for (const std::int64_t tokens : {0, 1, 129}) {
      const Tensors in = {randn({tokens, 3, 65}, dtype, 1),
                          with_poisoned_gaps(randn({tokens, 3, 65}, dtype, 2), 65)};
      EXPECT_TRUE(close(f(kernel)(in)[0], f(reference)(in)[0], tolerance_of(dtype)));
      const Tensors g = gradients_of(f(kernel), in), expected = gradients_of(f(reference), in);
      EXPECT_TRUE(close(g[0], expected[0], tolerance_of(dtype)));
      EXPECT_TRUE(close(g[1], expected[1], tolerance_of(dtype)));
    }
  }
}

}  // namespace
}  // namespace heddle::ops::testing
