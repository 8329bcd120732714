// The critic's head on one micro-batch, against its formula over the whole sequence.
#include "objective/value.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>

#include "assembly/model_units.h"
#include "comm/ranks.h"
#include "models/tiny_model.h"
#include "ops/autograd.h"
#include "ops/collectives.h"

namespace heddle::objective {
namespace {

constexpr double kClip = 0.3, kScale = 0.25;

struct Scene {
  assembly::ModelOnRanks placed;
  data::Batch batch = testing::batch_of({{1, 9}, {2, 29}, {3, 5}}, /*prompt=*/3);
  std::vector<ValueRow> rows;

  explicit Scene(const comm::Mesh& mesh) {
    assembly::ModelRecipe recipe;
    recipe.config = testing::tiny_config();
    recipe.head = models::Head::kClassify;
    recipe.num_labels = 1;
    recipe.purpose = assembly::Purpose::kTrain;
    recipe.weights = assembly::Weights::kRandom;
    runtime::Context context;
    context.dtype = at::kDouble;
    context.seed = testing::kTinySeed;
    context.mesh = mesh;
    placed = assembly::place(recipe, context);
    for (std::size_t s = 0; s < 3; ++s) {
      ValueRow& row = rows.emplace_back();
      for (int t = batch.cu_seqlens_host[s]; t < batch.cu_seqlens_host[s + 1]; ++t) {
        row.old.push_back(0.4 * std::sin(t));
        row.returns.push_back(std::cos(2.0 * t));
      }
    }
  }
  struct Result {
    at::Tensor values, loss, clipped, score, norm;  ///< With gradients of score and norm.
  };
  /// Of all ranks.
  Result run() {
    models::Model& model = *placed.model;
    Value value(placed, kClip);
    value.set_rows(rows);
    Result result;
    result.values = value.values(batch);
    placed.context.mesh.world_group().all_reduce_sum(result.values);
    const parallel::Acquired ends = assembly::acquire_ends(placed.sharding.get(), model);
    const LocalBatch local(model, batch);
    const at::Tensor hidden =
        ops::run_without_gradient([&] { return evaluate_hidden(model, *placed.pipeline, local); });
    const std::vector<HeadFunction> heads = value.heads({&batch, 1}, {.gradient_scale = kScale});
    const HeadResult head = heads[0](hidden, local);
    EXPECT_EQ(head.grad_hidden.sizes(), hidden.sizes());
    result.loss = head.loss_sum.clone();
    result.clipped = head.metric_sums.at(0).clone();
    const comm::Group parts = placed.context.mesh.group({comm::Dim::kCp});
    parts.all_reduce_sum(result.loss);
    parts.all_reduce_sum(result.clipped);
    model.score().weight().collect_gradient();
    result.score = model.score().weight().gradient().clone();
    // Ranks along tp have the whole of it each.
    parts.all_reduce_sum(result.score);
    return result;
  }
};

TEST(ValueHead, EqualsTheFormulaOverTheWholeSequence) {
  Scene scene(comm::Mesh::single());
  models::Model& model = *scene.placed.model;
  const Scene::Result found = scene.run();

  const LocalBatch local(model, scene.batch);
  const at::Tensor hidden = ops::run_without_gradient(
      [&] { return evaluate_hidden(model, *scene.placed.pipeline, local); });
  at::Tensor weight = model.score().weight().data().detach().clone();
  weight.set_requires_grad(true);
  const at::Tensor normalized = ops::run_without_gradient([&] { return model.final_norm(hidden); });
  const at::Tensor all = (normalized * weight).sum(1);
  at::Tensor loss = at::zeros({}, at::kDouble);
  double clipped = 0;
  std::int64_t labelled = 0;
  for (std::size_t s = 0; s < 3; ++s) {
    for (int t = scene.batch.cu_seqlens_host[s]; t < scene.batch.cu_seqlens_host[s + 1]; ++t) {
      const bool has_value = scene.batch.loss_weights[t].item<float>() != 0;
      EXPECT_NEAR(found.values[t].item<double>(), has_value ? all[t].item<double>() : 0, 1e-10);
      if (!has_value) continue;
      ++labelled;
      const auto i = static_cast<std::size_t>(t - scene.batch.cu_seqlens_host[s]);
      const double old = scene.rows[s].old[i], target = scene.rows[s].returns[i];
      const at::Tensor free = (all[t] - target).square(),
                       bounded = (all[t].clamp(old - kClip, old + kClip) - target).square();
      loss = loss + 0.5 * at::maximum(free, bounded);
      clipped += bounded.item<double>() > free.item<double>();
    }
  }
  ops::run_backward({loss}, {at::ones_like(loss) * kScale});
  // Nine tokens less the prompt of three and the last, and so on.
  EXPECT_EQ(labelled, 5 + 28 + 4);
  EXPECT_GT(clipped, 0);
  EXPECT_NEAR(found.loss.item<double>(), loss.item<double>(), 1e-10);
  EXPECT_EQ(found.clipped.item<double>(), clipped);
  EXPECT_TRUE(at::allclose(found.score, weight.grad(), 1e-9, 1e-12));
}

TEST(ValueHead, IsThatOfOneRankOnSeveral) {
  const Scene::Result one = Scene(comm::Mesh::single()).run();
  for (const auto& sizes : {comm::Mesh::Sizes{2, 1, 1, 1, 1}, comm::Mesh::Sizes{1, 2, 1, 1, 1}}) {
    const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      const Scene::Result found = Scene(comm::Mesh(sizes, world, 1)).run();
      EXPECT_TRUE(at::allclose(found.values, one.values, 1e-9, 1e-12));
      EXPECT_TRUE(at::allclose(found.loss, one.loss, 1e-10, 1e-12));
      EXPECT_TRUE(at::allclose(found.clipped, one.clipped));
      EXPECT_TRUE(at::allclose(found.score, one.score, 1e-9, 1e-12));
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

}  // namespace
}  // namespace heddle::objective
