#include "ops/moe/moe.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <numeric>
#include <optional>
#include <utility>

#include "ops/builtin.h"
#include "ops/moe/shared_expert.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

KernelTable table(const std::string& name, c10::ScalarType dtype) {
  return table_of(any<MoeExperts>(), name, dtype);
}

struct Case {
  Tensors in;  // x, weights, gate_up, down
  at::Tensor experts;
};

Case make(std::int64_t tokens, std::int64_t k, std::int64_t experts, std::int64_t hidden,
          std::int64_t width, c10::ScalarType dtype) {
  const MoeRouting routing = moe_route(randn({tokens, experts}, dtype, 1), k, true);
  return {
      {randn({tokens, hidden}, dtype, 2), routing.weights,
       randn({experts, 2 * width, hidden}, dtype, 3), randn({experts, hidden, width}, dtype, 4)},
      routing.experts};
}

std::function<Tensors(const Tensors&)> run(const KernelTable& kernels, const at::Tensor& experts) {
  return [&kernels, experts](const Tensors& in) {
    return Tensors{moe_experts(kernels, {in[0], in[1], experts, in[2], in[3]})};
  };
}

TEST(MoeRoute, TakesTheLowerIndexOfEqualsAndNormalizes) {
  const MoeRouting even = moe_route(at::zeros({3, 7}, device()), 3, true);
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t j = 0; j < 3; ++j) {
      EXPECT_EQ(even.experts[t][j].item().toLong(), j);
      EXPECT_FLOAT_EQ(even.weights[t][j].item().toFloat(), 1.0f / 3);
    }
  }
  const at::Tensor logits = randn({65, 33}, at::kFloat, 5);
  const MoeRouting plain = moe_route(logits, 4, false), sum_one = moe_route(logits, 4, true);
  const at::Tensor p = at::softmax(logits, -1);
  EXPECT_TRUE(close(plain.weights, p.gather(1, plain.experts), 1e-6));
  EXPECT_TRUE(
      close(sum_one.weights, plain.weights / at::sum(plain.weights, {1}, /*keepdim=*/true), 1e-6));
  EXPECT_TRUE(identical(plain.experts, sum_one.experts));
  const at::Tensor smallest_chosen = plain.weights.select(1, 3).unsqueeze(1);
  EXPECT_TRUE(((p > smallest_chosen).sum(1) == 3).all().item().toBool());
  EXPECT_EQ(moe_route(logits.to(at::kBFloat16), 2, true).weights.scalar_type(), at::kBFloat16);
}

TEST(MoeRoute, GradientsMatchFiniteDifferences) {
  for (const bool normalize : {true, false}) {
    EXPECT_TRUE(gradients_match(
        [&](const Tensors& in) {
          const MoeRouting r = moe_route(in[0], 3, normalize);
          return Tensors{r.weights, r.probabilities};
        },
        {randn({4, 9}, at::kDouble, 6)}));
  }
}

TEST(SharedExpertSum, GradientsMatchFiniteDifferences) {
  const KernelTable kernels = table_of(any<SharedExpertSum>(), "reference", at::kDouble);
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& x) { return Tensors{shared_expert_sum(kernels, x[0], x[1], x[2])}; },
      {randn({5, 7}, at::kDouble, 1), randn({5, 7}, at::kDouble, 2),
       randn({5, 1}, at::kDouble, 3)}));
}

TEST(SharedExpertSum, AddsTheResidual) {
  const KernelTable kernels = table_of(any<SharedExpertSum>(), "reference", at::kDouble);
  const auto sum = [&](const Tensors& x) {
    return Tensors{shared_expert_sum(kernels, x[0], x[1], x[2], x[3])};
  };
  const Tensors in = {randn({5, 7}, at::kDouble, 1), randn({5, 7}, at::kDouble, 2),
                      randn({5, 1}, at::kDouble, 3), randn({5, 7}, at::kDouble, 4)};
  EXPECT_TRUE(identical(sum(in)[0], in[3] + shared_expert_sum(kernels, in[0], in[1], in[2])));
  EXPECT_TRUE(gradients_match(sum, in));
  EXPECT_THROW(sum({in[0], in[1], in[2], randn({4, 7}, at::kDouble, 4)}), c10::Error);
}

TEST(MoeRoute, ReplaysAChoice) {
  const at::Tensor logits = randn({9, 7}, at::kDouble, 31);
  const at::Tensor earlier = moe_route(randn({9, 7}, at::kDouble, 32), 2, true).experts;
  const MoeRouting replayed = moe_route(logits, 2, true, earlier);
  EXPECT_TRUE(identical(replayed.experts, earlier));
  const at::Tensor p = at::softmax(logits, -1).gather(1, earlier);
  EXPECT_TRUE(close(replayed.weights, p / at::sum(p, {1}, /*keepdim=*/true), 1e-12));
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& in) { return Tensors{moe_route(in[0], 2, true, earlier).weights}; },
      {logits}));
  EXPECT_THROW(moe_route(logits, 3, true, earlier), c10::Error);
}

TEST(MoeRoute, TellsWhichOfGivenExpertsItWouldHaveChosen) {
  const MoeRouting own = moe_route(randn({50, 9}, at::kDouble, 33), 3, true);
  EXPECT_TRUE(is_likeliest(own.probabilities, own.experts).all().item().toBool());
  const at::Tensor others = moe_route(randn({50, 9}, at::kDouble, 34), 3, true).experts;
  const at::Tensor expected = (others.unsqueeze(2) == own.experts.unsqueeze(1)).sum(2) > 0;
  EXPECT_TRUE(identical(is_likeliest(own.probabilities, others), expected));
  EXPECT_FALSE(expected.all().item().toBool());
  EXPECT_TRUE(expected.any().item().toBool());
}

TEST(MoeExperts, TheBranchAddsItsGradientToThatOfTheInput) {
  const Case c = make(9, 2, 5, 6, 4, at::kDouble);
  for (const char* name : {"reference", kOwn}) {
    SCOPED_TRACE(name);
    const KernelTable kernels = table(name, at::kDouble);
    const auto branch = [&](const Tensors& in) {
      return moe_experts_branch(kernels, {in[0], in[1], c.experts, in[2], in[3]});
    };
    EXPECT_TRUE(gradients_match(
        [&](const Tensors& in) {
          const auto [y, same] = branch(in);
          return Tensors{y, same * same};
        },
        c.in));
    // One without the other.
    EXPECT_TRUE(
        gradients_match([&](const Tensors& in) { return Tensors{branch(in).first}; }, c.in));
    EXPECT_TRUE(gradients_match(
        [&](const Tensors& in) {
          const at::Tensor same = branch({in[0], c.in[1], c.in[2], c.in[3]}).second;
          return Tensors{same * same};
        },
        {c.in[0]}));
  }
}

TEST(MoeExperts, EqualsTheFormulaTokenByToken) {
  const Case c = make(9, 2, 5, 6, 4, at::kDouble);
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    const at::Tensor y = run(kernels, c.experts)(c.in)[0];
    for (std::int64_t t = 0; t < 9; ++t) {
      at::Tensor expected = at::zeros({6}, y.options());
      for (std::int64_t j = 0; j < 2; ++j) {
        const std::int64_t e = c.experts[t][j].item().toLong();
        const at::Tensor h = at::matmul(c.in[2].select(0, e), c.in[0].select(0, t));
        const at::Tensor g = h.narrow(0, 0, 4), u = h.narrow(0, 4, 4);
        expected += c.in[1][t][j] * at::matmul(c.in[3].select(0, e), g * at::sigmoid(g) * u);
      }
      EXPECT_TRUE(close(y.select(0, t), expected, 1e-12)) << name << t;
    }
  }
}

TEST(MoeExperts, GradientsMatchFiniteDifferences) {
  const Case c = make(6, 2, 4, 5, 3, at::kDouble);
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    EXPECT_TRUE(gradients_match(run(kernels, c.experts), c.in)) << name;
  }
}

TEST(MoeExperts, KernelEqualsReference) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype), reference = table("reference", dtype);
    for (const auto& [tokens, k, experts] :
         {std::tuple{0, 2, 4}, {1, 1, 1}, {65, 3, 40}, {300, 2, 4}, {129, 8, 64}}) {
      const Case c = make(tokens, k, experts, 33, 29, dtype);
      const double tolerance = dtype == at::kBFloat16 ? 2e-2 : 2 * tolerance_of(dtype);
      EXPECT_TRUE(
          close(run(kernel, c.experts)(c.in)[0], run(reference, c.experts)(c.in)[0], tolerance));
      const Tensors g = gradients_of(run(kernel, c.experts), c.in);
      const Tensors expected = gradients_of(run(reference, c.experts), c.in);
      for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(close(g[i], expected[i], tolerance)) << i;
    }
  }
}

TEST(MoeExperts, FrozenExpertsGetNoGradient) {
  const Case c = make(20, 2, 4, 8, 6, at::kFloat);
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kFloat);
    const Tensors all = gradients_of(run(kernels, c.experts), c.in);
    const Tensors some = gradients_of(
        [&](const Tensors& in) {
          return Tensors{moe_experts(kernels, {in[0], in[1], c.experts, c.in[2], c.in[3]})};
        },
        {c.in[0], c.in[1]});
    EXPECT_TRUE(identical(all[0], some[0]));
    EXPECT_TRUE(identical(all[1], some[1]));
  }
}

TEST(MoeExperts, SameBitsForEveryThreadCount) {
  const KernelTable kernel = table(kOwn, at::kFloat);
  const Case c = make(200, 4, 16, 64, 48, at::kFloat);
  const Tensors first = gradients_of(run(kernel, c.experts), c.in);
  const Tensors second = gradients_of(run(kernel, c.experts), c.in);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(identical(first[i], second[i])) << i;
}

TEST(MoeExperts, NamesAnExpertThatDoesNotExist) {
  Case c = make(3, 2, 4, 8, 6, at::kFloat);
  c.experts[1][1].fill_(4);
  EXPECT_THROW(run(table(kOwn, at::kFloat), c.experts)(c.in), c10::Error);
}

/// The choices of which `is_kept` [T,k] is 1; the others are to no expert.
at::Tensor some_of(const at::Tensor& experts, const at::Tensor& is_kept, std::int64_t count) {
  return experts * is_kept + count * (1 - is_kept);
}

TEST(MoeExperts, AssignmentsToNoExpertAreThoseOfWeightZero) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    for (const auto& [tokens, k, experts, share] :
         {std::tuple{65, 3, 40, 0.5}, {129, 8, 64, 0.1}, {40, 2, 4, 0.0}, {33, 1, 6, 1.0}}) {
      const Case c = make(tokens, k, experts, 32, 24, dtype);
      const at::Tensor is_kept =
          (randn({tokens, k}, at::kFloat, 9).sigmoid() < share).to(at::kLong);
      const at::Tensor chosen = some_of(c.experts, is_kept, experts);
      const std::int64_t assignments = is_kept.sum().item().toLong();
      const Tensors zero_weights = {c.in[0], c.in[1] * is_kept, c.in[2], c.in[3]};
      for (const char* name : {"reference", kOwn}) {
        const KernelTable kernels = table(name, dtype);
        const auto of_some = [&](const Tensors& in) {
          return Tensors{
              moe_experts(kernels, {in[0], in[1], chosen, in[2], in[3], {}, assignments})};
        };
        const double tolerance = dtype == at::kBFloat16 ? 2e-2 : 2 * tolerance_of(dtype);
        EXPECT_TRUE(close(of_some(c.in)[0], run(kernels, c.experts)(zero_weights)[0], tolerance));
        const Tensors g = gradients_of(of_some, c.in);
        const Tensors expected = gradients_of(run(kernels, c.experts), zero_weights);
        for (const std::size_t i : {0, 2, 3})
          EXPECT_TRUE(close(g[i], expected[i], tolerance)) << name << i;
        EXPECT_TRUE(close(g[1], expected[1] * is_kept, tolerance)) << name;
        EXPECT_EQ((g[1] * (1 - is_kept)).abs().sum().item().toDouble(), 0) << name;
      }
    }
  }
}

TEST(MoeExperts, NoExpertIsNoneOnlyWhereItIsSaidHowMany) {
  const KernelTable kernels = table("reference", at::kFloat);
  const Case c = make(3, 2, 4, 8, 6, at::kFloat);
  const auto run_with = [&](std::int64_t expert, std::optional<std::int64_t> assignments) {
    const at::Tensor chosen = c.experts.clone();
    chosen[1][1].fill_(expert);
    return moe_experts(kernels, {c.in[0], c.in[1], chosen, c.in[2], c.in[3], {}, assignments});
  };
  run_with(4, 5);
  EXPECT_THROW(run_with(4, {}), c10::Error);
  EXPECT_THROW(run_with(4, 6), c10::Error);
  EXPECT_THROW(run_with(4, 4), c10::Error);
  EXPECT_THROW(run_with(5, 5), c10::Error);
  EXPECT_THROW(run_with(-1, 5), c10::Error);
  EXPECT_THROW(run_with(-1, {}), c10::Error);
}

Sequences packed(std::vector<std::int32_t> boundaries) {
  return Sequences::from_host(std::move(boundaries), device());
}

TEST(MoeAuxiliaryLoss, IsAdditiveOverSequences) {
  const at::Tensor logits = randn({31, 6}, at::kDouble, 8);
  const MoeRouting r = moe_route(logits, 2, true);
  const Sequences sequences = packed({0, 11, 11, 20, 31});
  const auto formula = [&](std::int64_t begin, std::int64_t count) {
    double total = 0;
    for (std::int64_t e = 0; e < 6; ++e) {
      const double f = (r.experts.narrow(0, begin, count) == e).sum().item().toDouble() / count;
      total += f * r.probabilities.narrow(0, begin, count).select(1, e).mean().item().toDouble();
    }
    return total * 6 * count;
  };
  const auto loss = [&](std::int64_t real) {
    return moe_auxiliary_loss(r.probabilities, r.experts, sequences, real).item().toDouble();
  };
  EXPECT_NEAR(loss(31), formula(0, 11) + formula(11, 9) + formula(20, 11), 1e-10);
  EXPECT_NEAR(loss(25), formula(0, 11) + formula(11, 9) + formula(20, 5), 1e-10);
  EXPECT_EQ(loss(0), 0);
  EXPECT_TRUE(gradients_match(
      [&](const Tensors& in) {
        return Tensors{moe_auxiliary_loss(in[0], r.experts, sequences, 25)};
      },
      {r.probabilities}));
}

TEST(MoeLoad, CountsRealTokensAndSumsTheirProbabilities) {
  const MoeRouting r = moe_route(randn({31, 6}, at::kDouble, 8), 2, true);
  for (const std::int64_t real : {std::int64_t{0}, std::int64_t{25}, std::int64_t{31}}) {
    const MoeLoad load = moe_load(r.probabilities, r.experts, real);
    for (std::int64_t e = 0; e < 6; ++e) {
      EXPECT_EQ(load.assignments[e].item().toDouble(),
                (r.experts.narrow(0, 0, real) == e).sum().item().toDouble());
    }
    EXPECT_TRUE(close(load.probabilities, at::sum(r.probabilities.narrow(0, 0, real), {0}), 1e-12));
    EXPECT_TRUE(gradients_match(
        [&](const Tensors& in) { return Tensors{moe_load(in[0], r.experts, real).probabilities}; },
        {r.probabilities}));
  }
}

/// Factors of rank r for every expert.
ExpertLowRank low_rank(std::int64_t experts, std::int64_t r, std::int64_t in, std::int64_t out,
                       c10::ScalarType dtype, int seed) {
  return {randn({experts, r, in}, dtype, seed) * 0.3,
          randn({experts, out, r}, dtype, seed + 1) * 0.3};
}

std::function<Tensors(const Tensors&)> run_changed(const KernelTable& kernels,
                                                   const at::Tensor& experts) {
  return [&kernels, experts](const Tensors& in) {
    return Tensors{moe_experts(
        kernels, {in[0], in[1], experts, in[2], in[3], {{{in[4], in[5]}, {in[6], in[7]}}}})};
  };
}

Tensors with_changes(const Case& c, std::int64_t r, c10::ScalarType dtype) {
  const std::int64_t experts = c.in[2].size(0), hidden = c.in[2].size(2), width = c.in[3].size(2);
  const ExpertLowRank one = low_rank(experts, r, hidden, 2 * width, dtype, 20),
                      two = low_rank(experts, r + 1, width, hidden, dtype, 30);
  Tensors all = c.in;
  all.insert(all.end(), {one.down, one.up, two.down, two.up});
  return all;
}

TEST(MoeExperts, ALowRankChangeEqualsChangedMatrices) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    const Case c = make(37, 2, 5, 7, 6, at::kDouble);
    const Tensors in = with_changes(c, 3, at::kDouble);
    const Tensors merged = {in[0], in[1], in[2] + at::matmul(in[5], in[4]),
                            in[3] + at::matmul(in[7], in[6])};
    EXPECT_TRUE(
        close(run_changed(kernels, c.experts)(in)[0], run(kernels, c.experts)(merged)[0], 1e-12))
        << name;
    const Tensors g = gradients_of(run_changed(kernels, c.experts), in);
    const Tensors expected = gradients_of(run(kernels, c.experts), merged);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(close(g[i], expected[i], 1e-11)) << name << i;
    // dW = d(up down): the chain rule through the merged matrices.
    EXPECT_TRUE(close(g[4], at::matmul(in[5].transpose(1, 2), expected[2]), 1e-11)) << name;
    EXPECT_TRUE(close(g[5], at::matmul(expected[2], in[4].transpose(1, 2)), 1e-11)) << name;
    EXPECT_TRUE(close(g[6], at::matmul(in[7].transpose(1, 2), expected[3]), 1e-11)) << name;
    EXPECT_TRUE(close(g[7], at::matmul(expected[3], in[6].transpose(1, 2)), 1e-11)) << name;
  }
}

/// Sets of adapters that share a call, some without a change, and the same tokens set by set.
struct SetsOfRows {
  Case c;
  std::vector<ExpertChanges> changes;

  explicit SetsOfRows(const std::vector<std::int64_t>& tokens, std::int64_t experts,
                      c10::ScalarType dtype)
      : c(make(std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}), 3, experts, 16, 24,
               dtype)) {
    const std::int64_t hidden = c.in[2].size(2), width = c.in[3].size(2);
    for (std::size_t s = 0; s < tokens.size(); ++s) {
      const auto rank = static_cast<std::int64_t>(s) + 1;
      const int seed = 40 + 10 * static_cast<int>(s);
      ExpertChanges change{{}, {}, tokens[s]};
      if (s % 4 != 1) change.gate_up = low_rank(experts, rank, hidden, 2 * width, dtype, seed);
      if (s % 4 < 2 && s != 1)
        change.down = low_rank(experts, rank + 2, width, hidden, dtype, seed + 5);
      changes.push_back(change);
    }
  }
  /// x, weights and the factors that there are.
  Tensors trained() const {
    Tensors all = {c.in[0], c.in[1]};
    for (const ExpertChanges& change : changes) {
      for (const ExpertLowRank* const one : {&change.gate_up, &change.down})
        if (one->defined()) all.insert(all.end(), {one->down, one->up});
    }
    return all;
  }
  /// Puts these in the place of trained().
  std::vector<ExpertChanges> with(const Tensors& in) const {
    std::vector<ExpertChanges> own = changes;
    std::size_t next = 2;
    for (ExpertChanges& change : own) {
      for (ExpertLowRank* const one : {&change.gate_up, &change.down}) {
        if (!one->defined()) continue;
        one->down = in[next++];
        one->up = in[next++];
      }
    }
    return own;
  }
};

TEST(MoeExperts, SetsInOneCallAreTheSetsOneByOne) {
  for (const char* name : {"reference", kOwn}) {
    const KernelTable kernels = table(name, at::kDouble);
    for (const std::vector<std::int64_t>& tokens :
         {std::vector<std::int64_t>{20, 9, 1, 33, 14}, {5, 5}, {1, 1, 1, 1, 1, 1}}) {
      for (const std::int64_t experts : {3, 40}) {
        const SetsOfRows sets(tokens, experts, at::kDouble);
        const auto together = [&](const Tensors& in) {
          return Tensors{moe_experts(
              kernels, {in[0], in[1], sets.c.experts, sets.c.in[2], sets.c.in[3], sets.with(in)})};
        };
        const auto one_by_one = [&](const Tensors& in) {
          Tensors parts;
          std::int64_t first = 0;
          for (ExpertChanges& change : sets.with(in)) {
            const std::int64_t count = std::exchange(change.tokens, -1);
            parts.push_back(moe_experts(kernels, {in[0].narrow(0, first, count),
                                                  in[1].narrow(0, first, count),
                                                  sets.c.experts.narrow(0, first, count),
                                                  sets.c.in[2],
                                                  sets.c.in[3],
                                                  {change}}));
            first += count;
          }
          return Tensors{at::cat(parts)};
        };
        EXPECT_TRUE(close(together(sets.trained())[0], one_by_one(sets.trained())[0], 1e-12))
            << name;
        const Tensors g = gradients_of(together, sets.trained()),
                      expected = gradients_of(one_by_one, sets.trained());
        for (std::size_t i = 0; i < g.size(); ++i)
          EXPECT_TRUE(close(g[i], expected[i], 1e-11)) << name << " " << i;
      }
    }
  }
}

TEST(MoeExperts, KernelsAgreeOnLowRankChangesOfFrozenExperts) {
  for (const c10::ScalarType dtype : kernel_dtypes()) {
    const KernelTable kernel = table(kOwn, dtype), reference = table("reference", dtype);
    for (const auto& [tokens, k, experts] : {std::tuple{1, 1, 1}, {65, 3, 40}, {129, 8, 64}}) {
      const Case c = make(tokens, k, experts, 33, 29, dtype);
      const Tensors in = with_changes(c, 4, dtype);
      const auto frozen = [&](const KernelTable& kernels) {
        return [&](const Tensors& some) {
          return Tensors{moe_experts(kernels, {some[0],
                                               some[1],
                                               c.experts,
                                               in[2],
                                               in[3],
                                               {{{some[2], some[3]}, {some[4], some[5]}}}})};
        };
      };
      const Tensors trained = {in[0], in[1], in[4], in[5], in[6], in[7]};
      const double tolerance = dtype == at::kBFloat16 ? 3e-2 : 2 * tolerance_of(dtype);
      const Tensors g = gradients_of(frozen(kernel), trained);
      const Tensors expected = gradients_of(frozen(reference), trained);
      for (std::size_t i = 0; i < g.size(); ++i) {
        EXPECT_TRUE(close(g[i], expected[i], tolerance)) << i << " " << at::toString(dtype);
      }
    }
  }
}

}  // namespace
}  // namespace heddle::ops::testing
