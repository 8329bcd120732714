#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include "ops/builtin.h"
#include "ops/cuda/fused_support.h"
#include "ops/extreme_logits.h"

namespace heddle::ops::testing {
namespace {

const OpRequest kHead = any<LinearCrossEntropy>();

/// Values rounded to dtype, on the GPU.
LinearCrossEntropy::Inputs head_inputs(std::int64_t rows, std::int64_t width,
                                       std::int64_t vocabulary, c10::ScalarType dtype) {
  LinearCrossEntropy::Inputs in;
  in.hidden = randn({rows, width}, dtype, 1).to(gpu());
  in.weight = (randn({vocabulary, width}, at::kFloat, 2) * 0.3).to(dtype).to(gpu());
  in.labels = (randn({rows}, at::kDouble, 3).abs() * static_cast<double>(vocabulary) / 6)
                  .clamp_max(static_cast<double>(vocabulary - 1))
                  .to(at::kLong)
                  .to(gpu());
  in.loss_weights = randn({rows}, at::kFloat, 4).abs().to(gpu());
  in.gradient_scale = 0.5;
  in.want_entropy = true;
  return in;
}

/// The fused kernel against the reference in fp64, both on the GPU, with a gradient buffer that
/// already holds something.
void expect_equal(const LinearCrossEntropy::Inputs& in, c10::ScalarType buffer_dtype) {
  const c10::ScalarType dtype = in.hidden.scalar_type();
  LinearCrossEntropy::Inputs wide = in;
  wide.hidden = in.hidden.to(at::kDouble), wide.weight = in.weight.to(at::kDouble);
  const at::Tensor before = randn(in.weight.sizes(), buffer_dtype, 5).to(gpu()) * 0.1;
  const auto expected =
      linear_cross_entropy(table_of(kHead, "reference", at::kDouble, {Platform::kCuda}), wide, true,
                           true, before.to(at::kDouble));
  const KernelTable fused = fused_table(kHead, dtype);
  const auto actual = linear_cross_entropy(fused, in, true, true, before.clone());
  // Logits in bf16: a relative error of 2^-9 in each, hence of that times the logit in each
  // probability.
  const bool half = dtype == at::kBFloat16;
  // The entropy's part multiplies the rounding of log p, some 1e-6, by log p + entropy.
  const double of_gradients = half ? 1e-2 : in.entropy_gradients.defined() ? 1e-4 : 1e-5;
  EXPECT_TRUE(close(actual.loss_sum.cpu(), expected.loss_sum.cpu(), half ? 1e-3 : 1e-5));
  EXPECT_TRUE(close(actual.logprobs.cpu(), expected.logprobs.cpu(), half ? 4e-3 : 1e-5));
  EXPECT_TRUE(close(actual.entropy.cpu(), expected.entropy.cpu(), half ? 4e-3 : 1e-5));
  EXPECT_TRUE(close(actual.grad_hidden.cpu(), expected.grad_hidden.cpu(), of_gradients));
  EXPECT_TRUE(close(actual.grad_weight.cpu(), expected.grad_weight.cpu(), of_gradients));
  const auto again = linear_cross_entropy(fused, in, true, true, before.clone());
  EXPECT_TRUE(identical(actual.logprobs.cpu(), again.logprobs.cpu()));
  EXPECT_TRUE(identical(actual.entropy.cpu(), again.entropy.cpu()));
  EXPECT_TRUE(identical(actual.grad_hidden.cpu(), again.grad_hidden.cpu()));
  EXPECT_TRUE(identical(actual.grad_weight.cpu(), again.grad_weight.cpu()));
  LinearCrossEntropy::Inputs first = in;
  first.gradient_dtype = buffer_dtype;
  const auto fresh = linear_cross_entropy(fused, first, true, true);
  EXPECT_EQ(fresh.grad_weight.scalar_type(), buffer_dtype);
  EXPECT_TRUE(close(fresh.grad_weight.cpu(), (expected.grad_weight - before).cpu(),
                    buffer_dtype == at::kBFloat16 ? 1e-2 : of_gradients));
  // As where the head is frozen; chunks of another size may take another product.
  const auto frozen = linear_cross_entropy(fused, in, true, false);
  EXPECT_FALSE(frozen.grad_weight.defined());
  EXPECT_TRUE(close(frozen.logprobs.cpu(), expected.logprobs.cpu(), half ? 4e-3 : 1e-5));
  EXPECT_TRUE(close(frozen.grad_hidden.cpu(), expected.grad_hidden.cpu(), of_gradients));
  const auto scored = linear_cross_entropy(fused, in, false, false);
  EXPECT_TRUE(identical(actual.logprobs.cpu(), scored.logprobs.cpu()));
  EXPECT_TRUE(identical(actual.entropy.cpu(), scored.entropy.cpu()));
}

// The log-probabilities are those of the matrices in 8 bits; the gradients follow from them with
// the matrices as they are. Odd rows, several chunks, and ignored rows.
TEST_F(GpuFused, LinearCrossEntropyInEightBitsEqualsReference) {
  for (const auto& [rows, vocabulary] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{777, 4000}, {600, 151936}}) {
    LinearCrossEntropy::Inputs in = head_inputs(rows, 272, vocabulary, at::kBFloat16);
    in.weight.mul_(0.2);
    in.labels[3] = -100;
    LinearCrossEntropy::Inputs wide = in;
    wide.hidden = in_eight_bits(in.hidden);
    wide.weight = in_eight_bits(in.weight);
    const KernelTable reference = table_of(kHead, "reference", at::kDouble, {Platform::kCuda}),
                      narrow = table_of(kHead, "cuda.fused_fp8", at::kBFloat16, {Platform::kCuda}),
                      plain = fused_table(kHead, at::kBFloat16);
    const auto expected = linear_cross_entropy(reference, wide, true, true);
    const auto found = linear_cross_entropy(narrow, in, true, true);
    const auto bf16 = linear_cross_entropy(plain, in, true, true);
    const auto error = [](const at::Tensor& a, const at::Tensor& b) {
      const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
      return ((x - y).norm() / y.norm()).item().toDouble();
    };
    EXPECT_LT(error(found.logprobs, expected.logprobs), 1e-3);
    EXPECT_LT(error(found.loss_sum, expected.loss_sum), 1e-3);
    EXPECT_LT(error(found.grad_hidden, bf16.grad_hidden), 0.1);
    EXPECT_LT(error(found.grad_weight, bf16.grad_weight), 0.1);
    EXPECT_TRUE(identical(found.logprobs.cpu(),
                          linear_cross_entropy(narrow, in, true, true).logprobs.cpu()));
    in.hidden = in.hidden.narrow(0, 0, 300), in.labels = in.labels.narrow(0, 0, 300);
    in.loss_weights = in.loss_weights.narrow(0, 0, 300);
    EXPECT_TRUE(identical(linear_cross_entropy(narrow, in, false, false).logprobs.cpu(),
                          linear_cross_entropy(plain, in, false, false).logprobs.cpu()));
  }
}

TEST_F(GpuFused, LinearCrossEntropyEqualsReference) {
  for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    // One CTA, clusters of two and eight, the longest row of a cluster, odd rows, and one too long
    // for a cluster; of most, more rows than clusters run at once.
    for (const std::int64_t vocabulary : {8, 1000, 1001, 40000, 151936, 248320, 262144, 600000}) {
      SCOPED_TRACE(std::to_string(vocabulary) + " " + c10::toString(dtype));
      LinearCrossEntropy::Inputs in =
          head_inputs(vocabulary == 1000 ? 1077 : 177, 24, vocabulary, dtype);
      expect_equal(in, at::kFloat);
      in.labels.narrow(0, 10, 50).fill_(-100);
      expect_equal(in, dtype);
    }
  }
}

TEST_F(GpuFused, LinearCrossEntropyAddsUpOverChunks) {
  // 248320 bf16 logits a row: two chunks of 4608 and 4392 rows.
  LinearCrossEntropy::Inputs in = head_inputs(9000, 32, 248320, at::kBFloat16);
  in.all_rows_labelled = true;
  expect_equal(in, at::kFloat);
  expect_equal(in, at::kBFloat16);
}

TEST_F(GpuFused, LinearCrossEntropyTakesALossOfTokensInOnePass) {
  // One chunk, and two of 4608 and 4392 rows.
  for (const auto& [rows, vocabulary] :
       {std::pair<std::int64_t, std::int64_t>{177, 1001}, {9000, 248320}}) {
    for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      SCOPED_TRACE(std::to_string(vocabulary) + " " + c10::toString(dtype));
      LinearCrossEntropy::Inputs in = head_inputs(rows, 32, vocabulary, dtype);
      in.all_rows_labelled = true;
      in.gradient_scale = 1;
      const at::Tensor weights = in.loss_weights;
      const KernelTable fused = fused_table(kHead, dtype);
      const at::Tensor before = randn(in.weight.sizes(), at::kFloat, 5).to(gpu()) * 0.1;
      // The derivatives by log-probabilities that are known from a call before.
      LinearCrossEntropy::Inputs second = in;
      second.loss_weights = -linear_cross_entropy(fused, in, false, false).logprobs.exp() * weights;
      const auto expected = linear_cross_entropy(fused, second, true, true, before.clone());

      in.loss_weights = at::Tensor();
      std::int64_t seen = 0, calls = 0;
      in.token_loss = [&](std::int64_t first, const at::Tensor& logprobs) {
        EXPECT_EQ(first, seen);
        seen += logprobs.size(0), ++calls;
        return logprobs.exp() * weights.narrow(0, first, logprobs.size(0));
      };
      const auto actual = linear_cross_entropy(fused, in, true, true, before.clone());
      EXPECT_EQ(seen, rows);
      EXPECT_EQ(calls > 1, rows == 9000);
      EXPECT_TRUE(close(actual.logprobs.cpu(), expected.logprobs.cpu(), 1e-6));
      const double tolerance = dtype == at::kBFloat16 ? 1e-2 : 1e-5;
      EXPECT_TRUE(close(actual.grad_hidden.cpu(), expected.grad_hidden.cpu(), tolerance));
      EXPECT_TRUE(close((actual.grad_weight - before).cpu(), (expected.grad_weight - before).cpu(),
                        tolerance));
    }
  }
}

TEST_F(GpuFused, LinearCrossEntropyAddsGradientsOfEntropies) {
  // Odd rows, the longest row of a cluster, one too long for it, and two chunks.
  for (const auto& [rows, vocabulary] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {177, 1001}, {177, 262144}, {177, 600000}, {9000, 248320}}) {
    for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      SCOPED_TRACE(std::to_string(vocabulary) + " " + c10::toString(dtype));
      LinearCrossEntropy::Inputs in = head_inputs(rows, 32, vocabulary, dtype);
      in.all_rows_labelled = true;
      in.entropy_gradients = (randn({rows}, at::kFloat, 8) * 0.3).to(gpu());
      expect_equal(in, at::kFloat);
      const KernelTable fused = fused_table(kHead, dtype);
      const auto expected = linear_cross_entropy(fused, in, true, true);
      const at::Tensor derivatives = -in.loss_weights * in.gradient_scale;
      in.loss_weights = at::Tensor(), in.gradient_scale = 1;
      in.token_loss = [&](std::int64_t first, const at::Tensor& logprobs) {
        return derivatives.narrow(0, first, logprobs.size(0));
      };
      const auto of_tokens = linear_cross_entropy(fused, in, true, true);
      EXPECT_TRUE(identical(of_tokens.grad_hidden.cpu(), expected.grad_hidden.cpu()));
      EXPECT_TRUE(identical(of_tokens.grad_weight.cpu(), expected.grad_weight.cpu()));
    }
  }
}

TEST_F(GpuFused, LinearCrossEntropyEntropyOfExtremeLogits) {
  for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    // One CTA, a row that is no multiple of an access, and clusters.
    for (const std::int64_t vocabulary : {1000, 1001, 248320}) {
      SCOPED_TRACE(std::to_string(vocabulary) + " " + c10::toString(dtype));
      expect_entropies_of_extreme_logits(fused_table(kHead, dtype), dtype, gpu(), vocabulary);
    }
  }
}

TEST_F(GpuFused, LinearCrossEntropyTakesNoRows) {
  LinearCrossEntropy::Inputs in = head_inputs(5, 16, 100, at::kBFloat16);
  in.labels.fill_(-100);
  in.loss_weights = at::Tensor();
  const auto result = linear_cross_entropy(fused_table(kHead, at::kBFloat16), in, true, true);
  EXPECT_EQ(result.loss_sum.item().toDouble(), 0);
  EXPECT_EQ(result.entropy.abs().sum().item().toDouble(), 0);
  EXPECT_EQ(result.grad_hidden.abs().sum().item().toDouble(), 0);
  EXPECT_EQ(result.grad_weight.abs().sum().item().toDouble(), 0);
}

TEST_F(GpuFused, LinearCrossEntropyMarksALabelBeyondTheVocabulary) {
  LinearCrossEntropy::Inputs in = head_inputs(5, 16, 100, at::kFloat);
  in.labels.select(0, 3).fill_(100);
  const at::Tensor logprobs =
      linear_cross_entropy(fused_table(kHead, at::kFloat), in, false, false).logprobs.cpu();
  for (std::int64_t row = 0; row < 5; ++row) {
    EXPECT_EQ(std::isnan(logprobs.const_data_ptr<float>()[row]), row == 3) << row;
  }
}

}  // namespace
}  // namespace heddle::ops::testing
