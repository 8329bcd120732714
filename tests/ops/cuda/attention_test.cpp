// Our own backward of packed attention against the reference in fp64 on the CPU, whatever would
// take these sequences otherwise.
#include "ops/attention/attention.h"

#include <ATen/TensorOperators.h>

#include <limits>

#include "ops/attention/cuda/dense.h"
#include "ops/attention/cuda/packed.h"
#include "ops/attention/cuda/ragged.h"
#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"

namespace heddle::ops::testing {
namespace {

constexpr std::int64_t kDim = 256;

class GpuFusedAttention : public GpuFused {
 protected:
  void SetUp() override {
    GpuFused::SetUp();
    if (IsSkipped()) return;
    if (!attention_cudnn::packed_fits(inputs(random({0, 1}, 1, 1), {0, 1})))
      GTEST_SKIP() << "needs sm_90";
  }

  /// q, k, v and the gradient of o.
  static Tensors random(const std::vector<std::int32_t>& ends, std::int64_t q_heads,
                        std::int64_t k_heads) {
    Tensors in;
    std::uint64_t seed = 1;
    for (const std::int64_t heads : {q_heads, k_heads, k_heads, q_heads})
      in.push_back(randn({ends.back(), heads, kDim}, at::kBFloat16, seed++).to(gpu()));
    return in;
  }

  static Attention::Inputs inputs(const Tensors& in, const std::vector<std::int32_t>& ends) {
    const auto sequences = Sequences::from_host(ends, in[0].device());
    return {in[0], in[1], in[2], sequences, sequences};
  }

  static Tensors gradients(const Tensors& in, const std::vector<std::int32_t>& ends) {
    const Attention::Inputs x = inputs(in, ends);
    const Attention::Gradients d = attention_cudnn::packed_gradients(
        x, attention_cudnn::ragged_forward(x, /*keep=*/true), in[3]);
    return {d.q, d.k, d.v};
  }

  static Tensors reference(const Tensors& in, const std::vector<std::int32_t>& ends) {
    const KernelTable table = table_of(any<Attention>(), "reference", at::kDouble);
    Tensors exact;
    for (const at::Tensor& x : in) exact.push_back(x.cpu().to(at::kDouble));
    const Attention::Inputs x = inputs(exact, ends);
    const Attention::Functions functions = table.get<Attention>();
    const Attention::Gradients d =
        functions.backward(x, functions.forward(x, /*keep=*/true), exact[3]);
    return {d.q, d.k, d.v};
  }
};

/// Sequences of one token, none, a tile more or less one, several tiles.
const std::vector<std::int32_t> kEnds = {0, 1, 30, 93, 157, 222, 222, 351, 1051, 1052, 1052};

TEST_F(GpuFusedAttention, GradientsEqualReference) {
  for (const auto& [q_heads, k_heads] : {std::pair{4, 2}, {2, 2}, {8, 1}, {6, 2}}) {
    for (const std::vector<std::int32_t>& ends :
         std::vector<std::vector<std::int32_t>>{kEnds, {0, 1}, {0, 64}, {0, 0, 129}}) {
      const Tensors in = random(ends, q_heads, k_heads);
      const Tensors actual = gradients(in, ends), again = gradients(in, ends),
                    expected = reference(in, ends);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-2))
            << q_heads << "/" << k_heads << " heads, " << ends.back() << " tokens, gradient " << i;
        EXPECT_TRUE(identical(actual[i].cpu(), again[i].cpu())) << i;
      }
    }
  }
}

TEST_F(GpuFusedAttention, ReadsColumnsOfAProjection) {
  const std::vector<std::int32_t>& ends = kEnds;
  const at::Tensor all = randn({ends.back(), 8, kDim}, at::kBFloat16, 1).to(gpu());
  const Tensors views = {all.narrow(1, 0, 4), all.narrow(1, 4, 2), all.narrow(1, 6, 2),
                         randn({ends.back(), 4, kDim}, at::kBFloat16, 2).to(gpu())};
  Tensors copies;
  for (const at::Tensor& x : views) copies.push_back(x.clone());
  const Tensors of_views = gradients(views, ends), of_copies = gradients(copies, ends);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_TRUE(identical(of_views[i].cpu(), of_copies[i].cpu())) << i;
}

TEST_F(GpuFusedAttention, SequencesDoNotReachEachOther) {
  const std::vector<std::int32_t>& ends = kEnds;
  const std::int64_t first = ends[3], last = ends[4], sick = last - first;
  Tensors in = random(ends, 4, 2);
  const Tensors clean = gradients(in, ends);
  for (at::Tensor& x : in) {
    x = x.clone();
    x.narrow(0, first, sick).fill_(std::numeric_limits<double>::quiet_NaN());
  }
  const Tensors actual = gradients(in, ends);
  for (std::size_t i = 0; i < 3; ++i) {
    for (const auto& [from, count] :
         {std::pair<std::int64_t, std::int64_t>{0, first}, {last, ends.back() - last}}) {
      EXPECT_TRUE(
          identical(actual[i].narrow(0, from, count).cpu(), clean[i].narrow(0, from, count).cpu()))
          << i;
    }
  }
}

/// As the operator computes them, whichever kernels it takes.
Tensors chosen_gradients(const Attention::Inputs& x, const at::Tensor& grad_o) {
  const KernelTable table =
      table_of(OpRequest::of<Attention>({.head_dim = kDim}), "cuda.sm90_cudnn_or_flash_varlen",
               at::kBFloat16, {Platform::kCuda});
  const Attention::Functions functions = table.get<Attention>();
  const Attention::Gradients d = functions.backward(x, functions.forward(x, /*keep=*/true), grad_o);
  return {d.q, d.k, d.v};
}

// Behind libtorch's call of cuDNN.
TEST_F(GpuFusedAttention, TakesSequencesOfOneLength) {
  std::vector<std::int32_t> ends = {0};
  for (std::int32_t i = 0; i < 32; ++i) ends.push_back(ends.back() + 256);
  const Tensors in = random(ends, 4, 2);
  const Attention::Inputs x = inputs(in, ends);
  EXPECT_TRUE(attention_cudnn::one_length_fits(x) && attention_cudnn::packed_is_balanced(x));
  const Tensors actual = chosen_gradients(x, in[3]), expected = reference(in, ends);
  // cuDNN's backward adds the gradients of q in any order.
  for (int i = 0; i < 3; ++i)
    EXPECT_TRUE(identical(chosen_gradients(x, in[3])[0].cpu(), actual[0].cpu()));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(close(actual[i].cpu(), expected[i], 1e-2)) << i;
}

TEST_F(GpuFusedAttention, TakesPacksThatKeepTheDeviceBusy) {
  std::vector<std::int32_t> ends = {0};
  for (std::int32_t i = 0; i < 150; ++i) ends.push_back(ends.back() + 1 + i % 64);
  const Tensors in = random(ends, 4, 2);
  const Attention::Inputs x = inputs(in, ends);
  EXPECT_TRUE(attention_cudnn::packed_is_balanced(x));
  const Tensors chosen = chosen_gradients(x, in[3]), own = gradients(in, ends),
                expected = reference(in, ends);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(identical(chosen[i].cpu(), own[i].cpu())) << i;
    EXPECT_TRUE(close(chosen[i].cpu(), expected[i], 1e-2)) << i;
  }
  EXPECT_FALSE(attention_cudnn::packed_is_balanced(inputs(random({0, 4096}, 4, 2), {0, 4096})));
  // On 132 multiprocessors the longest part is 1.5 % above an even share.
  const std::vector<std::int32_t> two = {0, 4096, 8192};
  EXPECT_TRUE(attention_cudnn::packed_is_balanced(inputs(random(two, 16, 2), two)));
}

}  // namespace
}  // namespace heddle::ops::testing
