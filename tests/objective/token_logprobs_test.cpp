// Log-probabilities and the gradient of a loss that mixes them, against logits that are held whole.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <memory>

#include "models/tiny_model.h"
#include "nn/low_rank.h"
#include "objective/language_model.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// With a head that is trained, which takes two passes, and with a frozen one, which takes one.
class TokenLogprobsTest : public ::testing::TestWithParam<bool> {};

TEST_P(TokenLogprobsTest, EqualWholeLogitsAndTheirGradient) {
  const auto model = testing::tiny_model(at::kDouble, /*moe=*/false, at::Device(at::kCPU));
  model->head_weight().set_trainable(GetParam());
  const data::Batch batch = testing::batch_of({{1, 9}, {2, 29}, {3, 5}});
  const at::Tensor hidden =
      at::rand({batch.size(), model->config().hidden_size}, at::kDouble) - 0.5;
  const LossRows rows(*model, batch, 1);
  ASSERT_GT(rows.total, 10);
  const auto index = at::tensor(rows.tokens, at::kLong);
  // A loss in which every log-probability matters for the derivative by every other.
  const auto loss_of = [](const at::Tensor& logprobs) { return (logprobs.sum() * 0.1).exp(); };

  at::Tensor leaf = hidden.clone().set_requires_grad(true);
  const at::Tensor weight = model->head_weight().data().detach().clone().set_requires_grad(true);
  const at::Tensor logits = at::mm(model->final_norm(leaf.index_select(0, index)), weight.t());
  const at::Tensor expected =
      at::gather(at::log_softmax(logits, 1), 1, rows.labels.unsqueeze(1)).squeeze(1);
  const at::Tensor loss = loss_of(expected);
  ops::run_backward({loss}, {at::ones_like(loss)});

  TokenLogprobs logprobs(*model, hidden, rows, {.want_gradients = true});
  EXPECT_TRUE(at::allclose(logprobs.values(), expected.detach(), 1e-12, 1e-12));
  at::Tensor values = logprobs.values().clone().set_requires_grad(true);
  const at::Tensor mine = loss_of(values);
  ops::run_backward({mine}, {at::ones_like(mine)});
  EXPECT_TRUE(at::allclose(logprobs.gradient(values.grad()), leaf.grad(), 1e-10, 1e-12));
  model->head_weight().collect_gradient();
  const at::Tensor gradient = model->head_weight().gradient();
  ASSERT_EQ(gradient.defined(), GetParam());
  if (GetParam()) {
    EXPECT_TRUE(at::allclose(gradient, weight.grad(), 1e-10, 1e-12));
  }
}

TEST(TokenLogprobsOfAChangedHead, EqualAHeadWithTheChangeAddedRowByRow) {
  const auto model = testing::tiny_model(at::kDouble, /*moe=*/false, at::Device(at::kCPU));
  const data::Batch batch = testing::batch_of({{1, 9}, {2, 29}, {3, 5}});
  const std::int64_t width = model->config().hidden_size, vocab = model->config().vocab_size;
  const at::Tensor hidden = at::rand({batch.size(), width}, at::kDouble) - 0.5;
  const LossRows rows(*model, batch, 1);
  const auto index = at::tensor(rows.tokens, at::kLong);
  const auto loss_of = [](const at::Tensor& logprobs) { return (logprobs.sum() * 0.1).exp(); };
  model->head_weight().set_trainable(false);
  std::vector<std::unique_ptr<nn::LowRank>> changes;
  for (const std::int64_t rank : {2, 3}) {
    changes.push_back(std::make_unique<nn::LowRank>("lm_head", width, vocab, /*scaling=*/0.7, rank,
                                                    nn::LowRankDropout{}, nn::Placement{}));
    for (nn::Parameter* factor : {&changes.back()->a(), &changes.back()->b()}) {
      factor->place(model->context().mesh);
      factor->allocate(at::kDouble, at::kCPU);
      factor->data().copy_(at::rand(factor->global_shape(), at::kDouble) - 0.5);
    }
  }
  // The rows between have none.
  const std::vector<ChangedHeadRows> changed = {
      {changes[0].get(), 4}, {nullptr, 3}, {changes[1].get(), rows.total - 7}};

  at::Tensor leaf = hidden.clone().set_requires_grad(true);
  const at::Tensor normalized = model->final_norm(leaf.index_select(0, index));
  at::Tensor logits = at::mm(normalized, model->head_weight().data().t());
  std::vector<at::Tensor> factors;
  std::int64_t first = 0;
  std::vector<at::Tensor> parts;
  for (const ChangedHeadRows& part : changed) {
    at::Tensor own = logits.narrow(0, first, part.rows);
    if (part.change != nullptr) {
      const at::Tensor a = part.change->a().data().clone().set_requires_grad(true),
                       b = part.change->b().data().clone().set_requires_grad(true);
      own = own + 0.7 * at::mm(at::mm(normalized.narrow(0, first, part.rows), a.t()), b.t());
      factors.insert(factors.end(), {a, b});
    }
    parts.push_back(own);
    first += part.rows;
  }
  const at::Tensor expected =
      at::gather(at::log_softmax(at::cat(parts), 1), 1, rows.labels.unsqueeze(1)).squeeze(1);
  const at::Tensor loss = loss_of(expected);
  ops::run_backward({loss}, {at::ones_like(loss)});

  const TokenLogprobs forward(*model, hidden, rows, {.changed = changed});
  EXPECT_TRUE(at::allclose(forward.values(), expected.detach(), 1e-12, 1e-12));
  TokenLogprobs logprobs(*model, hidden, rows, {.want_gradients = true, .changed = changed});
  EXPECT_TRUE(at::allclose(logprobs.values(), expected.detach(), 1e-12, 1e-12));
  at::Tensor values = logprobs.values().clone().set_requires_grad(true);
  const at::Tensor mine = loss_of(values);
  ops::run_backward({mine}, {at::ones_like(mine)});
  EXPECT_TRUE(at::allclose(logprobs.gradient(values.grad()), leaf.grad(), 1e-10, 1e-12));
  for (std::size_t i = 0; i < factors.size(); ++i) {
    nn::Parameter& factor = i % 2 == 0 ? changes[i / 2]->a() : changes[i / 2]->b();
    factor.collect_gradient();
    EXPECT_TRUE(at::allclose(factor.gradient(), factors[i].grad(), 1e-10, 1e-12)) << i;
  }
  EXPECT_FALSE(model->head_weight().gradient().defined());

  // Derivatives that are known before give the same in one pass.
  std::vector<at::Tensor> gradients;
  for (const auto& change : changes) {
    for (nn::Parameter* factor : {&change->a(), &change->b()}) {
      gradients.push_back(factor->gradient().clone());
      factor->clear_gradient();
    }
  }
  TokenLogprobs known(
      *model, hidden, rows,
      {.want_gradients = true, .changed = changed, .known_derivatives = values.grad()});
  EXPECT_TRUE(at::allclose(known.values(), expected.detach(), 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(known.gradient(values.grad()), leaf.grad(), 1e-10, 1e-12));
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    nn::Parameter& factor = i % 2 == 0 ? changes[i / 2]->a() : changes[i / 2]->b();
    factor.collect_gradient();
    EXPECT_TRUE(at::allclose(factor.gradient(), gradients[i], 1e-10, 1e-12)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(TrainedAndFrozen, TokenLogprobsTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Trained" : "Frozen"; });

}  // namespace
}  // namespace heddle::objective
