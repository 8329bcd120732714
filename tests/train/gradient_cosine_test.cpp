// Cosines of gradients that follow each other, compared with those of what plain SGD changed.
#include "train/gradient_cosine.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "comm/ranks.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

double cosine(const at::Tensor& a, const at::Tensor& b) {
  return ((a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())).item<double>();
}

/// Keeps the trained values after each step, in float64 and end to end.
class Weights : public train::Observer {
 public:
  void on_step(const train::StepInfo& info) override {
    after.push_back(now());
    const double* found = info.metrics.find("grad_cos_prev");
    cosines.push_back(found != nullptr ? *found : std::nan(""));
  }
  at::Tensor now() const {
    std::vector<at::Tensor> all;
    for (const nn::Parameter* parameter : trainer->setup().placed.trainable)
      all.push_back(parameter->owned().reshape({-1}).to(at::kDouble).clone());
    return at::cat(all);
  }
  train::Trainer* trainer = nullptr;
  std::vector<at::Tensor> after;
  std::vector<double> cosines;
};

class GradientCosineTest : public TrainerTest {
 protected:
  Weights train(const std::string& run, std::vector<std::string> more) const {
    more.insert(more.begin(), {"model.dtype=float64", "optim.name=sgd", "optim.momentum=0",
                               "optim.clip_norm=0", "optim.schedule=constant",
                               "optim.warmup_steps=0", "optim.lr=0.01", "train.max_steps=5"});
    std::atomic<bool> stop = false;
    Weights weights;
    train::Trainer trainer(config(run, more), weights, stop);
    weights.trainer = &trainer;
    weights.after.push_back(weights.now());
    trainer.run();
    return weights;
  }
};

TEST_F(GradientCosineTest, IsThatOfWhatPlainSgdChanges) {
  for (const char* method : {"full", "lora"}) {
    const Weights found = train(std::string("sgd-") + method,
                                {"train.grad_cosine=true", std::string("train.method=") + method,
                                 "adapter.rank=4", "train.micro_batch_tokens=64"});
    ASSERT_EQ(found.cosines.size(), 5u);
    EXPECT_TRUE(std::isnan(found.cosines[0])) << method;
    for (std::size_t i = 1; i < 5; ++i) {
      const at::Tensor before = found.after[i] - found.after[i - 1],
                       change = found.after[i + 1] - found.after[i];
      EXPECT_NEAR(found.cosines[i], cosine(before, change), 1e-8) << method << i;
      EXPECT_GT(std::abs(found.cosines[i]), 1e-4) << method << i;
      EXPECT_LT(std::abs(found.cosines[i]), 0.9999) << method << i;
    }
  }
}

TEST_F(GradientCosineTest, IsNotThereUnlessItIsAskedFor) {
  const Weights found = train("plain", {});
  EXPECT_THAT(found.cosines, ::testing::Each(::testing::IsNan()));
}

TEST(GradientCosine, CountsEachGradientOnceOverTheRanks) {
  // Both ranks have a gradient of their own, and the second one a copy of another.
  const auto tensor = [](std::vector<double> values) { return at::tensor(values, at::kDouble); };
  const at::Tensor own[2][2] = {{tensor({1, -2, 3}), tensor({4, 1, -1})},
                                {tensor({0.5, 2, 1}), tensor({-3, 2, 2})}};
  const at::Tensor shared[2] = {tensor({2, 1}), tensor({1, 5})};
  const double expected = cosine(at::cat({own[0][0], own[1][0], shared[0]}),
                                 at::cat({own[0][1], own[1][1], shared[1]}));
  const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh({2, 1, 1, 1, 1}, world, 1);
    nn::Parameter mine("mine", {3}), both("both", {2}), unused("unused", {4});
    std::vector<nn::Parameter*> all = {&mine, &both, &unused};
    for (nn::Parameter* parameter : all) {
      parameter->allocate(at::kDouble, at::kCPU);
      parameter->set_trainable(true);
    }
    if (world->rank() == 1) both.set_copy();
    train::GradientCosine cosines(all, mesh.world_group());
    const auto step = [&](std::size_t i) {
      mine.add_gradient(own[world->rank()][i]);
      both.add_gradient(shared[i]);
      const at::Tensor whole = at::cat({own[0][i], own[1][i], shared[i]});
      const auto found = cosines.next((whole * whole).sum().sqrt().item<double>());
      for (nn::Parameter* parameter : all) parameter->clear_gradient();
      return found;
    };
    EXPECT_FALSE(step(0));
    EXPECT_NEAR(step(1).value(), expected, 1e-12);
    EXPECT_NEAR(step(1).value(), 1, 1e-12);
    // Nothing is said of a step without a gradient, nor of the one after it.
    EXPECT_FALSE(cosines.next(0));
    EXPECT_FALSE(step(0));
    EXPECT_NEAR(step(1).value(), expected, 1e-12);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace heddle
