#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "assembly/model_on_ranks.h"
#include "comm/ranks.h"
#include "meet.h"
#include "models/tiny_model.h"
#include "sync/weight_sync.h"

namespace heddle::sync {
namespace {

using heddle::testing::run_ranks;
using ::testing::Each;

struct Side {
  const char* name;
  comm::Mesh::Sizes sizes;  ///< tp, cp, fsdp, dp, pp
  std::int64_t ep = 1;

  std::int64_t ranks() const {
    std::int64_t ranks = 1;
    for (const std::int64_t size : sizes) ranks *= size;
    return ranks;
  }
};

assembly::ModelOnRanks model_of(const comm::Mesh& mesh, assembly::Purpose purpose, bool moe,
                                std::uint64_t seed) {
  runtime::Context context;
  context.dtype = at::kFloat;
  context.seed = seed;
  context.mesh = mesh;
  assembly::ModelRecipe recipe;
  recipe.config = heddle::testing::tiny_config(moe);
  recipe.purpose = purpose;
  recipe.weights = assembly::Weights::kRandom;
  return assembly::place(recipe, context);
}

Visit visit_of(models::Model& model) {
  return [&model](const std::function<void(nn::Parameter&)>& use) { model.visit_parameters(use); };
}

comm::Mesh mesh_of(const Side& side, const std::shared_ptr<comm::World>& world) {
  return side.ranks() == 1 ? comm::Mesh::single() : comm::Mesh(side.sizes, world, side.ep);
}

/// Ranks of a job as threads; one alone has no world.
std::vector<std::string> run_job(const Side& side,
                                 const std::function<void(const comm::Mesh&)>& body) {
  if (side.ranks() > 1) {
    return run_ranks(side.ranks(), [&](const std::shared_ptr<comm::World>& world) {
      body(mesh_of(side, world));
    });
  }
  try {
    body(comm::Mesh::single());
    return {""};
  } catch (const std::exception& error) {
    return {error.what()};
  }
}

constexpr std::uint64_t kTrained = 1, kOther = 2;

/// Every element that a rollout rank holds is the trainer's.
void expect_equal(const std::vector<Part>& parts,
                  const std::map<std::string, at::Tensor>& expected) {
  for (const Part& part : parts) {
    EXPECT_FALSE(part.boxes.empty()) << part.info.name;
    for (const nn::Box& box : part.boxes) {
      at::Tensor whole = expected.at(part.info.name);
      for (std::size_t d = 0; d < box.global.offset.size(); ++d) {
        const auto dim = static_cast<std::int64_t>(d);
        whole = whole.narrow(dim, box.global.offset[d], box.tensor.size(dim));
      }
      EXPECT_TRUE(box.tensor.equal(whole)) << part.info.name;
    }
  }
}

void relay(const Side& trainer, const Side& rollout, bool moe) {
  SCOPED_TRACE(fmt::format("{} -> {}", trainer.name, rollout.name));
  const auto reference = model_of(comm::Mesh::single(), assembly::Purpose::kStore, moe, kTrained);
  std::map<std::string, at::Tensor> expected;
  reference.model->visit_parameters(
      [&](nn::Parameter& parameter) { expected[parameter.name()] = parameter.data(); });
  const SyncOptions options{8192, false};
  testing::MeetingPlace place(rollout.ranks());
  std::vector<std::string> trained, rolled;
  {
    std::jthread trainers([&] {
      trained = run_job(trainer, [&](const comm::Mesh& mesh) {
        const auto placed = model_of(mesh, assembly::Purpose::kTrain, moe, kTrained);
        Publisher publisher(mesh.world_group(), sent_parts(visit_of(*placed.model), mesh), options);
        if (mesh.rank() == 0) publisher.connect(place.sender(), 0);
        publisher.publish(1);
      });
    });
    rolled = run_job(rollout, [&](const comm::Mesh& mesh) {
      const auto placed = model_of(mesh, assembly::Purpose::kGenerate, moe, kOther);
      Subscriber subscriber(received_parts(visit_of(*placed.model)), options);
      subscriber.connect(place.rollout(mesh.rank()), 0);
      EXPECT_EQ(subscriber.receive(), 1);
      expect_equal(received_parts(visit_of(*placed.model)), expected);
    });
  }
  EXPECT_THAT(trained, Each(""));
  EXPECT_THAT(rolled, Each(""));
}

constexpr Side kRollouts[] = {
    {"dp1", {1, 1, 1, 1, 1}}, {"dp2", {1, 1, 1, 2, 1}}, {"tp2", {2, 1, 1, 1, 1}}};

TEST(Relay, BringsEveryDenseLayoutToEveryRollout) {
  constexpr Side kTrainers[] = {{"one", {1, 1, 1, 1, 1}},        {"fsdp2", {1, 1, 2, 1, 1}},
                                {"tp2", {2, 1, 1, 1, 1}},        {"pp2", {1, 1, 1, 1, 2}},
                                {"cp2", {1, 2, 1, 1, 1}},        {"dp2", {1, 1, 1, 2, 1}},
                                {"dp2 tp2 pp2", {2, 1, 1, 2, 2}}};
  for (const Side& trainer : kTrainers) {
    for (const Side& rollout : kRollouts) relay(trainer, rollout, false);
  }
}

TEST(Relay, BringsExpertsToEveryRollout) {
  constexpr Side kTrainers[] = {{"ep2", {1, 1, 1, 2, 1}, 2},
                                {"dp2 tp2 pp2 ep2", {2, 1, 1, 2, 2}, 2}};
  for (const Side& trainer : kTrainers) {
    for (const Side& rollout : kRollouts) relay(trainer, rollout, true);
  }
}

}  // namespace
}  // namespace heddle::sync
