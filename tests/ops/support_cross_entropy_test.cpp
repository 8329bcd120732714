// linear_cross_entropy over the tokens that a draw was from, against masked softmaxes in float64.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/sum.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/operator_support.h"
#include "testing/message_of.h"

namespace heddle::ops::testing {
namespace {

/// Rows with supports of 1 to k tokens, the label at any place among them.
LinearCrossEntropy::Inputs make(std::int64_t rows, std::int64_t hidden, std::int64_t vocab,
                                std::int64_t k, c10::ScalarType dtype) {
  LinearCrossEntropy::Inputs in;
  in.hidden = randn({rows, hidden}, dtype, 1);
  in.weight = randn({vocab, hidden}, dtype, 2);
  in.loss_weights = randn({rows}, at::kFloat, 4);
  in.gradient_scale = 0.37;
  in.all_rows_labelled = true;
  in.want_entropy = true;
  in.support = at::full({rows, k}, -1, at::kLong);
  in.labels = at::empty({rows}, at::kLong);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t count = 1 + i % k;
    in.support[i].narrow(0, 0, count).copy_(at::randperm(vocab, at::kLong).narrow(0, 0, count));
    in.labels[i].copy_(in.support[i][i * 7 % count]);
  }
  return in;
}

/// By autograd over all logits, those outside of the support -inf.
struct Expected {
  at::Tensor logprobs, entropy, grad_hidden, grad_weight;
  explicit Expected(const LinearCrossEntropy::Inputs& in) {
    const at::Tensor h = in.hidden.to(at::kDouble).clone().set_requires_grad(true),
                     w = in.weight.to(at::kDouble).clone().set_requires_grad(true);
    at::Tensor mask = at::full({h.size(0), w.size(0)}, true, at::kBool);
    for (std::int64_t i = 0; i < h.size(0); ++i) {
      const at::Tensor ids = in.support[i].masked_select(in.support[i] >= 0);
      mask[i].index_fill_(0, ids, false);
    }
    const at::Tensor log_p = at::log_softmax(
        at::mm(h, w.t()).masked_fill(mask, -std::numeric_limits<double>::infinity()), -1);
    logprobs = log_p.gather(1, in.labels.unsqueeze(1)).squeeze(1);
    entropy = -at::sum(log_p.exp() * log_p.masked_fill(mask, 0), {1});
    at::Tensor loss = -at::sum(logprobs * in.loss_weights.to(at::kDouble)) * in.gradient_scale;
    if (in.entropy_gradients.defined())
      loss = loss + at::sum(entropy * in.entropy_gradients.to(at::kDouble));
    entropy = entropy.detach();
    loss.backward();
    logprobs = logprobs.detach();
    grad_hidden = h.grad();
    grad_weight = w.grad();
  }
};

TEST(SupportCrossEntropy, EqualsTheMaskedSoftmax) {
  for (const c10::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const KernelTable kernels = table_of(any<LinearCrossEntropy>(), "reference", dtype);
    // The last has more rows than are gathered at a time.
    for (const auto& [rows, hidden, vocab, k] :
         {std::tuple{1, 5, 7, 1}, {29, 16, 63, 5}, {65, 33, 1031, 50}, {300, 64, 211, 211}}) {
      SCOPED_TRACE(std::string(c10::toString(dtype)) + " " + std::to_string(rows));
      auto in = make(rows, hidden, vocab, k, dtype);
      if (k == 50) in.entropy_gradients = randn({rows}, at::kFloat, 9);
      const Expected expected(in);
      const auto found = linear_cross_entropy(kernels, in, true, true);
      const double tolerance = tolerance_of(dtype);
      EXPECT_TRUE(close(found.logprobs, expected.logprobs, tolerance));
      EXPECT_TRUE(close(found.entropy, expected.entropy, tolerance));
      EXPECT_TRUE(close(found.grad_hidden, expected.grad_hidden, tolerance));
      EXPECT_TRUE(close(found.grad_weight, expected.grad_weight, tolerance));
      // Weights have both signs: the sum may be small among its terms.
      const at::Tensor terms = -expected.logprobs * in.loss_weights.to(at::kDouble);
      EXPECT_NEAR(found.loss_sum.item<double>(), terms.sum().item<double>(),
                  tolerance * terms.abs().sum().item<double>());
      EXPECT_EQ(found.grad_hidden.scalar_type(), dtype);
    }
  }
}

TEST(SupportCrossEntropy, OfOneTokenIsCertainAndTeachesNothing) {
  const KernelTable kernels = table_of(any<LinearCrossEntropy>(), "reference", at::kDouble);
  const auto in = make(9, 8, 40, 1, at::kDouble);
  at::Tensor buffer = at::full({40, 8}, 2.0, at::kDouble);
  const auto found = linear_cross_entropy(kernels, in, true, true, buffer);
  EXPECT_EQ(found.logprobs.abs().max().item<double>(), 0);
  EXPECT_EQ(found.grad_hidden.abs().max().item<double>(), 0);
  EXPECT_TRUE(buffer.eq(2.0).all().item<bool>());
}

TEST(SupportCrossEntropy, RefusesALabelThatCouldNotBeDrawn) {
  const KernelTable kernels = table_of(any<LinearCrossEntropy>(), "reference", at::kDouble);
  auto in = make(9, 8, 40, 3, at::kDouble);
  in.labels[4].fill_(in.support[4].max().item<std::int64_t>() == 39 ? 38 : 39);
  in.support[4].fill_(0);
  EXPECT_THAT(heddle::testing::message_of([&] { linear_cross_entropy(kernels, in, true, true); }),
              ::testing::HasSubstr("not in the support"));
}

}  // namespace
}  // namespace heddle::ops::testing
