// Adapters of routed experts: which factors they have, and what PEFT's files hold of them.
#include "adapters/expert_lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sin.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "comm/mesh.h"
#include "testing/message_of.h"

namespace heddle::adapters {
namespace {

using nn::ExpertFactors;
using nn::ExpertWeights;
using ::testing::HasSubstr;

constexpr std::int64_t kExperts = 5, kHidden = 6, kWidth = 4, kRank = 3;

struct Adapted {
  ExpertWeights weights;
  ExpertLora lora;

  Adapted(ExpertWeights::HiddenSide side, ExpertFactors factors)
      : weights("experts.matrix", kExperts,
                side == ExpertWeights::HiddenSide::kInput ? 2 * kWidth : kHidden,
                side == ExpertWeights::HiddenSide::kInput ? kHidden : kWidth, side),
        lora("experts.matrix", weights, 0.5, kRank, 7, factors) {
    double first = 0;
    for (nn::Parameter* factor : {&lora.a(), &lora.b()}) {
      factor->place(comm::Mesh::single());
      factor->allocate(at::kDouble, c10::kCPU);
      factor->write_owned(at::sin(at::arange(factor->numel(), at::kDouble).add(first += 50))
                              .view(factor->global_shape()));
    }
  }
};

TEST(ExpertLora, SharesTheFactorOnTheSideOfTheHiddenStates) {
  const Adapted in(ExpertWeights::HiddenSide::kInput, ExpertFactors::kSharedOuter),
      out(ExpertWeights::HiddenSide::kOutput, ExpertFactors::kSharedOuter);
  EXPECT_EQ(in.lora.a().global_shape(), (std::vector<std::int64_t>{1, kRank, kHidden}));
  EXPECT_EQ(in.lora.b().global_shape(), (std::vector<std::int64_t>{kExperts, 2 * kWidth, kRank}));
  EXPECT_EQ(out.lora.a().global_shape(), (std::vector<std::int64_t>{kExperts, kRank, kWidth}));
  EXPECT_EQ(out.lora.b().global_shape(), (std::vector<std::int64_t>{1, kHidden, kRank}));
  EXPECT_FALSE(in.lora.a().is_expert());
  EXPECT_TRUE(in.lora.a().has_partial_gradient());
  EXPECT_TRUE(in.lora.b().is_expert());
}

TEST(ExpertLora, PeftsFilesHoldItsOwnMatricesAndAreReadBack) {
  for (const auto side : {ExpertWeights::HiddenSide::kInput, ExpertWeights::HiddenSide::kOutput}) {
    Adapted shared(side, ExpertFactors::kSharedOuter), pairs(side, ExpertFactors::kPairs),
        again(side, ExpertFactors::kSharedOuter);
    const at::Tensor a = shared.lora.peft_a(shared.lora.a().data()),
                     b = shared.lora.peft_b(shared.lora.b().data());
    pairs.lora.set_from_peft(a, b);
    again.lora.b().owned().zero_();
    again.lora.set_from_peft(a, b);
    for (std::int64_t e = 0; e < kExperts; ++e) {
      EXPECT_TRUE(at::allclose(pairs.lora.delta(e), shared.lora.delta(e), 1e-12, 1e-12)) << e;
      EXPECT_TRUE(at::allclose(shared.lora.delta(e),
                               at::matmul(shared.lora.b_of(e), shared.lora.a_of(e)) * 0.5));
    }
    EXPECT_TRUE(at::equal(again.lora.a().data(), shared.lora.a().data()));
    EXPECT_TRUE(at::equal(again.lora.b().data(), shared.lora.b().data()));
    EXPECT_TRUE(at::equal(pairs.lora.peft_a(pairs.lora.a().data()), a));
    EXPECT_TRUE(at::equal(pairs.lora.peft_b(pairs.lora.b().data()), b));
  }
}

TEST(ExpertLora, TheCompactFormHasASharedFactorOnceAndIsReadBack) {
  for (const auto side : {ExpertWeights::HiddenSide::kInput, ExpertWeights::HiddenSide::kOutput}) {
    Adapted shared(side, ExpertFactors::kSharedOuter), pairs(side, ExpertFactors::kPairs),
        again(side, ExpertFactors::kSharedOuter);
    const at::Tensor a = shared.lora.compact_a(shared.lora.a().data()),
                     b = shared.lora.compact_b(shared.lora.b().data());
    EXPECT_EQ(a.numel(), shared.lora.a().numel());
    EXPECT_EQ(b.numel(), shared.lora.b().numel());
    for (nn::Parameter* factor : {&again.lora.a(), &again.lora.b()}) factor->owned().zero_();
    again.lora.set_from_peft(a, b);
    EXPECT_TRUE(at::equal(again.lora.a().data(), shared.lora.a().data()));
    EXPECT_TRUE(at::equal(again.lora.b().data(), shared.lora.b().data()));
    // Experts with a pair each have no factor for all.
    EXPECT_THAT(::heddle::testing::message_of([&] { pairs.lora.set_from_peft(a, b); }),
                HasSubstr("this model's 5 experts with rank 3 need"));
    EXPECT_TRUE(at::equal(pairs.lora.compact_a(pairs.lora.a().data()),
                          pairs.lora.peft_a(pairs.lora.a().data())));
  }
}

TEST(ExpertLora, FactorsThatDifferAreNotShared) {
  Adapted pairs(ExpertWeights::HiddenSide::kOutput, ExpertFactors::kPairs),
      shared(ExpertWeights::HiddenSide::kOutput, ExpertFactors::kSharedOuter);
  const std::string message = ::heddle::testing::message_of([&] {
    shared.lora.set_from_peft(pairs.lora.peft_a(pairs.lora.a().data()),
                              pairs.lora.peft_b(pairs.lora.b().data()));
  });
  EXPECT_THAT(message, HasSubstr("'experts.matrix' has another B for expert 1 than for expert 0"));
  EXPECT_THAT(message, HasSubstr("shared_expert_factors"));
}

}  // namespace
}  // namespace heddle::adapters
