// Many sets of adapters on one model: each trains as if it were alone.
#include "tenants/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "base/errors.h"
#include "ckpt/hf_model.h"
#include "tenants/tenants_fixture.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::tenants {
namespace {

class TenantsTest : public Tenants {
 protected:
  struct History {
    std::vector<double> losses, norms;
    std::vector<std::vector<float>> logprobs;
    bool operator==(const History&) const = default;
  };
  /// Trains sets of these seeds together, two works a step.
  std::vector<History> train(const TrainerOptions& trainer_options, const std::vector<int>& seeds,
                             int steps) {
    Trainer trainer(base_, trainer_options);
    std::vector<SetId> sets;
    std::vector<History> histories(seeds.size());
    for (const int seed : seeds) sets.push_back(trainer.create(options(seed)));
    for (int s = 0; s < steps; ++s) {
      std::vector<Work> works;
      for (std::size_t i = 0; i < seeds.size(); ++i) works.push_back(work(sets[i], seeds[i] + s));
      for (std::size_t i = 0; i < seeds.size(); ++i) works.push_back(work(sets[i], seeds[i] + 1));
      const std::vector<WorkResult> results = trainer.forward_backward(works);
      for (std::size_t i = 0; i < results.size(); ++i) {
        EXPECT_EQ(results[i].error, "");
        History& history = histories[i % seeds.size()];
        history.losses.push_back(results[i].metrics.at("loss:sum"));
        for (const DatumOutput& output : results[i].data)
          history.logprobs.push_back(output.logprobs);
      }
      std::vector<SetUpdate> updates;
      for (std::size_t i = 0; i < seeds.size(); ++i) updates.push_back({sets[i], adam(seeds[i])});
      const std::vector<StepResult> stepped = trainer.optim_steps(updates);
      for (std::size_t i = 0; i < seeds.size(); ++i)
        histories[i].norms.push_back(stepped[i].grad_norm);
    }
    return histories;
  }
};

constexpr TrainerOptions kExact = {.pass_tokens = 300, .deterministic = true};

TEST_F(TenantsTest, ASetHasTheBitsOfTrainingAloneWhateverOthersDo) {
  for (const bool moe : {false, true}) {
    place(moe);
    const std::vector<History> together = train(kExact, {1, 2, 3}, 2);
    for (int seed = 1; seed <= 3; ++seed) {
      const std::vector<History> alone = train(kExact, {seed}, 2);
      EXPECT_EQ(together[seed - 1].losses, alone[0].losses) << "moe " << moe << " set " << seed;
      EXPECT_EQ(together[seed - 1].norms, alone[0].norms) << "moe " << moe << " set " << seed;
      EXPECT_TRUE(together[seed - 1].logprobs == alone[0].logprobs)
          << "moe " << moe << " set " << seed;
      EXPECT_NE(alone[0].losses.front(), alone[0].losses.back());
    }
  }
}

TEST_F(TenantsTest, SharedProductsGiveTheNumbersOfTrainingAlone) {
  for (const bool moe : {false, true}) {
    place(moe);
    const std::vector<History> together = train({.pass_tokens = 2000}, {1, 2, 3, 4}, 3);
    for (int seed = 1; seed <= 4; ++seed) {
      const History &found = together[seed - 1], alone = train(kExact, {seed}, 3)[0];
      ASSERT_EQ(found.losses.size(), alone.losses.size());
      for (std::size_t i = 0; i < found.losses.size(); ++i)
        EXPECT_NEAR(found.losses[i], alone.losses[i], 2e-4 * std::abs(alone.losses[i]))
            << "moe " << moe << " set " << seed << " loss " << i;
      for (std::size_t i = 0; i < found.norms.size(); ++i)
        EXPECT_NEAR(found.norms[i], alone.norms[i], 2e-4 * alone.norms[i])
            << "moe " << moe << " set " << seed << " step " << i;
    }
  }
}

TEST_F(TenantsTest, UpdatesOfSetsTogetherAreTheirUpdatesOneByOne) {
  place(/*moe=*/true);
  const auto factors_after = [&](bool together) {
    Trainer trainer(base_, kExact);
    std::vector<SetUpdate> updates;
    for (int seed = 1; seed <= 3; ++seed)
      updates.push_back({trainer.create(options(seed)), adam(seed)});
    for (int s = 0; s < 3; ++s) {
      std::vector<Work> works;
      // One of them has no gradients.
      for (std::size_t i = 1; i < 3; ++i) works.push_back(work(updates[i].set, s + 5));
      trainer.forward_backward(works);
      if (together) {
        trainer.optim_steps(updates);
      } else {
        for (const SetUpdate& update : updates) trainer.optim_step(update.set, update.params);
      }
    }
    std::vector<at::Tensor> values;
    for (const SetUpdate& update : updates) {
      EXPECT_EQ(trainer.steps(update.set), 3);
      trainer.snapshot(update.set)->visit_parameters([&](const nn::Parameter& factor) {
        values.push_back(factor.data());
      });
    }
    return values;
  };
  const auto together = factors_after(true), by_itself = factors_after(false);
  ASSERT_EQ(together.size(), by_itself.size());
  for (std::size_t i = 0; i < together.size(); ++i)
    EXPECT_TRUE(at::equal(together[i], by_itself[i])) << i;
}

TEST_F(TenantsTest, ASetWithTwoUpdatesInOneStepIsRefused) {
  place(/*moe=*/false);
  Trainer trainer(base_, kExact);
  const SetId set = trainer.create(options(1));
  const std::vector<SetUpdate> updates = {{set, {}}, {set, {}}};
  EXPECT_THROW(trainer.optim_steps(updates), DataError);
  EXPECT_EQ(trainer.steps(set), 0);
}

TEST_F(TenantsTest, LossIsTheWeightedSumOfItsOutputsAndForwardOnlyLeavesGradients) {
  place(/*moe=*/false);
  Trainer trainer(base_, kExact);
  const SetId set = trainer.create(options(3));
  Work forward = work(set, 2);
  forward.forward_only = true;
  const WorkResult result = trainer.forward_backward({&forward, 1})[0];
  double sum = 0, elementwise = 0;
  for (std::size_t i = 0; i < forward.data.size(); ++i) {
    const std::vector<float>& weights = forward.data[i].inputs["weights"];
    ASSERT_EQ(result.data[i].logprobs.size(), weights.size());
    for (std::size_t t = 0; t < weights.size(); ++t) {
      sum -= weights[t] * result.data[i].logprobs[t];
      elementwise += result.data[i].elementwise_loss[t];
    }
  }
  EXPECT_NEAR(result.metrics.at("loss:sum"), sum, 1e-4);
  EXPECT_NEAR(result.metrics.at("loss:sum"), elementwise, 1e-4);
  EXPECT_EQ(trainer.optim_step(set, {}).grad_norm, 0);
  EXPECT_EQ(trainer.steps(set), 1);
}

/// With and without products of its own for each set.
class TenantsInOnePassTest : public TenantsTest, public ::testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(Products, TenantsInOnePassTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Own" : "Shared"; });

TEST_P(TenantsInOnePassTest, NotANumberStaysInItsSet) {
  place(/*moe=*/true);
  Trainer trainer(base_, {.pass_tokens = 300, .deterministic = GetParam()});
  const SetId good = trainer.create(options(1)), bad = trainer.create(options(2));
  std::vector<Work> works = {work(bad, 1), work(good, 2), work(bad, 3)};
  works[0].data[1].inputs["weights"][4] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<WorkResult> results = trainer.forward_backward(works);
  EXPECT_TRUE(std::isnan(results[0].metrics.at("loss:sum")));
  EXPECT_TRUE(std::isfinite(results[1].metrics.at("loss:sum")));
  const std::vector<SetUpdate> updates = {{bad, {}}, {good, {}}};
  const std::vector<StepResult> stepped = trainer.optim_steps(updates);
  const StepResult &refused = stepped[0], &taken = stepped[1];
  EXPECT_FALSE(refused.updated);
  EXPECT_EQ(trainer.steps(bad), 0);
  EXPECT_TRUE(taken.updated);
  EXPECT_TRUE(std::isfinite(taken.grad_norm));
  // Its next step has gradients of its own again.
  std::vector<Work> again = {work(bad, 3)};
  trainer.forward_backward(again);
  EXPECT_TRUE(trainer.optim_step(bad, {}).updated);
}

TEST_F(TenantsTest, WrongWorkIsRefusedByItselfAndNamed) {
  place(/*moe=*/false);
  Trainer trainer(base_, kExact);
  const SetId set = trainer.create(options(1));
  const auto refusal = [&](const std::function<void(Work&)>& change) {
    std::vector<Work> works = {work(set, 1), work(set, 2)};
    change(works[0]);
    const std::vector<WorkResult> results = trainer.forward_backward(works);
    EXPECT_EQ(results[1].error, "");
    return results[0].error;
  };
  EXPECT_EQ(refusal([](Work& w) { w.data[1].tokens[2] = 97; }),
            "datum 1: token 97 at position 2 is not in the vocabulary of 97");
  EXPECT_EQ(refusal([](Work& w) { w.data[0].target_tokens.pop_back(); }),
            "datum 0: 'target_tokens' has 3 values for 4 tokens");
  EXPECT_EQ(refusal([](Work& w) {
              w.data[2].inputs["weights"] = {1, 2};
            }),
            "datum 2: 'weights' has 2 values for 1 target tokens");
  EXPECT_EQ(refusal([](Work& w) { w.data[2].inputs["advantages"] = {1}; }),
            "datum 2: loss_fn cross_entropy has no input 'advantages'");
  EXPECT_EQ(refusal([](Work& w) { w.config["beta"] = 1; }),
            "loss_fn_config: loss_fn cross_entropy has no 'beta': expected none");
  EXPECT_EQ(refusal([](Work& w) { w.set = 77; }), "there is no set of adapters 77");
  EXPECT_NE(refusal([](Work& w) { w.loss_fn = "hinge"; }).find("loss_fn 'hinge' is not one of"),
            std::string::npos);
  EXPECT_EQ(testing::message_of([&] { trainer.create({.attn = false, .mlp = false}); }),
            "nothing to train: expected one of train_attn, train_mlp, train_unembed");
}

/// Work that gives datums other targets, and their weights by `weight_of` the target.
Work with_targets(Work work, std::size_t datum, std::vector<std::int64_t> targets, float weight) {
  work.data = {work.data[datum]};
  work.data[0].inputs["weights"].assign(targets.size(), weight);
  work.data[0].target_tokens = std::move(targets);
  return work;
}

TEST_F(TenantsTest, SoftTargetsAreTheSumOfTheirHardTargets) {
  for (const bool deterministic : {false, true}) {
    place(false, at::kDouble);
    Trainer trainer(base_, {.pass_tokens = 40, .deterministic = deterministic});
    const SetId soft_set = trainer.create(options(2)), hard_set = trainer.create(options(2)),
                other = trainer.create(options(1));
    const std::size_t length = work(soft_set, 0).data[1].tokens.size();
    const auto targets = [&](int k) {
      std::vector<std::int64_t> tokens;
      for (std::size_t t = 0; t < length; ++t)
        tokens.push_back(static_cast<std::int64_t>(t * t + 13 * static_cast<std::size_t>(k)) % 97);
      return tokens;
    };
    constexpr float kWeights[] = {0.7F, -0.2F, 0.5F};
    // The second target is left out of every third place, as CSR matrices may do.
    const auto has = [](std::size_t t, int k) { return k != 1 || t % 3 != 0; };
    Work soft = with_targets(work(soft_set, 0), 1, {}, 0);
    Datum& datum = soft.data[0];
    datum.target_width = 5;
    for (std::size_t t = 0; t < length; ++t) {
      for (int k = 0; k < 3; ++k) {
        if (!has(t, k)) continue;
        datum.target_tokens.push_back(targets(k)[t]);
        datum.target_cells.push_back(static_cast<std::int64_t>(5 * t) + k);
        datum.inputs["weights"].push_back(kWeights[k]);
      }
    }
    std::vector<Work> works = {soft, work(other, 3)};
    const std::vector<WorkResult> together = trainer.forward_backward(works);
    ASSERT_EQ(together[0].error, "");
    double sum = 0;
    std::vector<std::vector<float>> hard;
    for (int k = 0; k < 3; ++k) {
      Work one = with_targets(work(hard_set, 0), 1, targets(k), kWeights[k]);
      for (std::size_t t = 0; t < length; ++t)
        if (!has(t, k)) one.data[0].inputs["weights"][t] = 0;
      const WorkResult result = trainer.forward_backward({&one, 1})[0];
      sum += result.metrics.at("loss:sum");
      hard.push_back(result.data[0].logprobs);
    }
    EXPECT_NEAR(together[0].metrics.at("loss:sum"), sum, 1e-9);
    for (std::size_t r = 0; r < datum.target_cells.size(); ++r) {
      const auto place = static_cast<std::size_t>(datum.target_cells[r]);
      EXPECT_NEAR(together[0].data[0].logprobs[r], hard[place % 5][place / 5], 1e-6);
    }
    // Gradients are equal: so are the norm and the log-probabilities after a step.
    const AdamParams step{.lr = 1e-2};
    EXPECT_NEAR(trainer.optim_step(soft_set, step).grad_norm,
                trainer.optim_step(hard_set, step).grad_norm, 1e-9);
    std::vector<Work> after = {work(soft_set, 5), work(hard_set, 5)};
    const std::vector<WorkResult> results = trainer.forward_backward(after);
    EXPECT_NEAR(results[0].metrics.at("loss:sum"), results[1].metrics.at("loss:sum"), 1e-6);
  }
}

TEST_F(TenantsTest, SoftTargetsAreForCrossEntropyAndInTheirOrder) {
  place(false);
  Trainer trainer(base_, {});
  Work one = with_targets(work(trainer.create(options(0)), 0), 0, {1, 2}, 1);
  one.data[0].target_width = 2;
  one.data[0].target_cells = {0, 1};
  EXPECT_EQ(trainer.forward_backward({&one, 1})[0].error, "");
  Work wrong = one;
  wrong.data[0].target_cells = {1, 1};
  EXPECT_NE(trainer.forward_backward({&wrong, 1})[0].error.find("target cell 1 after 1"),
            std::string::npos);
  wrong = one;
  wrong.loss_fn = "importance_sampling";
  wrong.data[0].inputs = {{"logprobs", {0, 0}}, {"advantages", {1, 1}}};
  EXPECT_NE(trainer.forward_backward({&wrong, 1})[0].error.find("takes one target a token"),
            std::string::npos);
}

// In a sequence of one token no state decays, so nothing reaches what makes the decay.
TEST_F(TenantsTest, FactorsThatNoGradientReachesAreToldOnce) {
  place(/*moe=*/false);
  Trainer trainer(base_, kExact);
  const SetId one = trainer.create({.rank = 4}), other = trainer.create({.rank = 4});
  std::vector<std::string> told;
  for (int s = 0; s < 25; ++s) {
    Work short_work;
    short_work.set = one;
    short_work.loss_fn = "cross_entropy";
    for (int i = 0; i < 3; ++i) short_work.data.push_back(datum(3 * s + i, 1));
    for (Datum& datum : short_work.data) datum.inputs["weights"] = {1};
    const std::vector<Work> works = {short_work, work(other, s)};
    trainer.forward_backward(works);
    const std::vector<SetUpdate> updates = {{one, {}}, {other, {}}};
    const std::vector<StepResult> results = trainer.optim_steps(updates);
    if (!results[0].warning.empty()) told.push_back(results[0].warning);
    EXPECT_EQ(results[1].warning, "");
  }
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].find("linear_attn.in_proj_a.lora_A.weight"), std::string::npos) << told[0];
}

}  // namespace
}  // namespace heddle::tenants
