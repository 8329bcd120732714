// The policy objective's head on one micro-batch, against logits that are held whole and formulas
// that autograd derives.
#include "objective/policy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "assembly/model_units.h"
#include "comm/ranks.h"
#include "device/sim/simulation.h"
#include "models/tiny_model.h"
#include "ops/autograd.h"
#include "ops/collectives.h"

namespace heddle::objective {
namespace {

constexpr double kTemperature = 0.7;

/// A tiny model, rows that a policy generated, and hidden states.
struct Scene {
  assembly::ModelOnRanks placed;
  data::Batch batch = testing::batch_of({{1, 9}, {2, 29}, {3, 5}}, /*prompt=*/3);
  at::Tensor hidden;
  std::vector<PolicyRow> rows;
  mutable device::sim::Counts waits = {};  ///< Waits of the last head, on a simulated device.

  explicit Scene(assembly::ModelOnRanks model) : placed(std::move(model)) {
    const std::int64_t width = placed.model->config().hidden_size;
    hidden = at::sin(at::arange(batch.size() * width, at::kDouble)).view({batch.size(), width});
    for (std::size_t s = 0; s < 3; ++s) {
      PolicyRow& row = rows.emplace_back();
      const int length = batch.cu_seqlens_host[s + 1] - batch.cu_seqlens_host[s];
      for (int t = 0; t < length; ++t) {
        row.old.push_back(-4.5 - 0.4 * (t % 3));
        row.reference.push_back(-4 - 0.3 * (t % 4));
        row.advantages.push_back(s == 1 ? -0.8 : 0.5 + static_cast<double>(s));
      }
    }
  }
  std::vector<double> column(std::vector<double> PolicyRow::*member,
                             const std::vector<std::int64_t>& tokens) const {
    std::vector<double> all, chosen;
    for (const PolicyRow& row : rows)
      all.insert(all.end(), (row.*member).begin(), (row.*member).end());
    for (const std::int64_t token : tokens) chosen.push_back(all[static_cast<std::size_t>(token)]);
    return chosen;
  }
  HeadResult run(Policy& policy, bool wants_gradients = true) const {
    policy.set_rows(rows);
    const std::vector<HeadFunction> heads =
        policy.heads({&batch, 1}, {.gradient_scale = 0.25, .wants_gradients = wants_gradients});
    const LocalBatch local(*placed.model, batch);
    const at::Tensor share = share_of(hidden, local);
    const auto before = device::sim::waits();
    const HeadResult result = heads[0](share, local);
    waits = device::sim::waits_since(before);
    return result;
  }

  /// Places in the whole batch, which may be padded, of the rows of this rank's hidden states.
  at::Tensor places(const LocalBatch& local) const {
    const ops::Rows own = ops::own_rows(local.host.size(), placed.model->tensor_group());
    return at::tensor(local.places_of_tokens(), at::kLong).narrow(0, own.first, own.count);
  }
  at::Tensor share_of(const at::Tensor& whole, const LocalBatch& local) const {
    const std::int64_t padded = placed.model->padded_tokens(batch.size());
    const at::Tensor rows = at::constant_pad_nd(whole, {0, 0, 0, padded - batch.size()});
    return rows.index_select(0, places(local)).to(placed.context.dtype).to(placed.context.device);
  }
};

assembly::ModelOnRanks model_on(c10::Device device, c10::ScalarType dtype, bool trains_head) {
  assembly::ModelOnRanks placed;
  placed.model = testing::tiny_model(dtype, /*moe=*/false, device);
  placed.context = placed.model->context();
  placed.model->head_weight().set_trainable(trains_head);
  return placed;
}

/// Loss, whether the head is trained, and whether the loss raises the entropy.
using Param = std::tuple<PolicyLoss, bool, bool>;

PolicyOptions options_of(PolicyLoss loss, bool has_entropy) {
  PolicyOptions options;
  if (has_entropy) options.entropy_coefficient = 0.3;
  options.temperature = kTemperature;
  options.loss = loss;
  options.mean = LossMean::kSequenceToken;
  options.kl_coefficient = 0.1;
  options.kl_form = KlForm::kK3;
  options.longest_sequence = 32;
  return options;
}

/// The loss by its definition, of log-probabilities and entropies [n]; differentiable.
at::Tensor formula(const at::Tensor& l, const at::Tensor& entropy, const Scene& scene,
                   const LossRows& rows, const PolicyOptions& options) {
  const at::Tensor old = at::tensor(scene.column(&PolicyRow::old, rows.tokens), at::kDouble),
                   reference =
                       at::tensor(scene.column(&PolicyRow::reference, rows.tokens), at::kDouble),
                   A = at::tensor(scene.column(&PolicyRow::advantages, rows.tokens), at::kDouble);
  at::Tensor total = l.sum() * 0;
  for (std::size_t s = 0; s < 3; ++s) {
    std::vector<std::int64_t> own;
    for (std::size_t i = 0; i < rows.tokens.size(); ++i) {
      if (rows.tokens[i] >= scene.batch.cu_seqlens_host[s] &&
          rows.tokens[i] < scene.batch.cu_seqlens_host[s + 1])
        own.push_back(static_cast<std::int64_t>(i));
    }
    const auto index = at::tensor(own, at::kLong);
    const auto of = [&](const at::Tensor& all) { return at::index_select(all, 0, index); };
    const at::Tensor log_ratio = of(l) - of(old);
    const at::Tensor r = options.loss == PolicyLoss::kGspo
                             ? at::exp(log_ratio.mean()) * at::ones_like(log_ratio)
                             : at::exp(log_ratio);
    const at::Tensor clipped = r.clamp(1 - options.clip_low, 1 + options.clip_high);
    at::Tensor loss = options.loss == PolicyLoss::kCispo ? -clipped.detach() * of(A) * of(l)
                                                         : -at::minimum(r * of(A), clipped * of(A));
    const at::Tensor x = of(l) - of(reference);
    loss = loss + options.kl_coefficient * (at::exp(-x) + x - 1).clamp(-10, 10);
    total = total + loss.mean() - options.entropy_coefficient * of(entropy).mean();
  }
  return total;
}

/// k1 by quarters of 32 tokens; the second sequence, of 29, alone reaches the last two.
void expect_depths(const PolicyStatistics& found, const at::Tensor& l, const Scene& scene,
                   const LossRows& rows) {
  const std::vector<double> old = scene.column(&PolicyRow::old, rows.tokens);
  std::array<double, 4> k1 = {}, tokens = {};
  for (std::size_t i = 0; i < rows.tokens.size(); ++i) {
    std::int64_t first = 0;
    for (const std::int32_t begin : scene.batch.cu_seqlens_host)
      if (begin <= rows.tokens[i]) first = begin;
    // The row of token t tells about token t + 1.
    const auto part = static_cast<std::size_t>((rows.tokens[i] - first + 1) / 8);
    k1[part] += old[i] - l[static_cast<std::int64_t>(i)].item<double>();
    tokens[part] += 1;
  }
  EXPECT_GT(tokens[3], 0);
  for (std::size_t part = 0; part < 4; ++part) {
    EXPECT_EQ(found.by_depth[part].tokens, tokens[part]) << part;
    EXPECT_NEAR(found.by_depth[part].k1, k1[part], 1e-9) << part;
  }
}

class PolicyHead : public ::testing::TestWithParam<Param> {};

TEST_P(PolicyHead, EqualsTheFormulaOfWholeLogits) {
  const auto& [loss, trains_head, has_entropy] = GetParam();
  const Scene scene(model_on(at::kCPU, at::kDouble, trains_head));
  const models::Model& model = *scene.placed.model;
  const PolicyOptions options = options_of(loss, has_entropy);
  const LossRows rows(model, scene.batch, 1);

  at::Tensor leaf = scene.hidden.clone().set_requires_grad(true);
  at::Tensor weight = scene.placed.model->head_weight().data().detach().clone();
  weight.set_requires_grad(true);
  const at::Tensor normalized =
      scene.placed.model->final_norm(leaf.index_select(0, at::tensor(rows.tokens, at::kLong)));
  const at::Tensor logits = at::mm(normalized, weight.t()) / kTemperature;
  const at::Tensor log_p = at::log_softmax(logits, 1);
  const at::Tensor expected = formula(at::gather(log_p, 1, rows.labels.unsqueeze(1)).squeeze(1),
                                      -at::sum(at::exp(log_p) * log_p, {1}), scene, rows, options);
  ops::run_backward({expected}, {at::ones_like(expected) * 0.25});

  Policy policy(scene.placed, options);
  const HeadResult found = scene.run(policy);
  EXPECT_NEAR(found.loss_sum.item<double>(), expected.item<double>(), 1e-10);
  EXPECT_TRUE(at::allclose(found.grad_hidden, leaf.grad(), 1e-9, 1e-12));
  scene.placed.model->head_weight().collect_gradient();
  const at::Tensor gradient = scene.placed.model->head_weight().gradient();
  ASSERT_EQ(gradient.defined(), trains_head);
  if (trains_head) {
    EXPECT_TRUE(at::allclose(gradient, weight.grad(), 1e-9, 1e-12));
  }

  const PolicyStatistics statistics = policy.take_statistics();
  EXPECT_EQ(statistics.tokens, static_cast<double>(rows.total));
  EXPECT_NEAR(statistics.entropy, -(log_p.exp() * log_p).sum().item<double>(), 1e-9);
  EXPECT_EQ(policy.take_statistics().tokens, 0);
  expect_depths(statistics, at::gather(log_p, 1, rows.labels.unsqueeze(1)).squeeze(1), scene, rows);

  const HeadResult evaluated = scene.run(policy, /*wants_gradients=*/false);
  EXPECT_NEAR(evaluated.loss_sum.item<double>(), expected.item<double>(), 1e-10);
  EXPECT_FALSE(evaluated.grad_hidden.defined());
}

TEST_P(PolicyHead, IsThatOfOneRankOnSeveral) {
  const auto& [loss, trains_head, has_entropy] = GetParam();
  struct Result {
    at::Tensor loss, grad_hidden;
    PolicyStatistics statistics;
  };
  const auto run = [options = options_of(loss, has_entropy),
                    trains_head = trains_head](const comm::Mesh& mesh) {
    assembly::ModelRecipe recipe;
    recipe.config = testing::tiny_config();
    recipe.purpose = assembly::Purpose::kTrain;
    recipe.weights = assembly::Weights::kRandom;
    if (!trains_head) recipe.freeze = {"*lm_head*"};
    runtime::Context context;
    context.dtype = at::kDouble;
    context.mesh = mesh;
    const Scene scene(assembly::place(recipe, context));
    const parallel::Acquired ends =
        assembly::acquire_ends(scene.placed.sharding.get(), *scene.placed.model);
    Policy policy(scene.placed, options);
    const HeadResult found = scene.run(policy);
    const LocalBatch local(*scene.placed.model, scene.batch);
    at::Tensor whole = at::zeros(
        {scene.placed.model->padded_tokens(scene.batch.size()), found.grad_hidden.size(1)},
        found.grad_hidden.options());
    whole.index_copy_(0, scene.places(local), found.grad_hidden);
    const comm::Group ranks = mesh.world_group();
    ranks.all_reduce_sum(whole);
    at::Tensor sum = found.loss_sum.clone();
    mesh.loss_group().all_reduce_sum(sum);
    return Result{sum, whole.narrow(0, 0, scene.batch.size()), policy.take_statistics()};
  };
  const Result one = run(comm::Mesh::single());
  for (const auto& sizes : {comm::Mesh::Sizes{2, 1, 1, 1, 1}, comm::Mesh::Sizes{1, 2, 1, 1, 1}}) {
    const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      const Result found = run(comm::Mesh(sizes, world, 1));
      EXPECT_TRUE(at::allclose(found.loss, one.loss, 1e-10, 1e-12));
      EXPECT_TRUE(at::allclose(found.grad_hidden, one.grad_hidden, 1e-9, 1e-12));
      PolicyStatistics here = found.statistics, there = one.statistics;
      const std::vector<double*> sums = sums_of(here), expected = sums_of(there);
      for (std::size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(*sums[i], *expected[i], 1e-9) << i;
      EXPECT_NEAR(found.statistics.ratio_max, one.statistics.ratio_max, 1e-9);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

// A wait would cost the host the lead that it has over the device.
TEST_P(PolicyHead, DoesNotWaitForTheDevice) {
  const auto& [loss, trains_head, has_entropy] = GetParam();
  const Scene scene(model_on(testing::simulated_npu(), at::kBFloat16, trains_head));
  Policy policy(scene.placed, options_of(loss, has_entropy));
  scene.run(policy);
  scene.run(policy);
  EXPECT_THAT(scene.waits, ::testing::IsEmpty());
  const auto before = device::sim::waits();
  EXPECT_GT(policy.take_statistics().tokens, 0);
  EXPECT_FALSE(device::sim::waits_since(before).empty()) << "waits are counted";
}

INSTANTIATE_TEST_SUITE_P(ByTokenAndBySequence, PolicyHead,
                         ::testing::Combine(::testing::Values(PolicyLoss::kPpo, PolicyLoss::kCispo,
                                                              PolicyLoss::kGspo),
                                            ::testing::Bool(), ::testing::Bool()),
                         [](const auto& info) {
                           const PolicyLoss loss = std::get<0>(info.param);
                           const std::string name = loss == PolicyLoss::kPpo     ? "Ppo"
                                                    : loss == PolicyLoss::kCispo ? "Cispo"
                                                                                 : "Gspo";
                           return name + (std::get<1>(info.param) ? "Trained" : "Frozen") +
                                  (std::get<2>(info.param) ? "WithEntropy" : "");
                         });

}  // namespace
}  // namespace heddle::objective
