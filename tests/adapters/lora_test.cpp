#include "adapters/lora.h"

#include <cmath>
#include <memory>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include "adapters/initialize.h"
#include "base/rng.h"
#include "comm/mesh.h"
#include "nn/pass.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/grouped_low_rank/grouped_low_rank.h"
#include "ops/linear/linear.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::adapters {
namespace {

constexpr std::int64_t kTokens = 12, kIn = 10, kOut = 8, kRank = 2;

at::Tensor numbers(std::int64_t rows, std::int64_t columns, double first) {
  return at::sin(at::arange(rows * columns, at::kDouble).add(first)).view({rows, columns});
}

void give_values(nn::Parameter& parameter, const at::Tensor& whole) {
  parameter.place(comm::Mesh::single());
  parameter.allocate(at::kDouble, c10::kCPU);
  parameter.write_owned(whole);
}

constexpr double kDropout = 0.25;
constexpr std::uint64_t kSeed = 5, kStep = 3;

/// The layers of a model.
Adaptable adaptable(const std::vector<nn::Linear*>& layers) {
  return {[layers](const std::function<void(nn::Linear&)>& visit) {
            for (nn::Linear* layer : layers) visit(*layer);
          },
          [](const std::function<void(nn::ExpertWeights&)>&) {}};
}

/// A pass of kTokens rows that all have one set.
nn::Pass pass_with(const ops::KernelTable& kernels, const LoraSet& set, const at::Tensor& draws) {
  nn::Pass pass;
  pass.kernels = &kernels;
  pass.adapters = {{&set, kTokens, draws}};
  return pass;
}

/// The gradients of an adapted layer come with what is postponed, after that of its input.
void check_postponed(double dropout) {
  const auto kernels = ops::KernelTable::choose(ops::builtin_registry(), {}, at::kDouble,
                                                {ops::OpRequest::of<ops::Linear>()});
  nn::Linear linear("layer.weight", kOut, kIn);
  const at::Tensor weight = numbers(kOut, kIn, 1), a = numbers(kRank, kIn, 2),
                   b = numbers(kOut, kRank, 3), dy = numbers(kTokens, kOut, 4);
  give_values(linear.weight(), weight);
  linear.weight().set_trainable(false);
  const double scaling = 0.5;
  LoraOptions options;
  options.dropout = dropout;
  runtime::Context context;
  context.dtype = at::kDouble;
  const LoraSet set(adaptable({&linear}), {{"layer", kRank, scaling}}, options, context);
  Lora& lora = *set.adapters()[0];
  lora.a().write_owned(a);
  lora.b().write_owned(b);
  at::Tensor seen = numbers(kTokens, kIn, 5).mul(0).add(1), draws;
  if (dropout > 0) {
    draws = ops::dropout_draws(at::arange(kTokens, at::kLong), 1);
    seen = ops::dropout_factors(
        {dropout_key(0, "layer"), draws, at::arange(kIn, at::kLong), dropout}, at::kDouble);
  }

  const at::Tensor x = numbers(kTokens, kIn, 5).set_requires_grad(true);
  nn::LinearInput input(x);
  input.postponed = std::make_shared<nn::PostponedWork>();
  ops::run_backward({linear.forward(pass_with(kernels, set, draws), input)}, {dy});
  EXPECT_TRUE(
      at::allclose(x.grad(), at::mm(dy, weight) + scaling * at::mm(dy, at::mm(b, a)) * seen));
  EXPECT_FALSE(lora.a().gradient().defined());
  input.postponed->run();
  const at::Tensor value = ops::detached(x) * seen;
  EXPECT_TRUE(at::allclose(lora.a().gradient(), scaling * at::mm(at::mm(dy, b).t(), value)));
  EXPECT_TRUE(at::allclose(lora.b().gradient(), scaling * at::mm(dy.t(), at::mm(value, a.t()))));
  EXPECT_FALSE(linear.weight().gradient().defined());
}

TEST(Lora, PostponedGradientsComeAfterTheInputs) { check_postponed(/*dropout=*/0); }
TEST(Lora, PostponedGradientsComeAfterTheInputsWithDropout) { check_postponed(kDropout); }

/// Two layers that read one input, with adapters.
struct Fixture {
  ops::KernelTable kernels = ops::KernelTable::choose(
      ops::builtin_registry(), {}, at::kDouble,
      {ops::OpRequest::of<ops::Linear>(), ops::OpRequest::of<ops::GroupedLowRank>(),
       ops::OpRequest::of<ops::Swiglu>({.dim = kIn})});
  nn::Linear first{"first.weight", 6, kIn}, second{"second.weight", 4, kIn};
  std::vector<nn::Linear*> layers = {&first, &second};
  std::unique_ptr<LoraSet> adapters;

  explicit Fixture(double dropout) {
    for (nn::Linear* layer : layers) {
      layer->weight().place(comm::Mesh::single());
      layer->weight().allocate(at::kDouble, c10::kCPU);
      layer->weight().write_owned(
          numbers(layer->out_features(), kIn, static_cast<double>(layer->out_features())));
      layer->weight().set_trainable(false);
    }
    runtime::Context context;
    context.dtype = at::kDouble;
    LoraOptions options;
    options.rank = 2;
    options.dropout = dropout;
    options.seed = kSeed;
    adapters = std::make_unique<LoraSet>(adaptable(layers), std::vector<std::string>{"all-linear"},
                                         std::vector<std::string>{}, options, context);
    adapters->initialize();
    for (const auto& lora : adapters->adapters())
      lora->b().write_owned(numbers(lora->b().global_shape()[0], 2, 7));
  }
};

TEST(Lora, ServableTargetsAreThoseThatServersLoad) {
  std::vector<std::unique_ptr<nn::Linear>> layers;
  std::vector<nn::Linear*> all;
  for (const char* name :
       {"self_attn.q_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z",
        "linear_attn.in_proj_qkvz", "linear_attn.in_proj_b", "linear_attn.in_proj_a",
        "linear_attn.in_proj_ba", "linear_attn.out_proj", "0.mlp.gate", "mlp.shared_expert_gate",
        "mlp.shared_expert.gate_proj"}) {
    layers.push_back(std::make_unique<nn::Linear>(std::string(name) + ".weight", 4, kIn));
    all.push_back(layers.back().get());
  }
  runtime::Context context;
  context.dtype = at::kDouble;
  for (nn::Linear* layer : all) layer->weight().place(comm::Mesh::single());
  const LoraSet set(adaptable(all), {"servable"}, {}, LoraOptions{}, context);
  EXPECT_EQ(set.modules(),
            (std::vector<std::string>{"self_attn.q_proj", "linear_attn.in_proj_qkv",
                                      "linear_attn.in_proj_z", "linear_attn.in_proj_qkvz",
                                      "linear_attn.out_proj", "mlp.shared_expert.gate_proj"}));
}

TEST(Lora, UnderDropoutFollowsItsFormula) {
  Fixture f(kDropout);
  at::Tensor x = numbers(kTokens, kIn, 1).set_requires_grad(true);
  const at::Tensor draws = ops::dropout_draws(at::arange(100, 100 + kTokens, at::kLong), kStep);
  const std::vector<at::Tensor> y =
      nn::forward_all(pass_with(f.kernels, *f.adapters, draws), x, f.layers);
  const std::vector<at::Tensor> dy = {numbers(kTokens, 6, 2), numbers(kTokens, 4, 3)};
  ops::run_backward(y, dy);

  at::Tensor dx;
  for (std::size_t i = 0; i < 2; ++i) {
    Lora& lora = *f.adapters->adapters()[i];
    const at::Tensor mask = ops::dropout_factors(
        {dropout_key(kSeed, lora.module()), draws, at::arange(kIn, at::kLong), kDropout},
        at::kDouble);
    const at::Tensor seen = ops::detached(x) * mask, a = lora.a().data() * lora.scaling(),
                     b = lora.b().data(), w = f.layers[i]->weight().data();
    EXPECT_TRUE(at::allclose(ops::detached(y[i]),
                             at::mm(ops::detached(x), w.t()) + at::mm(at::mm(seen, a.t()), b.t())));
    EXPECT_TRUE(
        at::allclose(lora.a().gradient(), at::mm(at::mm(dy[i], b).t(), seen) * lora.scaling()));
    EXPECT_TRUE(at::allclose(lora.b().gradient(), at::mm(dy[i].t(), at::mm(seen, a.t()))));
    const at::Tensor part = at::mm(dy[i], w) + at::mm(at::mm(dy[i], b), a) * mask;
    dx = dx.defined() ? dx + part : part;
  }
  EXPECT_TRUE(at::allclose(x.grad(), dx));
}

TEST(Lora, AnInputMadeAgainGivesTheSameBits) {
  for (const double dropout : {0.0, kDropout}) {
    std::vector<at::Tensor> kept;
    for (const bool again : {false, true}) {
      Fixture f(dropout);
      const at::Tensor gate = numbers(kTokens, kIn, 1).set_requires_grad(true),
                       up = numbers(kTokens, kIn, 4).set_requires_grad(true);
      const auto make = [&](const ops::OutputAgain& take) {
        return ops::swiglu(f.kernels, gate, up, take);
      };
      const nn::Pass pass = pass_with(f.kernels, *f.adapters,
                                      ops::dropout_draws(at::arange(kTokens, at::kLong), kStep));
      const nn::LinearInput x = again ? nn::LinearInput::made_again(make) : make({});
      ops::run_backward(nn::forward_all(pass, x, f.layers),
                        {numbers(kTokens, 6, 2), numbers(kTokens, 4, 3)});
      std::vector<at::Tensor> found = {gate.grad(), up.grad()};
      f.adapters->visit_parameters(
          [&](nn::Parameter& parameter) { found.push_back(parameter.gradient()); });
      if (!again) kept = found;
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], kept[i]));
    }
  }
}

TEST(Lora, SetsInOnePassHaveTheBitsOfPassesOfTheirOwn) {
  Fixture f(kDropout);
  LoraOptions options;
  options.rank = 3;
  options.seed = kSeed + 1;
  runtime::Context context;
  context.dtype = at::kDouble;
  LoraSet other(adaptable(f.layers), {"second"}, {}, options, context);
  other.initialize();
  other.adapters()[0]->b().write_owned(numbers(4, 3, 9));
  const at::Tensor x = numbers(kTokens, kIn, 1),
                   draws = ops::dropout_draws(at::arange(5, at::kLong), kStep);
  // Rows of one set, of none, of the other.
  const std::vector<nn::AdaptedRows> segments = {
      {f.adapters.get(), 5, draws}, {nullptr, 3, {}}, {&other, 4, {}}};
  struct Outcome {
    at::Tensor dx;
    std::vector<at::Tensor> y, factors;
  };
  const auto run = [&](const std::vector<nn::AdaptedRows>& adapters, std::int64_t first,
                       std::int64_t count) {
    nn::Pass pass;
    pass.kernels = &f.kernels;
    pass.adapters = adapters;
    const at::Tensor input = x.narrow(0, first, count).clone().set_requires_grad(true);
    Outcome outcome;
    outcome.y = nn::forward_all(pass, input, f.layers);
    ops::run_backward(outcome.y, {numbers(kTokens, 6, 2).narrow(0, first, count).clone(),
                                  numbers(kTokens, 4, 3).narrow(0, first, count).clone()});
    outcome.dx = input.grad();
    for (const LoraSet* set :
         {static_cast<const LoraSet*>(f.adapters.get()), static_cast<const LoraSet*>(&other)}) {
      set->visit_parameters([&](nn::Parameter& factor) {
        outcome.factors.push_back(factor.gradient());
        factor.clear_gradient();
      });
    }
    return outcome;
  };
  const Outcome together = run(segments, 0, kTokens);
  std::int64_t first = 0;
  for (const nn::AdaptedRows& segment : segments) {
    const Outcome alone = run({segment}, first, segment.rows);
    EXPECT_TRUE(at::equal(together.dx.narrow(0, first, segment.rows), alone.dx));
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(at::equal(together.y[i].narrow(0, first, segment.rows), alone.y[i]));
    for (std::size_t i = 0; i < alone.factors.size(); ++i) {
      if (!alone.factors[i].defined()) continue;
      EXPECT_TRUE(at::equal(together.factors[i], alone.factors[i])) << i;
    }
    first += segment.rows;
  }
}

// As a whole it fits into no memory.
TEST(Lora, ARankDrawsWhatItOwnsAndNothingElse) {
  constexpr std::int64_t kColumns = std::int64_t{1} << 22, kFirstRow = 12345;
  nn::Parameter parameter("layer.lora_A.weight", {1 << 20, kColumns});
  parameter.set_held(false);
  parameter.allocate_elsewhere(at::kDouble, c10::kCPU);
  fill_kaiming(parameter, kSeed);

  parameter.set_held(true);
  parameter.set_owned(at::empty({1, kColumns}, at::kDouble), kFirstRow);
  fill_kaiming(parameter, kSeed);
  const CounterRng rng(kSeed, parameter.name());
  const double* const found = parameter.owned().const_data_ptr<double>();
  for (const std::int64_t i : {std::int64_t{0}, std::int64_t{1}, kColumns - 1}) {
    EXPECT_EQ(found[i],
              (2 * rng.uniform(static_cast<std::uint64_t>(kFirstRow * kColumns + i)) - 1) /
                  std::sqrt(static_cast<double>(kColumns)));
  }
}

}  // namespace
}  // namespace heddle::adapters
