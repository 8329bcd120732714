// Several sets of adapters in one pass: each gets the bits that it has without the others.
#include <algorithm>
#include <map>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include "adapters/lora.h"
#include "assembly/model_units.h"
#include "ckpt/hf_adapter.h"
#include "models/tiny_model.h"
#include "ops/linear/dropout.h"
#include "parallel/block_runner.h"

namespace heddle {
namespace {

using models::Model;

/// A set of one tenant, with factors that are not neutral.
std::unique_ptr<adapters::LoraSet> make_set(Model& model, std::int64_t rank, double dropout,
                                            const std::vector<std::string>& targets,
                                            const std::vector<std::string>& target_parameters,
                                            nn::ExpertFactors factors = nn::ExpertFactors::kPairs) {
  adapters::LoraOptions options;
  options.rank = rank;
  options.dropout = dropout;
  options.seed = static_cast<std::uint64_t>(rank);
  options.expert_factors = factors;
  auto set = std::make_unique<adapters::LoraSet>(ckpt::adaptable(model), targets, target_parameters,
                                                 options, model.context());
  set->initialize();
  set->visit_parameters([&](nn::Parameter& factor) {
    if (factor.name().find("lora_B") != std::string::npos)
      factor.owned().copy_(at::sin(at::arange(factor.owned().numel()).add(rank))
                               .mul(0.05)
                               .view(factor.global_shape()));
  });
  return set;
}

/// The rows of one tenant: its set (null: the base model) and its sequence.
struct Rows {
  const adapters::LoraSet* set;
  std::pair<int, int> seed_and_length;
};

struct Outcome {
  at::Tensor hidden, input_gradient;
  std::map<std::string, at::Tensor> gradients;  ///< By set and name.
};

/// Forward and backward of all rows in one pass, `times` times.
Outcome run(Model& model, const std::vector<Rows>& rows, parallel::Recompute recompute,
            int times = 1) {
  std::vector<std::pair<int, int>> sequences;
  for (const Rows& one : rows) sequences.push_back(one.seed_and_length);
  const data::Batch batch = testing::batch_of(sequences);
  nn::Pass pass = model.pass({batch.cu_seqlens, batch.cu_seqlens_host, batch.max_seqlen},
                             batch.position_ids, batch.real_tokens, /*training=*/true);
  for (const Rows& one : rows) {
    const auto [seed, length] = one.seed_and_length;
    const at::Tensor numbers = at::arange(1000 * seed, 1000 * seed + length, at::kLong);
    const bool drops = one.set != nullptr && one.set->options().dropout > 0;
    pass.adapters.push_back(
        {one.set, length, drops ? ops::dropout_draws(numbers, 3) : at::Tensor()});
  }
  // Every set's parameters are the blocks': each collects its own gradients.
  std::vector<parallel::BlockEntry> blocks = assembly::block_entries(model);
  parallel::BlockRunner runner(blocks, {recompute});
  const at::Tensor embedded = model.embed(batch.tokens).detach();
  Outcome outcome;
  for (int i = 0; i < times; ++i) {
    parallel::BlockRunner::Tape tape;
    outcome.hidden = runner.forward(embedded, pass, /*wants_input_gradient=*/true, tape);
    outcome.input_gradient = runner.backward(at::sin(embedded.mul(50)), 0, tape);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool is_taken = std::any_of(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(i),
                                      [&](const Rows& one) { return one.set == rows[i].set; });
    if (rows[i].set == nullptr || is_taken) continue;
    rows[i].set->visit_parameters([&](nn::Parameter& factor) {
      factor.collect_gradient();
      outcome.gradients[std::to_string(rows[i].set->options().rank) + factor.name()] =
          factor.gradient();
      factor.clear_gradient();
    });
  }
  return outcome;
}

class AdapterSets : public ::testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(AdapterSets, InOnePassHaveTheBitsThatTheyHaveAlone) {
  const auto [moe, is_reference] = GetParam();
  ops::KernelPolicy policy;
  if (is_reference) {
    for (const char* op :
         {"linear", "gated_delta_rule", "attention", "rms_norm", "swiglu", "gdn_gates",
          "gated_rms_norm", "causal_conv1d", "qk_norm_rope", "output_gate"})
      policy.named[op] = "reference";
  }
  const auto model = testing::tiny_model(at::kFloat, moe, c10::Device(c10::kCPU), policy);
  model->visit_parameters([](nn::Parameter& p) { p.set_trainable(false); });
  const auto a = make_set(*model, 4, 0.25, {"q_proj", "in_proj_qkv", "down_proj"}, {}),
             b = make_set(
                 *model, 6, 0, {"all-linear"},
                 moe ? std::vector<std::string>{"experts.down_proj"} : std::vector<std::string>{});
  const auto experts = moe ? std::vector<std::string>{"experts.gate_up_proj", "experts.down_proj"}
                           : std::vector<std::string>{};
  const auto c = make_set(*model, 3, 0, {"o_proj"}, experts, nn::ExpertFactors::kSharedOuter);
  const std::vector<Rows> all = {
      {a.get(), {1, 65}}, {nullptr, {2, 30}}, {b.get(), {3, 41}}, {c.get(), {4, 33}}};
  for (const auto recompute : {parallel::Recompute::kOff, parallel::Recompute::kElementwise}) {
    const Outcome together = run(*model, all, recompute);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      // The others' rows stay: in another pack gradients round differently.
      std::vector<Rows> one = all;
      for (std::size_t j = 0; j < all.size(); ++j) {
        if (j != i) one[j].set = nullptr;
      }
      const Outcome alone = run(*model, one, recompute);
      const std::int64_t count = all[i].seed_and_length.second;
      const auto rows = [&](const at::Tensor& whole) { return whole.narrow(0, first, count); };
      EXPECT_TRUE(at::equal(rows(together.hidden), rows(alone.hidden)));
      EXPECT_TRUE(at::equal(rows(together.input_gradient), rows(alone.input_gradient)));
      for (const auto& [name, gradient] : alone.gradients) {
        ASSERT_TRUE(gradient.defined()) << name;
        EXPECT_GT(gradient.norm().item<double>(), 0) << name;
        EXPECT_TRUE(at::equal(together.gradients.at(name), gradient)) << name;
      }
      first += count;
    }
  }
}

/// A set whose rows stand in two places of a pass, one of another rank between them, and a second
/// pass that adds to the gradients of the first.
void check_sums(const ops::KernelPolicy& policy, bool moe = false) {
  const auto model = testing::tiny_model(at::kDouble, moe, c10::Device(c10::kCPU), policy);
  model->visit_parameters([](nn::Parameter& p) { p.set_trainable(false); });
  const auto a = make_set(*model, 4, 0, {"all-linear"}, {}),
             b = make_set(
                 *model, 7, 0, {"q_proj", "in_proj_qkv", "down_proj"},
                 moe ? std::vector<std::string>{"experts.down_proj"} : std::vector<std::string>{});
  const auto experts = moe ? std::vector<std::string>{"experts.gate_up_proj", "experts.down_proj"}
                           : std::vector<std::string>{};
  const auto c = make_set(*model, 3, 0, {"o_proj"}, experts, nn::ExpertFactors::kSharedOuter);
  const std::vector<Rows> all = {{a.get(), {1, 30}}, {b.get(), {2, 17}}, {c.get(), {5, 21}},
                                 {nullptr, {3, 10}}, {a.get(), {4, 25}}, {c.get(), {6, 9}}};
  std::map<std::string, at::Tensor> expected;
  std::vector<at::Tensor> hidden, input_gradients;
  for (const Rows& one : all) {
    const Outcome alone = run(*model, {one}, parallel::Recompute::kOff);
    hidden.push_back(alone.hidden);
    input_gradients.push_back(alone.input_gradient);
    for (const auto& [name, gradient] : alone.gradients) {
      at::Tensor& sum = expected[name];
      sum = sum.defined() ? sum + 2 * gradient : 2 * gradient;
    }
  }
  const Outcome together = run(*model, all, parallel::Recompute::kOff, /*times=*/2);
  const auto difference = [](const at::Tensor& x, const at::Tensor& y) {
    return ((x - y).norm() / y.norm()).item<double>();
  };
  EXPECT_LE(difference(together.hidden, at::cat(hidden)), 1e-13);
  EXPECT_LE(difference(together.input_gradient, at::cat(input_gradients)), 1e-13);
  EXPECT_EQ(together.gradients.size(), expected.size());
  for (const auto& [name, gradient] : expected)
    EXPECT_LE(difference(together.gradients.at(name), gradient), 1e-12) << name;
}

TEST(AdapterSet, GradientsOfAllItsRowsAndPassesAddUp) { check_sums({}); }
TEST(AdapterSet, GradientsOfAllItsRowsAndPassesAddUpInGroups) {
  ops::KernelPolicy policy;
  policy.named["grouped_low_rank"] = "reference";
  check_sums(policy);
}

/// Rows of neighbours that leave the routed experts as they are share their products.
TEST(AdapterSet, GradientsOfAllItsRowsAndPassesAddUpBesideExperts) { check_sums({}, /*moe=*/true); }

INSTANTIATE_TEST_SUITE_P(Models, AdapterSets,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "Experts" : "Dense") +
                                  (std::get<1>(info.param) ? "Reference" : "Kernels");
                         });

TEST(AdapterSet, TheBaseModelStandsBesideASet) {
  const auto model = testing::tiny_model(at::kFloat, /*moe=*/true, c10::Device(c10::kCPU));
  model->visit_parameters([](nn::Parameter& p) { p.set_trainable(false); });
  const Rows base = {nullptr, {1, 20}};
  const at::Tensor before = run(*model, {base}, parallel::Recompute::kOff).hidden;
  const auto set = make_set(*model, 4, 0, {"all-linear"}, {"experts.gate_up_proj"});
  EXPECT_TRUE(at::equal(run(*model, {base}, parallel::Recompute::kOff).hidden, before));
  EXPECT_FALSE(
      at::equal(run(*model, {{set.get(), {1, 20}}}, parallel::Recompute::kOff).hidden, before));
}

}  // namespace
}  // namespace heddle
