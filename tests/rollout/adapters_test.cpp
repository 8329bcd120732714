// Adapters of single requests, and versions of a set while sequences go on.
#include <gtest/gtest.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/sin.h>

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/errors.h"
#include "base/hash.h"
#include "comm/ranks.h"
#include "models/tiny_model.h"
#include "rollout/adapter_slots.h"
#include "rollout/engine.h"

namespace heddle::rollout {
namespace {

/// The model, and which factors its experts have.
enum class Kind { kDense, kPairs, kSharedOuter };

bool has_experts(Kind kind) { return kind != Kind::kDense; }

assembly::ModelOnRanks adapted_model(Kind kind, const comm::Mesh& mesh = comm::Mesh::single()) {
  const bool moe = has_experts(kind);
  runtime::Context context;
  context.mesh = mesh;
  context.dtype = at::kFloat;
  context.seed = testing::kTinySeed;
  assembly::ModelRecipe recipe;
  recipe.config = testing::tiny_config(moe);
  recipe.config.initializer_range = 0.06;
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandom;
  assembly::NewAdapters adapters;
  adapters.targets = {"all-linear"};
  if (moe) adapters.target_parameters = {"experts.gate_up_proj", "experts.down_proj"};
  adapters.options.rank = 4;
  if (kind == Kind::kSharedOuter) adapters.options.expert_factors = nn::ExpertFactors::kSharedOuter;
  recipe.adapters = adapters;
  return assembly::place(recipe, context);
}

/// Numbers that depend on `version`, name and place alone.
void fill(const adapters::LoraSet& set, std::int64_t version) {
  set.visit_parameters([version](nn::Parameter& factor) {
    std::int64_t count = 1;
    for (const std::int64_t size : factor.global_shape()) count *= size;
    const auto first = static_cast<double>(hash::of(factor.name()) % 1000 + 77 * version);
    factor.write_owned(
        (at::sin(at::arange(count, at::kDouble).add(first)) * 0.1).view(factor.global_shape()));
  });
}

Request request_of(std::int64_t length, std::shared_ptr<const Adapter> adapter) {
  Request request;
  for (std::int64_t t = 0; t < length; ++t)
    request.prompt.push_back(static_cast<std::int32_t>((5 * length + t * t) % 97));
  request.max_new_tokens = 6;
  request.sampling.seed = static_cast<std::uint64_t>(length);
  request.adapter = std::move(adapter);
  return request;
}

std::map<RequestId, Completion> finish(Engine& engine) {
  std::map<RequestId, Completion> completions;
  while (!engine.is_idle()) {
    for (Progress& progress : engine.step()) {
      if (progress.completion) completions[progress.id] = std::move(*progress.completion);
    }
  }
  return completions;
}

/// Sums of matrices are rounded to float32 once more than the sums of their products.
constexpr double kMerged = 1e-4;

/// Copies of all matrices, to see that they are as they were.
std::vector<at::Tensor> values_of(const assembly::ModelOnRanks& placed) {
  std::vector<at::Tensor> values;
  placed.model->visit_parameters(
      [&](nn::Parameter& parameter) { values.push_back(parameter.data().clone()); });
  return values;
}

void expect_equal(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
}

class AdaptersOfRequests : public ::testing::TestWithParam<Kind> {
 protected:
  Completion alone(const Request& request) {
    Engine engine(placed_, nullptr, {});
    engine.submit(request);
    return finish(engine)[0];
  }
  void expect_as_alone(const Completion& found, const Request& request, double bound = 1e-5) {
    const Completion expected = alone(request);
    EXPECT_EQ(found.output_ids, expected.output_ids);
    for (std::size_t t = 0; t < expected.logprobs.size(); ++t)
      EXPECT_NEAR(found.logprobs[t], expected.logprobs[t], bound) << t;
  }

  assembly::ModelOnRanks placed_ = adapted_model(GetParam());
};

// Strangers share a pass: what is not finite ends alone, and names its own adapter.
TEST_P(AdaptersOfRequests, WhoseLogitsAreNotFiniteEndAlone) {
  fill(*placed_.adapters, 0);
  AdapterSlots slots(placed_, *placed_.adapters, "tenant", 2);
  Engine engine(placed_, nullptr, {.max_sequences = 8, .tells_failures = true});
  adapters::LoraSet* const set = slots.free_set(engine);
  fill(*set, 1);
  std::string bad;
  set->visit_parameters([&](nn::Parameter& factor) {
    if (!bad.empty() || !factor.name().ends_with("lora_B.weight")) return;
    bad = factor.name();
    factor.owned().fill_(std::numeric_limits<float>::infinity());
  });
  const auto own = slots.publish(engine, *set, 1);
  const auto base = std::make_shared<const Adapter>(Adapter{"base", 0, nullptr});
  const Request other = request_of(7, base);
  const RequestId failing = engine.submit(request_of(5, own));
  const RequestId goes_on = engine.submit(other);
  std::map<RequestId, std::string> failures;
  std::map<RequestId, Completion> completions;
  while (!engine.is_idle()) {
    for (Progress& progress : engine.step()) {
      if (!progress.failure.empty()) failures[progress.id] = progress.failure;
      if (progress.completion) completions[progress.id] = std::move(*progress.completion);
    }
  }
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_NE(failures.at(failing).find(bad), std::string::npos) << failures.at(failing);
  ASSERT_EQ(completions.size(), 1u);
  expect_as_alone(completions.at(goes_on), other);
  // Its place is free again.
  engine.submit(request_of(9, base));
  EXPECT_EQ(finish(engine).size(), 1u);
  // Where nobody is told, a step throws.
  Engine throwing(placed_, nullptr, {.max_sequences = 8});
  throwing.submit(request_of(5, own));
  EXPECT_THROW(finish(throwing), ModelError);
}

TEST_P(AdaptersOfRequests, DoNotSeeEachOther) {
  fill(*placed_.adapters, 0);
  Engine engine(placed_, nullptr, {.max_sequences = 8});
  AdapterSlots slots(placed_, *placed_.adapters, "tenant", 3);
  std::vector<std::shared_ptr<const Adapter>> adapters;
  for (const std::int64_t version : {1, 2}) {
    adapters::LoraSet* const set = slots.free_set(engine);
    fill(*set, version);
    adapters.push_back(slots.publish(engine, *set, version));
  }
  adapters.push_back(std::make_shared<const Adapter>(Adapter{"base", 0, nullptr}));
  std::vector<Request> requests;
  for (std::int64_t i = 0; i < 9; ++i)
    requests.push_back(request_of(3 + 4 * i, adapters[static_cast<std::size_t>(i % 3)]));
  for (const Request& request : requests) engine.submit(request);
  const auto completions = finish(engine);
  for (std::size_t i = 0; i < requests.size(); ++i)
    expect_as_alone(completions.at(static_cast<RequestId>(i)), requests[i]);
  // The model's own adapters with the numbers of version 1 say what version 1 says.
  fill(*placed_.adapters, 1);
  expect_as_alone(completions.at(0), request_of(3, nullptr));
  EXPECT_NE(completions.at(0).logprobs, alone(request_of(3, adapters[2])).logprobs);
}

TEST_P(AdaptersOfRequests, ShareThePassesOfABatch) {
  Engine engine(placed_, nullptr, {.max_sequences = 8});
  fill(*placed_.adapters, 0);
  std::vector<std::unique_ptr<AdapterSlots>> tenants;
  std::vector<std::shared_ptr<const Adapter>> adapters;
  for (const std::int64_t version : {1, 2, 3, 4}) {
    const std::string name = "tenant " + std::to_string(version);
    tenants.push_back(std::make_unique<AdapterSlots>(placed_, *placed_.adapters, name, 2));
    adapters::LoraSet* const set = tenants.back()->free_set(engine);
    fill(*set, version);
    adapters.push_back(tenants.back()->publish(engine, *set, version));
  }
  // A step is one pass over the model.
  const auto passes_of = [&](std::size_t sets) {
    for (std::int64_t i = 0; i < 8; ++i)
      engine.submit(request_of(3 + i, adapters[static_cast<std::size_t>(i) % sets]));
    std::vector<std::size_t> tokens;
    while (!engine.is_idle()) {
      tokens.push_back(0);
      for (const Progress& progress : engine.step()) tokens.back() += progress.token ? 1 : 0;
      EXPECT_EQ(engine.last_pass().sets, static_cast<std::int64_t>(sets));
      EXPECT_EQ(engine.last_pass().sequences, 8);
      EXPECT_EQ(engine.last_pass().draws, tokens.size() > 1);
    }
    return tokens;
  };
  const std::vector<std::size_t> expected = passes_of(1);
  EXPECT_EQ(expected, std::vector<std::size_t>(6, 8)) << "eight tokens in each of six passes";
  EXPECT_EQ(passes_of(4), expected);
}

TEST_P(AdaptersOfRequests, KeepTheVersionThatTheyStartedWith) {
  Engine engine(placed_, nullptr, {.max_sequences = 8});
  AdapterSlots slots(placed_, *placed_.adapters, "policy", 2);
  const auto publish = [&](std::int64_t version) {
    adapters::LoraSet* const set = slots.free_set(engine);
    ASSERT_NE(set, nullptr) << version;
    fill(*set, version);
    slots.publish(engine, *set, version);
  };
  publish(1);
  Request early = request_of(9, nullptr), late = request_of(13, nullptr);
  early.keep_state = true;
  engine.submit(early);
  engine.step();
  engine.step();
  publish(2);
  engine.preempt(0);
  engine.submit(late);
  engine.step();
  EXPECT_EQ(slots.free_set(engine), nullptr) << "both are in use";
  const auto completions = finish(engine);
  for (const auto& [id, version, request] : {std::tuple{0, 1, early}, std::tuple{1, 2, late}}) {
    EXPECT_EQ(completions.at(id).adapter_version, version);
    fill(*placed_.adapters, version);
    Request cold = request;
    cold.keep_state = false;
    expect_as_alone(completions.at(id), cold);
  }
  // The slot of version 1 is free, and the state that was kept of it is not found any more.
  publish(3);
  engine.submit(early);
  const Completion third = finish(engine).at(2);
  EXPECT_EQ(third.cached_tokens, 0);
  fill(*placed_.adapters, 3);
  early.keep_state = false;
  expect_as_alone(third, early);
}

TEST_P(AdaptersOfRequests, MergedSayTheSameAndLeaveTheMatricesAsTheyWere) {
  const std::vector<at::Tensor> base = values_of(placed_);
  Engine engine(placed_, nullptr, {.merge_adapter = true});
  std::vector<double> first;
  for (const std::int64_t version : {1, 2, 1}) {
    fill(*placed_.adapters, version);
    engine.weights_changed(version);
    const Request request = request_of(11, nullptr);
    const RequestId id = engine.submit(request);
    const Completion found = finish(engine).at(id);
    // Whoever reads the matrices before they are released reads the sums.
    EXPECT_FALSE(at::equal(values_of(placed_)[2], base[2]));
    engine.release_weights();
    expect_equal(values_of(placed_), base);
    expect_as_alone(found, request, kMerged);
    if (first.empty()) first = found.logprobs;
    EXPECT_EQ(found.logprobs == first, version == 1) << "each sum begins from the same matrices";
  }
  engine.submit(request_of(5, nullptr));
  engine.step();
  engine.weights_changed(3, LiveSequences::kKeep);
  expect_equal(values_of(placed_), base);
}

TEST_P(AdaptersOfRequests, OnSeveralRanksAreThoseOfOne) {
  struct Layout {
    std::string name;
    comm::Mesh::Sizes sizes;
    std::int64_t ep;
    bool merges;  ///< Matrices are whole between passes.
  };
  std::vector<Layout> layouts = {{"tp", {2, 1, 1, 1, 1}, 1, !has_experts(GetParam())},
                                 {"dp", {1, 1, 1, 2, 1}, 1, true}};
  if (has_experts(GetParam())) {
    layouts.push_back({"ep", {1, 1, 2, 1, 1}, 2, false});
    layouts.push_back({"ep along tp", {2, 1, 1, 1, 1}, 2, true});
    layouts.push_back({"ep along dp", {1, 1, 1, 2, 1}, 2, true});
  }
  const auto base = std::make_shared<const Adapter>(Adapter{"base", 0, nullptr});
  const auto requests = [&] {
    std::vector<Request> all;
    for (std::int64_t i = 0; i < 7; ++i)
      all.push_back(request_of(3 + 5 * i, i % 3 == 1 ? base : nullptr));
    return all;
  };
  fill(*placed_.adapters, 1);
  for (const Layout& layout : layouts) {
    std::vector<std::map<RequestId, Completion>> found(2), merged(2);
    const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      assembly::ModelOnRanks placed =
          adapted_model(GetParam(), comm::Mesh(layout.sizes, world, layout.ep));
      fill(*placed.adapters, 1);
      Engine engine(placed, nullptr, {.max_sequences = 4});
      for (const Request& request : requests()) engine.submit(request);
      found[static_cast<std::size_t>(world->rank())] = finish(engine);
      if (!layout.merges) return;
      Engine merging(placed, nullptr, {.max_sequences = 4, .merge_adapter = true});
      for (const Request& request : requests()) {
        if (!request.adapter) merging.submit(request);
      }
      merged[static_cast<std::size_t>(world->rank())] = finish(merging);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "") << layout.name;
    const std::vector<Request> all = requests();
    RequestId next = 0;
    for (const Request& request : all) {
      if (request.adapter || !layout.merges) continue;
      EXPECT_EQ(merged[0].at(next).output_ids, merged[1].at(next).output_ids) << layout.name;
      expect_as_alone(merged[0].at(next++), request, kMerged);
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto id = static_cast<RequestId>(i);
      EXPECT_EQ(found[0].at(id).output_ids, found[1].at(id).output_ids) << layout.name << i;
      expect_as_alone(found[0].at(id), all[i]);
    }
  }
}

TEST(MergedAdapters, NeedWholeMatricesAndAnAdapter) {
  const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    assembly::ModelOnRanks placed =
        adapted_model(Kind::kDense, comm::Mesh({1, 1, 2, 1, 1}, world, 1));
    Engine(placed, nullptr, {.merge_adapter = true});
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error.find("merge_adapter: this rank does not hold model.layers.0."), 0u) << error;
    EXPECT_NE(error.find("whole between passes; expected parallel.fsdp 1"), std::string::npos)
        << error;
  }
  assembly::ModelOnRanks placed = adapted_model(Kind::kDense);
  placed.adapters.reset();
  EXPECT_THROW(Engine(placed, nullptr, {.merge_adapter = true}), ConfigError);
}

INSTANTIATE_TEST_SUITE_P(Models, AdaptersOfRequests,
                         ::testing::Values(Kind::kDense, Kind::kPairs, Kind::kSharedOuter),
                         [](const auto& info) {
                           return std::string(info.param == Kind::kDense   ? "Dense"
                                              : info.param == Kind::kPairs ? "Experts"
                                                                           : "SharedExperts");
                         });

}  // namespace
}  // namespace heddle::rollout
