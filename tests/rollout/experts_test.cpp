// The experts that generation tells are those that the trainer's routers choose for the same
// tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include "assembly/tiny_model_on_ranks.h"
#include "base/rng.h"
#include "comm/ranks.h"
#include "rollout/engine.h"
#include "rollout/experts.h"

namespace heddle::rollout {
namespace {

using Completions = std::map<RequestId, Completion>;

Request request_of(std::int64_t length, std::int64_t new_tokens, std::int64_t samples = 1) {
  Request request;
  for (std::int64_t t = 0; t < length; ++t)
    request.prompt.push_back(static_cast<std::int32_t>((7 * length + t * t) % 97));
  request.max_new_tokens = new_tokens;
  request.sampling.seed = static_cast<std::uint64_t>(length);
  request.samples = samples;
  request.return_experts = true;
  return request;
}

Completions finish(Engine& engine, const std::function<void(std::int64_t step)>& between = {}) {
  Completions completions;
  for (std::int64_t step = 0; !engine.is_idle(); ++step) {
    for (Progress& progress : engine.step()) {
      if (progress.completion) completions[progress.id] = std::move(*progress.completion);
    }
    if (between) between(step);
  }
  return completions;
}

/// By one pass over the whole sequence, without a cache.
std::vector<std::uint16_t> experts_of(assembly::ModelOnRanks& placed,
                                      const std::vector<std::int32_t>& tokens) {
  models::Model& model = *placed.model;
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::vector<std::int32_t> bounds = {0, static_cast<std::int32_t>(count)};
  const nn::Pass pass =
      model.pass(ops::Sequences::from_host(bounds, model.context().device),
                 at::arange(count, at::kLong).to(model.context().device), count, false);
  std::vector<at::Tensor> experts;
  placed.pipeline->evaluate(
      model,
      at::tensor(std::vector<std::int64_t>(tokens.begin(), tokens.end()), at::kLong)
          .to(model.context().device),
      pass, &experts);
  const at::Tensor table = expert_table(placed, OwnExperts::of(model.config(), experts), {count});
  const auto* const numbers = table.const_data_ptr<float>();
  // Nothing is known of the last token.
  return {numbers, numbers + (count - 1) * table.size(1)};
}

assembly::ModelOnRanks place(const comm::Mesh& mesh) {
  runtime::Context context;
  context.dtype = at::kDouble;
  context.seed = testing::kTinySeed;
  context.mesh = mesh;
  assembly::ModelRecipe recipe;
  recipe.config = testing::tiny_config(/*moe=*/true);
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandom;
  return assembly::place(recipe, context);
}

class ExpertsOfTokens : public ::testing::Test {
 protected:
  assembly::ModelOnRanks model_ =
      testing::tiny_model_on_ranks(at::kDouble, /*moe=*/true, assembly::Purpose::kGenerate);

  void expect_own(const Request& request, const Completion& completion, const std::string& name) {
    std::vector<std::int32_t> tokens = request.prompt;
    tokens.insert(tokens.end(), completion.output_ids.begin(), completion.output_ids.end());
    EXPECT_EQ(completion.experts, experts_of(model_, tokens)) << name;
  }
};

TEST_F(ExpertsOfTokens, AreThoseOfOnePassOverTheWholeSequence) {
  EXPECT_EQ(expert_width(model_.model->config()), 8);  // four layers, two experts
  for (const EngineOptions& options :
       {EngineOptions{.max_sequences = 8, .capacity = 90},
        EngineOptions{
            .max_sequences = 2, .prefill_tokens = 7, .capacity = 90, .caches = {.kv_page = 8}}}) {
    Engine engine(model_, nullptr, options);
    const std::vector<Request> requests = {request_of(1, 5), request_of(33, 6, 3),
                                           request_of(65, 3), request_of(20, 1, 2)};
    Request silent = request_of(20, 4);
    silent.return_experts = false;
    for (const Request& request : requests) engine.submit(request);
    engine.submit(silent);
    const Completions found = finish(engine);
    RequestId id = 0;
    for (const Request& request : requests) {
      for (std::int64_t sample = 0; sample < request.samples; ++sample, ++id)
        expect_own(request, found.at(id), std::to_string(id));
    }
    EXPECT_TRUE(found.at(id).experts.empty());
  }
}

TEST_F(ExpertsOfTokens, AreKeptOverInterruptionsAndTurns) {
  const CounterRng rng(3, "interruptions");
  Request group = request_of(30, 12, 4);
  Engine engine(model_, nullptr,
                {.max_sequences = 3,
                 .prefill_tokens = 11,
                 .capacity = 60,
                 .caches = {.kv_page = 8},
                 .pages = 12,
                 .kept_states = 2});
  engine.submit(group);
  for (const auto& [id, completion] : finish(engine, [&](std::int64_t step) {
         if (step < 40)
           engine.preempt(static_cast<RequestId>(rng.below(static_cast<std::uint64_t>(step), 4)));
       }))
    expect_own(group, completion, std::to_string(id));

  // The next turn goes on from the state of the one before, which says what it has read; one that
  // was read without experts is read again.
  for (const bool tells : {true, false}) {
    Request turn = request_of(14, 4);
    turn.prompt[0] = tells ? 1 : 2;  // no state of the other one is a part of it
    turn.keep_state = true;
    turn.return_experts = tells;
    const RequestId first = engine.submit(turn);
    const Completion before = finish(engine).at(first);
    turn.prompt.insert(turn.prompt.end(), before.output_ids.begin(), before.output_ids.end());
    turn.prompt.push_back(tells ? 5 : 6);
    turn.return_experts = true;
    const RequestId second = engine.submit(turn);
    const Completion after = finish(engine).at(second);
    EXPECT_EQ(after.cached_tokens > 0, tells);
    expect_own(turn, after, tells ? "kept" : "read again");
  }
}

TEST_F(ExpertsOfTokens, WhatWasReadFirstStaysWhenTheWeightsChange) {
  const Request request = request_of(20, 8);
  Engine engine(model_, nullptr, {.max_sequences = 2, .capacity = 60});
  engine.submit(request);
  for (int i = 0; i < 4; ++i) engine.step();
  const std::vector<std::int32_t> old_tokens = request.prompt;
  const std::vector<std::uint16_t> before = experts_of(model_, old_tokens);
  model_.model->visit_parameters([](nn::Parameter& parameter) {
    if (parameter.name().ends_with(".mlp.gate.weight")) parameter.data().neg_();
  });
  EXPECT_NE(experts_of(model_, old_tokens), before);
  engine.weights_changed(1);
  const Completion found = finish(engine)[0];
  ASSERT_EQ(found.experts.size(), (20 + 8 - 1) * 8u);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), found.experts.begin()));
  // Tokens that the new weights read first have the new choices.
  std::vector<std::int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), found.output_ids.begin(), found.output_ids.end());
  const std::vector<std::uint16_t> after = experts_of(model_, tokens);
  EXPECT_TRUE(std::equal(after.end() - 8, after.end(), found.experts.end() - 8));
}

TEST_F(ExpertsOfTokens, OfSeveralRanksAreThoseOfOne) {
  model_ = place(comm::Mesh::single());
  const struct {
    const char* name;
    comm::Mesh::Sizes sizes;
    std::int64_t ep;
  } layouts[] = {{"tp", {2, 1, 1, 1, 1}, 1},
                 {"pp", {1, 1, 1, 1, 2}, 1},
                 {"ep", {1, 1, 2, 1, 1}, 2},
                 {"dp", {1, 1, 1, 2, 1}, 1},
                 // At the end some ranks have padding alone.
                 {"dp-tp", {2, 1, 1, 2, 1}, 1}};
  const std::vector<Request> requests = {request_of(9, 5), request_of(33, 4, 3), request_of(2, 6)};
  for (const auto& layout : layouts) {
    std::int64_t ranks = 1;
    for (const std::int64_t size : layout.sizes) ranks *= size;
    std::vector<Completions> found(static_cast<std::size_t>(ranks));
    const auto errors = testing::run_ranks(ranks, [&](const std::shared_ptr<comm::World>& world) {
      assembly::ModelOnRanks placed = place(comm::Mesh(layout.sizes, world, layout.ep));
      Engine engine(placed, nullptr, {.max_sequences = 4, .prefill_tokens = 10, .capacity = 60});
      for (const Request& request : requests) engine.submit(request);
      found[static_cast<std::size_t>(world->rank())] = finish(engine);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "") << layout.name;
    RequestId id = 0;
    for (const Request& request : requests) {
      for (std::int64_t sample = 0; sample < request.samples; ++sample, ++id) {
        for (const Completions& other : found)
          EXPECT_EQ(found[0].at(id).experts, other.at(id).experts) << layout.name;
        expect_own(request, found[0].at(id), std::string(layout.name) + std::to_string(id));
      }
    }
  }
}

TEST(ExpertsOfDenseModels, AreNone) {
  assembly::ModelOnRanks dense =
      testing::tiny_model_on_ranks(at::kFloat, /*moe=*/false, assembly::Purpose::kGenerate);
  Engine engine(dense, nullptr, {.max_sequences = 2, .capacity = 60});
  engine.submit(request_of(9, 3));
  EXPECT_TRUE(finish(engine)[0].experts.empty());
}

}  // namespace
}  // namespace heddle::rollout
