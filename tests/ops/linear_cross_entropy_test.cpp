#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "ops/builtin.h"
#include "ops/extreme_logits.h"
#include "ops/operator_support.h"
#include "ops/product_counter.h"
#include "testing/device_name.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(any<LinearCrossEntropy>(), name, dtype);
}

LinearCrossEntropy::Inputs make(std::int64_t rows, std::int64_t hidden, std::int64_t vocab,
                                c10::ScalarType dtype) {
  LinearCrossEntropy::Inputs in;
  in.hidden = randn({rows, hidden}, dtype, 1);
  in.weight = randn({vocab, hidden}, dtype, 2) * 0.3;
  in.labels = (randn({rows}, at::kDouble, 3).abs() * vocab / 5).to(at::kLong).clamp_max(vocab - 1);
  for (std::int64_t i = 0; i < rows; i += 3) in.labels[i].fill_(-100);
  in.loss_weights = randn({rows}, at::kFloat, 4).abs();
  in.gradient_scale = 0.37;
  in.want_entropy = true;
  return in;
}

/// All logits at once, in fp64.
LinearCrossEntropy::Result dense(const LinearCrossEntropy::Inputs& in) {
  const at::Tensor h = in.hidden.to(at::kDouble), w = in.weight.to(at::kDouble);
  const at::Tensor lw = in.loss_weights.defined() ? in.loss_weights.to(at::kDouble)
                                                  : at::full({h.size(0)}, 1.0, h.options());
  const at::Tensor kept = (in.labels != -100).to(at::kDouble);
  const at::Tensor label = in.labels.clamp_min(0).unsqueeze(1);
  const at::Tensor logits = at::mm(h, w.t());
  for (const auto& [first, low, weight] : in.changes)
    logits.narrow(0, first, low.size(0)).addmm_(low.to(at::kDouble), weight.to(at::kDouble).t());
  LinearCrossEntropy::Result r;
  const at::Tensor log_p = at::log_softmax(logits, -1);
  r.logprobs = log_p.gather(1, label).squeeze(1) * kept;
  r.entropy = -at::sum(at::exp(log_p) * log_p, {1}) * kept;
  r.loss_sum = -at::sum(r.logprobs * lw);
  at::Tensor d = at::softmax(logits, -1);
  d.scatter_add_(1, label, at::full(label.sizes(), -1.0, d.options()));
  d = d * (kept * lw * in.gradient_scale).unsqueeze(1);
  r.grad_hidden = at::mm(d, w);
  r.grad_weight = at::mm(d.t(), h);
  for (const auto& [first, low, weight] : in.changes) {
    const at::Tensor own = d.narrow(0, first, low.size(0));
    r.grad_changes.push_back(
        {at::mm(own, weight.to(at::kDouble)), at::mm(own.t(), low.to(at::kDouble))});
  }
  return r;
}

TEST(LinearCrossEntropy, EqualsTheDenseFormula) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : kernel_dtypes()) {
      const KernelTable kernels = table(name, dtype);
      for (const auto& [rows, hidden, vocab] :
           {std::tuple{1, 5, 7}, {2, 16, 63}, {65, 33, 1031}, {400, 64, 20011}}) {
        SCOPED_TRACE(std::string(name) + " " + c10::toString(dtype) + " " + std::to_string(vocab));
        LinearCrossEntropy::Inputs in = make(rows, hidden, vocab, dtype);
        const auto expected = dense(in);
        const auto r = linear_cross_entropy(kernels, in, true, true);
        const double tolerance = tolerance_of(dtype);
        EXPECT_TRUE(close(r.loss_sum, expected.loss_sum, tolerance));
        EXPECT_TRUE(close(r.logprobs, expected.logprobs, tolerance));
        EXPECT_TRUE(close(r.entropy, expected.entropy, tolerance));
        EXPECT_TRUE(close(r.grad_hidden, expected.grad_hidden, tolerance));
        EXPECT_TRUE(close(r.grad_weight, expected.grad_weight, tolerance));
        EXPECT_EQ(r.grad_hidden.scalar_type(), dtype);
        EXPECT_EQ(r.loss_sum.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
        EXPECT_EQ(r.entropy.scalar_type(), r.loss_sum.scalar_type());
      }
    }
  }
}

TEST(LinearCrossEntropy, AddsIntoTheGivenBufferAndComputesOnlyWhatIsAsked) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const KernelTable kernels = table(name, dtype);
      auto in = make(50, 24, 301, dtype);
      at::Tensor buffer = at::full({301, 24}, 2.0, in.hidden.options().dtype(at::kFloat));
      const auto r = linear_cross_entropy(kernels, in, false, true, buffer);
      EXPECT_FALSE(r.grad_hidden.defined());
      EXPECT_TRUE(close(buffer - 2, dense(in).grad_weight, tolerance_of(dtype)));
      const auto only_loss = linear_cross_entropy(kernels, in, false, false);
      EXPECT_FALSE(only_loss.grad_weight.defined());
      EXPECT_TRUE(identical(only_loss.logprobs, r.logprobs));
      EXPECT_TRUE(identical(only_loss.entropy, r.entropy));
      const auto only_hidden = linear_cross_entropy(kernels, in, true, false);
      EXPECT_FALSE(only_hidden.grad_weight.defined());
      EXPECT_TRUE(close(only_hidden.grad_hidden, dense(in).grad_hidden, tolerance_of(dtype)));
      in.want_entropy = false;
      const auto without = linear_cross_entropy(kernels, in, true, false);
      EXPECT_FALSE(without.entropy.defined());
      EXPECT_TRUE(identical(without.logprobs, r.logprobs));
      EXPECT_TRUE(identical(without.grad_hidden, only_hidden.grad_hidden));
    }
  }
}

TEST(LinearCrossEntropy, KeptLogitsGiveTheBitsOfOnePass) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : kernel_dtypes()) {
      SCOPED_TRACE(std::string(name) + " " + c10::toString(dtype));
      const KernelTable kernels = table(name, dtype);
      LinearCrossEntropy::Inputs in = make(50, 24, 301, dtype);
      const auto one_pass = linear_cross_entropy(kernels, in, true, true);
      in.keep_logits = true;
      const auto first = linear_cross_entropy(kernels, in, false, false);
      ASSERT_TRUE(first.logits.defined());
      EXPECT_TRUE(identical(first.logprobs, one_pass.logprobs));
      EXPECT_TRUE(identical(first.entropy, one_pass.entropy));
      in.keep_logits = false;
      in.logits = first.logits;
      const auto second = linear_cross_entropy(kernels, in, true, true);
      EXPECT_TRUE(identical(second.grad_hidden, one_pass.grad_hidden));
      EXPECT_TRUE(identical(second.grad_weight, one_pass.grad_weight));
      // They are read: without them the gradients would be those of other logits.
      in.logits = at::zeros_like(first.logits);
      EXPECT_FALSE(identical(linear_cross_entropy(kernels, in, true, true).grad_hidden,
                             one_pass.grad_hidden));
    }
  }
}

TEST(LinearCrossEntropy, ChangesOfSomeRowsEqualTheDenseFormula) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : kernel_dtypes()) {
      // One chunk; several of the CPU's kernels, in whose middle a change ends; several of an
      // NPU's.
      for (const auto& [rows, hidden, vocab] :
           {std::tuple{12, 5, 7}, {65, 33, 1031}, {200, 12, 20011}, {2100, 16, 57}}) {
        SCOPED_TRACE(std::string(name) + " " + c10::toString(dtype) + " " + std::to_string(vocab));
        const KernelTable kernels = table(name, dtype);
        LinearCrossEntropy::Inputs in = make(rows, hidden, vocab, dtype);
        in.labels = in.labels.clamp_min(0);
        in.all_rows_labelled = true;
        const auto change = [&](std::int64_t first, std::int64_t count, std::int64_t rank) {
          in.changes.push_back({first, randn({count, rank}, dtype, 10 + rank),
                                randn({vocab, rank}, dtype, 20 + rank) * 0.3});
        };
        change(0, rows / 3, 4);
        change(rows / 3 + 1, 2, 3);  // after a row without a change
        change(rows - 4, 3, 8);
        const auto expected = dense(in);
        const double tolerance = tolerance_of(dtype);
        const auto expect = [&](const LinearCrossEntropy::Result& r) {
          EXPECT_TRUE(close(r.logprobs, expected.logprobs, tolerance));
          EXPECT_TRUE(close(r.entropy, expected.entropy, tolerance));
          EXPECT_TRUE(close(r.grad_hidden, expected.grad_hidden, tolerance));
          ASSERT_EQ(r.grad_changes.size(), 3U);
          for (std::size_t i = 0; i < 3; ++i) {
            // Sums of few rows over the vocabulary, in which the label meets all others.
            EXPECT_TRUE(close(r.grad_changes[i].low, expected.grad_changes[i].low, 3 * tolerance));
            EXPECT_TRUE(
                close(r.grad_changes[i].weight, expected.grad_changes[i].weight, tolerance));
          }
        };
        const auto r = linear_cross_entropy(kernels, in, true, true);
        expect(r);
        EXPECT_TRUE(close(r.grad_weight, expected.grad_weight, tolerance));
        expect(linear_cross_entropy(kernels, in, true, false));
        EXPECT_TRUE(linear_cross_entropy(kernels, in, false, false).grad_changes.empty());
        // A loss of tokens and kept logits give the same.
        LinearCrossEntropy::Inputs of_tokens = in, kept = in;
        const at::Tensor derivatives = -in.loss_weights.to(at::kDouble) * in.gradient_scale;
        of_tokens.loss_weights = at::Tensor(), of_tokens.gradient_scale = 1;
        of_tokens.token_loss = [&](std::int64_t first, const at::Tensor& logprobs) {
          return derivatives.narrow(0, first, logprobs.size(0));
        };
        expect(linear_cross_entropy(kernels, of_tokens, true, false));
        kept.keep_logits = true;
        const auto first = linear_cross_entropy(kernels, kept, false, false);
        kept.keep_logits = false;
        kept.logits = first.logits;
        expect(linear_cross_entropy(kernels, kept, true, false));
      }
    }
  }
}

TEST(LinearCrossEntropy, ChangesThatDoNotFitAreRefused) {
  auto in = make(6, 8, 11, at::kFloat);
  in.labels = in.labels.clamp_min(0);
  in.all_rows_labelled = true;
  const KernelTable kernels = table(kOwn, at::kFloat);
  const auto with = [&](std::int64_t first, std::int64_t rows, std::int64_t rank,
                        std::int64_t vocab) {
    in.changes.push_back(
        {first, randn({rows, rank}, at::kFloat, 1), randn({vocab, 2}, at::kFloat, 2)});
    return [&] { linear_cross_entropy(kernels, in, true, true); };
  };
  EXPECT_NO_THROW(with(0, 2, 2, 11)());
  EXPECT_NO_THROW(with(2, 1, 2, 11)());
  const auto good = in.changes;
  for (const auto& [first, rows, rank, vocab] :
       {std::tuple{2, 2, 2, 11}, {5, 2, 2, 11}, {3, 1, 3, 11}, {3, 1, 2, 12}}) {
    in.changes = good;
    EXPECT_THROW(with(first, rows, rank, vocab)(), c10::Error);
  }
  in.changes = good, in.all_rows_labelled = false;
  EXPECT_THROW(linear_cross_entropy(kernels, in, true, true), c10::Error);
}

/// A loss of single rows whose derivative depends on their log-probability: sum of w p(label), of
/// which some rows have none.
at::Tensor derivatives(const at::Tensor& logprobs, const at::Tensor& weights) {
  return at::exp(logprobs) * weights;
}

TEST(LinearCrossEntropy, TokenLossIsKnownBeforeTheGradientsOfItsChunk) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : kernel_dtypes()) {
      // One chunk; several of the CPU's kernels; several of an NPU's.
      for (const auto& [rows, hidden, vocab] :
           {std::tuple{1, 5, 7}, {65, 33, 1031}, {450, 24, 20011}, {2100, 16, 57}}) {
        SCOPED_TRACE(std::string(name) + " " + c10::toString(dtype) + " " + std::to_string(vocab));
        const KernelTable kernels = table(name, dtype);
        LinearCrossEntropy::Inputs in = make(rows, hidden, vocab, dtype);
        in.labels = in.labels.clamp_min(0);
        in.all_rows_labelled = true;
        in.gradient_scale = 1;
        in.loss_weights = at::Tensor();
        const at::Tensor weights = randn({rows}, at::kFloat, 6).clamp_min(-0.5);
        // Two passes are the reference, the second one in double.
        LinearCrossEntropy::Inputs second = in;
        second.loss_weights =
            -derivatives(linear_cross_entropy(kernels, in, false, false).logprobs, weights);
        const auto expected = dense(second);

        std::int64_t seen = 0;
        in.token_loss = [&](std::int64_t first, const at::Tensor& logprobs) {
          EXPECT_EQ(first, seen);
          seen += logprobs.size(0);
          return derivatives(logprobs, weights.narrow(0, first, logprobs.size(0)));
        };
        const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
        // The buffer is as small as the gradients: no digit of theirs is lost.
        constexpr double kBefore = 1.0 / 1024;
        at::Tensor buffer = at::full({vocab, hidden}, kBefore, in.hidden.options().dtype(wide));
        const auto r = linear_cross_entropy(kernels, in, true, true, buffer);
        EXPECT_EQ(seen, rows);
        const double tolerance = tolerance_of(dtype);
        EXPECT_TRUE(close(r.logprobs, expected.logprobs, tolerance));
        EXPECT_TRUE(close(r.entropy, expected.entropy, tolerance));
        EXPECT_TRUE(close(r.grad_hidden, expected.grad_hidden, tolerance));
        EXPECT_TRUE(close(buffer - kBefore, expected.grad_weight, tolerance));
        seen = 0;
        const auto frozen = linear_cross_entropy(kernels, in, true, false);
        EXPECT_FALSE(frozen.grad_weight.defined());
        EXPECT_TRUE(close(frozen.grad_hidden, expected.grad_hidden, tolerance));
      }
    }
  }
}

TEST(LinearCrossEntropy, GradientsOfEntropiesAddToThoseOfTheLoss) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : kernel_dtypes()) {
      for (const auto& [rows, hidden, vocab] :
           {std::tuple{1, 5, 7}, {65, 33, 1031}, {450, 24, 20011}, {2100, 16, 57}}) {
        SCOPED_TRACE(std::string(name) + " " + c10::toString(dtype) + " " + std::to_string(vocab));
        const KernelTable kernels = table(name, dtype);
        LinearCrossEntropy::Inputs in = make(rows, hidden, vocab, dtype);
        in.labels = in.labels.clamp_min(0);
        in.all_rows_labelled = true;
        in.entropy_gradients = randn({rows}, at::kFloat, 8);
        // By autograd, in double.
        const at::Tensor h = in.hidden.to(at::kDouble).set_requires_grad(true),
                         w = in.weight.to(at::kDouble).clone().set_requires_grad(true);
        const at::Tensor log_p = at::log_softmax(at::mm(h, w.t()), -1);
        const at::Tensor entropy = -at::sum(at::exp(log_p) * log_p, {1});
        at::sum(entropy * in.entropy_gradients.to(at::kDouble)).backward();
        const auto loss = dense(in);
        const at::Tensor expected_hidden = h.grad() + loss.grad_hidden,
                         expected_weight = w.grad() + loss.grad_weight;
        const double tolerance = tolerance_of(dtype);
        const auto expect = [&](const LinearCrossEntropy::Result& r) {
          EXPECT_TRUE(close(r.logprobs, loss.logprobs, tolerance));
          EXPECT_TRUE(close(r.entropy, loss.entropy, tolerance));
          // Two sums of one size meet.
          EXPECT_TRUE(close(r.grad_hidden, expected_hidden, 2 * tolerance));
          EXPECT_TRUE(close(r.grad_weight, expected_weight, 2 * tolerance));
        };
        expect(linear_cross_entropy(kernels, in, true, true));
        // A loss of tokens and kept logits give the same.
        LinearCrossEntropy::Inputs of_tokens = in, kept = in;
        const at::Tensor derivatives = -in.loss_weights.to(at::kDouble) * in.gradient_scale;
        of_tokens.loss_weights = at::Tensor(), of_tokens.gradient_scale = 1;
        of_tokens.token_loss = [&](std::int64_t first, const at::Tensor& logprobs) {
          return derivatives.narrow(0, first, logprobs.size(0));
        };
        expect(linear_cross_entropy(kernels, of_tokens, true, true));
        kept.keep_logits = true;
        const auto first = linear_cross_entropy(kernels, kept, false, false);
        kept.keep_logits = false;
        kept.logits = first.logits;
        expect(linear_cross_entropy(kernels, kept, true, true));
      }
    }
  }
}

TEST(LinearCrossEntropy, EntropiesWithAGradientAreAskedFor) {
  auto in = make(6, 8, 11, at::kFloat);
  in.labels = in.labels.clamp_min(0);
  in.all_rows_labelled = true;
  in.entropy_gradients = randn({6}, at::kFloat, 8);
  const KernelTable kernels = table(kOwn, at::kFloat);
  EXPECT_NO_THROW(linear_cross_entropy(kernels, in, true, true));
  in.want_entropy = false;
  EXPECT_THROW(linear_cross_entropy(kernels, in, true, true), c10::Error);
  in.want_entropy = true, in.all_rows_labelled = false;
  EXPECT_THROW(linear_cross_entropy(kernels, in, true, true), c10::Error);
  in.all_rows_labelled = true, in.entropy_gradients = randn({5}, at::kFloat, 8);
  EXPECT_THROW(linear_cross_entropy(kernels, in, true, true), c10::Error);
}

TEST(LinearCrossEntropy, TokenLossRefusesWhatItReplaces) {
  auto in = make(5, 8, 11, at::kFloat);
  in.labels = in.labels.clamp_min(0);
  in.all_rows_labelled = true;
  in.token_loss = [](std::int64_t, const at::Tensor& logprobs) { return logprobs; };
  const KernelTable kernels = table(kOwn, at::kFloat);
  EXPECT_THROW(linear_cross_entropy(kernels, in, true, true), c10::Error);
  in.loss_weights = at::Tensor(), in.gradient_scale = 1;
  EXPECT_NO_THROW(linear_cross_entropy(kernels, in, true, true));
  EXPECT_THROW(linear_cross_entropy(kernels, in, false, false), c10::Error);
  in.token_loss = [](std::int64_t, const at::Tensor& logprobs) { return logprobs.sum(); };
  EXPECT_THROW(linear_cross_entropy(kernels, in, true, true), c10::Error);
}

TEST(HeadProducts, TokenLossComputesTheLogitsOnce) {
  constexpr std::int64_t kRows = 450, kHidden = 24, kVocab = 20011, kOne = kRows * kHidden * kVocab;
  auto in = make(kRows, kHidden, kVocab, at::kFloat);
  in.labels = in.labels.clamp_min(0);
  in.all_rows_labelled = true;
  in.loss_weights = at::Tensor(), in.gradient_scale = 1;
  for (const char* name : {"reference", "cpu"}) {
    const KernelTable kernels = table(name, at::kFloat);
    const auto products_of = [&](auto&&... calls) {
      const ProductCounter counter;
      (calls(), ...);
      return counter.multiplications;
    };
    auto first = in;
    first.keep_logits = true;  // which are too many to be kept
    auto one_pass = in;
    one_pass.token_loss = [](std::int64_t, const at::Tensor& logprobs) { return logprobs; };
    EXPECT_EQ(products_of([&] { linear_cross_entropy(kernels, one_pass, true, true); }), 3 * kOne)
        << name;
    EXPECT_EQ(products_of([&] { linear_cross_entropy(kernels, one_pass, true, false); }), 2 * kOne)
        << name;
    // A loss of whole sequences.
    EXPECT_EQ(products_of([&] { linear_cross_entropy(kernels, first, false, false); },
                          [&] { linear_cross_entropy(kernels, in, true, true); }),
              4 * kOne)
        << name;
  }
}

TEST(LinearCrossEntropy, ANewGradientHasTheDtypeThatIsAskedFor) {
  for (const char* name : {"reference", kOwn}) {
    auto in = make(50, 24, 301, at::kBFloat16);
    const KernelTable kernels = table(name, at::kBFloat16);
    EXPECT_EQ(linear_cross_entropy(kernels, in, false, true).grad_weight.scalar_type(),
              at::kBFloat16);
    in.gradient_dtype = at::kFloat;
    const at::Tensor gradient = linear_cross_entropy(kernels, in, false, true).grad_weight;
    EXPECT_EQ(gradient.scalar_type(), at::kFloat);
    // Not rounded on the way, but for NPUs, whose product of half precision is.
    if (heddle::testing::device_name() == "cpu") {
      EXPECT_FALSE(identical(gradient, gradient.to(at::kBFloat16).to(at::kFloat)));
    }
    EXPECT_TRUE(close(gradient, dense(in).grad_weight, tolerance_of(at::kBFloat16)));
  }
}

TEST(LinearCrossEntropy, NeverTouchesIgnoredRows) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kFloat);
    auto in = make(31, 16, 77, at::kFloat);
    const auto clean = linear_cross_entropy(kernels, in, true, true);
    for (std::int64_t i = 0; i < 31; i += 3) {
      in.hidden.select(0, i).fill_(std::numeric_limits<float>::quiet_NaN());
      in.loss_weights[i].fill_(std::numeric_limits<float>::quiet_NaN());
    }
    const auto r = linear_cross_entropy(kernels, in, true, true);
    EXPECT_TRUE(identical(r.grad_weight, clean.grad_weight));
    EXPECT_TRUE(identical(r.grad_hidden, clean.grad_hidden));
    EXPECT_TRUE(identical(r.logprobs, clean.logprobs));
    EXPECT_TRUE(identical(r.entropy, clean.entropy));
    in.labels.fill_(-100);
    const auto none = linear_cross_entropy(kernels, in, true, true);
    EXPECT_EQ(none.loss_sum.item().toDouble(), 0);
    EXPECT_EQ(none.entropy.abs().max().item().toDouble(), 0);
    EXPECT_EQ(none.grad_weight.abs().max().item().toDouble(), 0);
    EXPECT_EQ(none.grad_hidden.abs().max().item().toDouble(), 0);
  }
}

TEST(LinearCrossEntropy, EntropyOfExtremeLogits) {
  for (const char* name : {"reference", kOwn}) {
    for (const c10::ScalarType dtype : kernel_dtypes()) {
      SCOPED_TRACE(std::string(name) + " " + c10::toString(dtype));
      expect_entropies_of_extreme_logits(table(name, dtype), dtype, device(), 1001);
    }
  }
}

TEST(LinearCrossEntropy, NamesALabelOutsideTheVocabulary) {
  auto in = make(5, 8, 11, at::kFloat);
  in.labels[4].fill_(11);
  EXPECT_THROW(linear_cross_entropy(table(kOwn, at::kFloat), in, true, true), c10::Error);
}

}  // namespace
}  // namespace heddle::ops::testing
