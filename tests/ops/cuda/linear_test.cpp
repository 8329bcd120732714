// The sums of products of linear layers on the GPU, against the reference in fp64 on the CPU.
#include "ops/linear/linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <gmock/gmock.h>

#include <array>

#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"
#include "ops/linear/few_row_lows.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype, const Target& device) {
  return table_of(any<Linear>(), name, dtype, device);
}

/// The products in fp64 on the CPU.
Products exact(const Products& terms) {
  Products moved;
  for (const auto& [a, b, place] : terms)
    moved.push_back({a.cpu().to(at::kDouble), b.cpu().to(at::kDouble)});
  return moved;
}

struct Case {
  std::int64_t rows;
  std::vector<std::int64_t> columns;  ///< Columns of each sum.
  std::vector<std::int64_t> depths;   ///< Depths of each term of each sum.
  std::int64_t gap = 16;
};

/// All of these are sums of our own kernel.
const std::vector<Case> kSmallCases = {{512, {256}, {64, 16}}, {513, {8}, {8, 8}}};
// On 132 multiprocessors tiles of 64, 128 and 256 columns.
const std::vector<Case> kCases = {
    {640, {1024, 32}, {320, 16}},   {2049, {264, 32, 32, 512}, {1000, 24}},
    {4096, {2560}, {2560, 64, 16}}, {700, {512, 40}, {136}},
    {300, {256}, {64, 16}},         {600, {13}, {64, 16}},
    {600, {64}, {64, 4}},           {600, {64, 32}, {70, 16}, 5},
    {5000, {64, 72, 8}, {328}},     {2049, {512, 16, 16}, {64, 8}},
    {17000, {1024, 48, 56}, {512}}, {1500, {1000}, {136, 8}}};

class GpuLinear : public GpuFused {};

void expect_outputs(const std::vector<Case>& cases) {
  const KernelTable gpu_table = table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda});
  const KernelTable cpu_table = table("reference", at::kDouble, {});
  std::uint64_t seed = 0;
  for (const Case& c : cases) {
    std::vector<Products> sums, expected_sums;
    for (const std::int64_t columns : c.columns) {
      Products terms;
      for (const std::int64_t depth : c.depths)
        terms.push_back(
            {matrix(c.rows, depth, ++seed, c.gap), matrix(columns, depth, ++seed, c.gap)});
      expected_sums.push_back(exact(terms));
      sums.push_back(std::move(terms));
    }
    const Tensors actual = gpu_table.get<Linear>().forward(sums);
    const Tensors again = gpu_table.get<Linear>().forward(sums);
    const Tensors expected = cpu_table.get<Linear>().forward(expected_sums);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-2)) << c.rows << " rows, sum " << i;
      EXPECT_TRUE(identical(actual[i].cpu(), again[i].cpu())) << c.rows << " rows, sum " << i;
    }
  }
}

TEST_F(GpuLinear, OutputsEqualReference) { expect_outputs(kCases); }

// One product for a part of the device is cuBLAS's; what is read may have gaps, lie where bulk
// copies cannot read it, and end within a tile.
TEST_F(GpuLinear, OutputsOntoTensorsEqualReference) {
  const KernelTable gpu_table = table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda});
  const KernelTable cpu_table = table("reference", at::kDouble, {});
  std::uint64_t seed = 50;
  for (const Case& c : std::vector<Case>{{512, {256}, {64, 16}},
                                         {513, {8}, {8, 8}},
                                         {4096, {1024}, {264}},
                                         {16800, {256}, {72}},
                                         {16601, {200}, {512}},
                                         {2049, {264}, {1000, 24}},
                                         {1000, {64}, {64}},
                                         {1500, {1000}, {136, 8}},
                                         {300, {256}, {64, 16}},
                                         {600, {13}, {64, 16}},
                                         {600, {64}, {70, 16}, 5}}) {
    const std::int64_t columns = c.columns[0];
    const at::Tensor start = matrix(c.rows, columns, ++seed, c.gap);
    Products terms;
    for (const std::int64_t depth : c.depths)
      terms.push_back(
          {matrix(c.rows, depth, ++seed, c.gap), matrix(columns, depth, ++seed, c.gap)});
    const at::Tensor actual = gpu_table.get<Linear>().forward_onto(start, terms);
    const at::Tensor expected =
        cpu_table.get<Linear>().forward_onto(start.cpu().to(at::kDouble), exact(terms));
    EXPECT_TRUE(close(actual.cpu(), expected, 1e-2)) << c.rows << " rows";
    EXPECT_TRUE(identical(actual.cpu(), gpu_table.get<Linear>().forward_onto(start, terms).cpu()))
        << c.rows << " rows";
  }
}

// More than a few rows: narrow sums and low-rank terms share launches, wide products are cuBLAS's.
TEST_F(GpuLinear, LowRankTermsOfSomeRowsEqualReference) {
  expect_outputs({{17, {1024, 16}, {328}},
                  {64, {640, 64, 16, 16}, {256, 16}},
                  {64, {16, 512}, {1024, 128}},
                  {300, {520}, {64, 24}},
                  {511, {256, 8, 264}, {72, 8}}});
  const KernelTable gpu_table = table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda});
  const KernelTable cpu_table = table("reference", at::kDouble, {});
  for (const std::int64_t rows : {17, 64, 257}) {
    const at::Tensor start = matrix(rows, 520, 1, 16);
    const Products terms = {{matrix(rows, 256, 2, 16), matrix(520, 256, 3, 16)},
                            {matrix(rows, 16, 4, 16), matrix(520, 16, 5, 16)}};
    const at::Tensor found = gpu_table.get<Linear>().forward_onto(start, terms);
    EXPECT_TRUE(close(
        found.cpu(),
        cpu_table.get<Linear>().forward_onto(start.cpu().to(at::kDouble), exact(terms)), 1e-2))
        << rows;
    const Tensors as = {matrix(16, 256, 6, 0), matrix(8, 256, 7, 0)};
    const Tensors lows = few_row_lows(gpu_table.get<Linear>(), terms[0].a, as, {0.5, 2});
    ASSERT_EQ(lows.size(), 2U);
    for (std::size_t i = 0; i < 2; ++i) {
      const at::Tensor expected =
          terms[0].a.cpu().to(at::kDouble).mm(as[i].cpu().to(at::kDouble).t()) *
          (i == 0 ? 0.5 : 2.0);
      EXPECT_TRUE(close(lows[i].cpu(), expected, 1e-2)) << rows;
    }
  }
}

void expect_input_gradients(const std::vector<Case>& cases) {
  const KernelTable gpu_table = table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda});
  const KernelTable cpu_table = table("reference", at::kDouble, {});
  std::uint64_t seed = 100;
  for (const Case& c : cases) {
    Products terms;
    for (const std::int64_t depth : c.depths)
      terms.push_back(
          {matrix(c.rows, depth, ++seed, c.gap), matrix(depth, c.columns[0], ++seed, c.gap)});
    const at::Tensor actual = gpu_table.get<Linear>().backward(terms);
    EXPECT_TRUE(close(actual.cpu(), cpu_table.get<Linear>().backward(exact(terms)), 1e-2))
        << c.rows << " rows";
    EXPECT_TRUE(identical(actual.cpu(), gpu_table.get<Linear>().backward(terms).cpu()))
        << c.rows << " rows";
  }
}

TEST_F(GpuLinear, InputGradientsEqualReference) { expect_input_gradients(kCases); }

// A router and the gate of a shared expert: what has a single column lies in rows of 16 bytes.
TEST_F(GpuLinear, ALayerOfOneColumnBesideAnotherEqualsReference) {
  const Linear::Functions gpu_linear =
      table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda}).get<Linear>();
  const Linear::Functions exact_linear = table("reference", at::kDouble, {}).get<Linear>();
  for (const std::int64_t rows : {512, 2049}) {
    for (const std::int64_t narrow : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, " << narrow << " columns");
      const at::Tensor x = matrix(rows, 320, 1, 0), low = matrix(rows, 16, 2, 0),
                       w = matrix(256, 320, 3, 0), w_narrow = matrix(narrow, 320, 4, 0),
                       b = matrix(narrow, 16, 5, 0), a = matrix(16, 320, 6, 0);
      const std::vector<Products> sums = {{{x, w}}, {{x, w_narrow}, {low, b}}};
      const Tensors y = gpu_linear.forward(sums), again = gpu_linear.forward(sums),
                    expected = exact_linear.forward({exact(sums[0]), exact(sums[1])});
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(close(y[i].cpu(), expected[i], 1e-2)) << i;
        EXPECT_TRUE(identical(y[i].cpu(), again[i].cpu())) << i;
      }
      EXPECT_EQ(y[1].stride(0), 8);
      const at::Tensor dy = matrix(rows, 256, 7, 0),
                       dy_narrow = matrix(rows, 8, 8, 0).narrow(1, 0, narrow);
      const Products terms = {{dy, w}, {dy_narrow, w_narrow}, {low, a}};
      EXPECT_TRUE(
          close(gpu_linear.backward(terms).cpu(), exact_linear.backward(exact(terms)), 1e-2));
      const auto d = gpu_linear.low_rank_backward({{dy_narrow, b, low}});
      const auto d_expected = exact_linear.low_rank_backward(
          {{exact({{dy_narrow, b}})[0].a, exact({{dy_narrow, b}})[0].b, exact({{low, b}})[0].a}});
      EXPECT_TRUE(close(d.d_low.cpu(), d_expected.d_low, 1e-2));
      EXPECT_TRUE(close(d.d_b[0].cpu(), d_expected.d_b[0], 1e-4));
    }
  }
}

TEST_F(GpuLinear, WideProductsTakeAScale) {
  const at::Tensor dy = matrix(700, 48, 1, 0), x = matrix(700, 320, 2, 0);
  EXPECT_TRUE(identical(wide_product(dy, x, 2).cpu(), (wide_product(dy, x) * 2).cpu()));
  EXPECT_TRUE(close(wide_product(dy, x, 0.3).cpu(), (wide_product(dy, x) * 0.3).cpu(), 1e-6));
}

TEST_F(GpuLinear, SumsOfSmallShapes) {
  expect_outputs(kSmallCases);
  expect_input_gradients(kSmallCases);
}

void expect_low_rank_gradients(const std::vector<Case>& cases) {
  const KernelTable gpu_table = table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda});
  const KernelTable cpu_table = table("reference", at::kDouble, {});
  std::uint64_t seed = 200;
  for (const Case& c : cases) {
    const std::int64_t rank = c.depths[0];
    std::vector<LowRankChange> changes, expected_changes;
    for (const std::int64_t columns : c.columns) {
      changes.push_back({matrix(c.rows, columns, ++seed, c.gap),
                         matrix(columns, rank, ++seed, c.gap),
                         matrix(c.rows, rank, ++seed, c.gap)});
      const auto& [dy, b, low] = changes.back();
      expected_changes.push_back(
          {dy.cpu().to(at::kDouble), b.cpu().to(at::kDouble), low.cpu().to(at::kDouble)});
    }
    const auto actual = gpu_table.get<Linear>().low_rank_backward(changes);
    const auto again = gpu_table.get<Linear>().low_rank_backward(changes);
    const auto expected = cpu_table.get<Linear>().low_rank_backward(expected_changes);
    EXPECT_TRUE(close(actual.d_low.cpu(), expected.d_low, 1e-2)) << c.rows << " rows";
    EXPECT_TRUE(identical(actual.d_low.cpu(), again.d_low.cpu())) << c.rows << " rows";
    for (std::size_t i = 0; i < expected.d_b.size(); ++i) {
      EXPECT_TRUE(close(actual.d_b[i].cpu(), expected.d_b[i], 1e-4)) << c.rows << " rows, " << i;
      EXPECT_TRUE(identical(actual.d_b[i].cpu(), again.d_b[i].cpu())) << c.rows << " rows, " << i;
    }
  }
}

TEST_F(GpuLinear, LowRankGradientsEqualReference) {
  expect_low_rank_gradients({{1000, {264, 32, 1032}, {16}},
                             {2049, {8, 2560}, {8}},
                             {1500, {300}, {16}},
                             {700, {64, 64}, {4}},
                             {1300, {64, 200}, {24}},
                             {2100, {2560, 1024, 1024}, {32}},
                             {1030, {1032, 64}, {64}},
                             {700, {64, 64}, {128}},
                             {100, {64}, {16}},
                             {600, {64, 40}, {16}, 5}});
}

// Nothing here is cuBLAS's, whose clusters compute-sanitizer's racecheck does not bear: more than
// one stripe of 1024 rows, more tiles than stages, columns that end within a tile.
TEST_F(GpuLinear, LowRankGradientsOfSmallShapes) {
  expect_low_rank_gradients({{512, {128}, {16}},
                             {1100, {264, 32}, {16}},
                             {600, {8, 136}, {8}},
                             {1100, {264, 32}, {32}},
                             {600, {136}, {24}}});
}

/// A sum in fp64: as it is, or as the kernel of 8-bit floats takes it, its wide terms in 8 bits.
Products in_double(const Products& terms, bool in_8_bits, bool b_has_depth_first = false) {
  Products result;
  for (const auto& [a, b, place] : terms) {
    if (!in_8_bits || std::min(b.size(0), b.size(1)) < 512) {
      result.push_back({a.to(at::kDouble), b.to(at::kDouble)});
    } else {
      result.push_back(
          {in_eight_bits(a), b_has_depth_first ? in_eight_bits(b.t()).t() : in_eight_bits(b)});
    }
  }
  return result;
}

KernelTable fp8_table() {
  return table("cuda.fp8_rowwise_or_bf16", at::kBFloat16, {Platform::kCuda});
}

TEST_F(GpuLinear, Fp8NamesWhatStaysWide) {
  const KernelTable warned = table_of(
      OpRequest::of<Linear>({.layers = {{"wide", 768, 512}, {"few", 32, 512}, {"thin", 512, 32}}}),
      "cuda.fp8_rowwise_or_bf16", at::kBFloat16, {Platform::kCuda});
  EXPECT_THAT(warned.warnings(),
              ::testing::ElementsAre(
                  ::testing::AllOf(::testing::HasSubstr("always below 512"),
                                   ::testing::HasSubstr("the layers few [32, 512], thin [512, 32]"),
                                   ::testing::Not(::testing::HasSubstr("wide")))));
}

// Rows that end within a tile, rows of very different sizes, rows of zeros, a single product, low
// ranks, several inputs' gradients, narrow layers beside wide ones, what a sum begins with. From
// the same 8-bit matrices in fp64: what is left is rounding.
TEST_F(GpuLinear, Fp8SumsEqualReference) {
  const KernelTable gpu_table = fp8_table(),
                    exact_table = table("reference", at::kDouble, {Platform::kCuda});
  const Linear::Functions &own = gpu_table.get<Linear>(), &reference = exact_table.get<Linear>();
  constexpr double kRounding = 5e-3, kEightBits = 0.05;
  const auto expect_close = [](const at::Tensor& found, const at::Tensor& expected, double most) {
    EXPECT_LT(error(found, expected.cpu()), most);
  };
  constexpr std::int64_t kIn = 1552, kOut = 3088, kOther = 2064;
  for (const std::int64_t rows : {4099, 5000}) {
    SCOPED_TRACE(rows);
    at::Tensor x = matrix(rows, kIn, 1, 16), w = matrix(kOut, kIn, 2, 0);
    const at::Tensor w2 = matrix(kOther, kIn, 3, 0), v = matrix(32, kIn, 4, 0);
    x.narrow(0, 0, 200).mul_(1e-3);
    x[5].zero_();
    w.narrow(0, 100, 50).mul_(100);
    const at::Tensor low = matrix(rows, 16, 5, 16), b = matrix(kOut, 16, 6, 0);
    const std::vector<Products> sums = {{{x, w}, {low, b}}, {{x, v}}, {{x, w2}}};
    const Tensors found = own.forward(sums), again = own.forward(sums);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      SCOPED_TRACE(i);
      expect_close(found[i], reference.forward({in_double(sums[i], true)})[0], kRounding);
      expect_close(found[i], reference.forward({in_double(sums[i], false)})[0], kEightBits);
      EXPECT_TRUE(identical(found[i].cpu(), again[i].cpu()));
      EXPECT_FALSE(found[i].isnan().any().item().toBool());
    }
    const at::Tensor start = matrix(rows, kOut, 7, 16);
    expect_close(own.forward_onto(start, sums[0]),
                 reference.forward_onto(start.to(at::kDouble), in_double(sums[0], true)),
                 kRounding);

    at::Tensor dy = matrix(rows, kOut, 8, 16), dy2 = matrix(rows, kOther, 9, 0).mul_(1e-4);
    dy2[7].zero_();
    const Products terms = {
        {dy, w}, {matrix(rows, 32, 10, 0), v}, {dy2, w2}, {low, matrix(16, kIn, 11, 0)}};
    for (const Products& part : {terms, Products{terms[0]}}) {
      const at::Tensor dx = own.backward(part);
      expect_close(dx, reference.backward(in_double(part, true, true)), kRounding);
      expect_close(dx, reference.backward(in_double(part, false)), kEightBits);
      EXPECT_TRUE(identical(dx.cpu(), own.backward(part).cpu()));
    }
  }
}

// Conversions of a few small products cost more than they gain: bit for bit the default kernel's.
TEST_F(GpuLinear, SmallProductsStayInBf16) {
  const KernelTable narrow = fp8_table(),
                    wide = table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda});
  for (const auto& [rows, width] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{300, 1024}, {700, 1024}, {4096, 512}}) {
    const at::Tensor x = matrix(rows, width, 1, 0), w = matrix(512, width, 2, 0),
                     dy = matrix(rows, 512, 3, 0);
    EXPECT_TRUE(identical(narrow.get<Linear>().forward({{{x, w}}})[0].cpu(),
                          wide.get<Linear>().forward({{{x, w}}})[0].cpu()));
    EXPECT_TRUE(identical(narrow.get<Linear>().backward({{dy, w}}).cpu(),
                          wide.get<Linear>().backward({{dy, w}}).cpu()));
    EXPECT_TRUE(identical(narrow.get<Linear>().forward_onto(dy, {{x, w}}).cpu(),
                          wide.get<Linear>().forward_onto(dy, {{x, w}}).cpu()));
  }
}

DroppedFactors moved_to(const DroppedFactors& factors, c10::Device device, c10::ScalarType type) {
  DroppedFactors moved = factors;
  moved.a = factors.a.to(device).to(type);
  for (DropoutMask& mask : moved.masks) {
    mask.draws = mask.draws.to(device);
    mask.features = mask.features.to(device);
  }
  return moved;
}

/// Rows, width, factors, rank, gap.
using DroppedCase = std::array<std::int64_t, 5>;

void expect_dropped_factors(const std::vector<DroppedCase>& cases) {
  const KernelTable own = table("cuda.sm90_or_cublas", at::kBFloat16, {Platform::kCuda});
  const KernelTable reference = table("reference", at::kDouble, {});
  for (const auto& [rows, width, count, rank, gap] : cases) {
    for (const double probability : {0.05, 0.9}) {
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width) + ", " +
                   std::to_string(count) + " of rank " + std::to_string(rank));
      DroppedFactors factors{randn({count * rank, width}, at::kBFloat16, 3), {}, {}};
      for (std::int64_t i = 0; i < count; ++i) {
        factors.ranks.push_back(rank);
        factors.masks.push_back({0x9876543210abcdefu + 77u * static_cast<std::uint64_t>(i),
                                 dropout_draws(at::arange(5, 5 + rows, at::kLong), 2),
                                 at::arange(64, 64 + width, at::kLong), probability, true});
      }
      const DroppedFactors on_gpu = moved_to(factors, gpu(), at::kBFloat16),
                           exact = moved_to(factors, at::kCPU, at::kDouble);
      const Linear::Functions &fused = own.get<Linear>(), &wide = reference.get<Linear>();
      const at::Tensor x = matrix(rows, width, 1, gap);
      const at::Tensor d_low = matrix(rows, count * rank, 2, 0);
      const at::Tensor wide_x = x.cpu().to(at::kDouble), wide_low = d_low.cpu().to(at::kDouble);

      const at::Tensor low = fused.dropped_low(x, on_gpu);
      EXPECT_LT(error(low, wide.dropped_low(wide_x, exact)), 0.01);
      EXPECT_TRUE(identical(low.cpu(), fused.dropped_low(x, on_gpu).cpu()));
      const at::Tensor gradient = fused.dropped_gradient(x, d_low, on_gpu);
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_LT(error(gradient, wide.dropped_gradient(wide_x, wide_low, exact)), 0.01);
      EXPECT_TRUE(identical(gradient.cpu(), fused.dropped_gradient(x, d_low, on_gpu).cpu()));

      const at::Tensor before = matrix(rows, width, 4, gap);
      at::Tensor dx = before.clone(), expected = before.cpu().to(at::kDouble);
      fused.add_dropped(dx, d_low, on_gpu);
      wide.add_dropped(expected, wide_low, exact);
      EXPECT_LT(error(dx, expected), 0.01);
      // Elements that all drop stay as they were.
      at::Tensor seen = dropout_factors(factors.masks[0], at::kDouble);
      for (std::int64_t i = 1; i < count; ++i)
        seen.add_(dropout_factors(factors.masks[static_cast<std::size_t>(i)], at::kDouble));
      EXPECT_TRUE(
          identical(dx.cpu().masked_select(seen == 0), before.cpu().masked_select(seen == 0)));
    }
  }
}

TEST_F(GpuLinear, DroppedFactorsEqualReference) {
  expect_dropped_factors({{1, 64, 1, 8, 0},
                          {77, 2560, 4, 16, 16},
                          {300, 1024, 2, 32, 0},
                          {600, 4096, 1, 64, 16},
                          {129, 128, 3, 8, 0},
                          {1000, 192, 3, 16, 16},
                          {130, 320, 5, 16, 0},
                          {257, 640, 1, 16, 0},
                          {4096, 2560, 2, 8, 0},
                          {65, 128, 1, 32, 0},
                          {64, 64, 4, 8, 0},
                          // Ranks in parts.
                          {100, 128, 2, 24, 0},
                          {70, 192, 1, 128, 0},
                          // Ranks rounded up.
                          {90, 128, 2, 4, 0},
                          {70, 256, 3, 12, 16}});
}

// By the operators of libtorch.
TEST_F(GpuLinear, DroppedFactorsOfOtherShapesEqualReference) {
  expect_dropped_factors({{33, 77, 2, 16, 0}, {600, 72, 2, 16, 0}, {40, 72, 1, 4, 0}});
}

}  // namespace
}  // namespace heddle::ops::testing
