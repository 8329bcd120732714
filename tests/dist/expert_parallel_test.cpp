// Experts divided over ranks against all of them on one rank with the tokens of all.
#include "ops/moe/expert_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "comm/mesh.h"
#include "comm/ranks.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/moe/moe.h"

namespace heddle {
namespace {

using ops::Tensors;

constexpr std::int64_t kRanks = 3, kExperts = 6, kHidden = 5, kWidth = 4, kLowRank = 2;

at::Tensor wave(std::vector<std::int64_t> shape, double from) {
  const std::int64_t count =
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  return at::sin(at::arange(count, at::kDouble) * 1.7 + from).view(shape);
}

/// x [T,H], weights [T,k], gate_up, down and the factors of their changes.
Tensors inputs_of(std::int64_t tokens, std::int64_t k) {
  return {wave({tokens, kHidden}, 1),
          wave({tokens, k}, 2),
          wave({kExperts, 2 * kWidth, kHidden}, 3),
          wave({kExperts, kHidden, kWidth}, 4),
          wave({kExperts, kLowRank, kHidden}, 5),
          wave({kExperts, 2 * kWidth, kLowRank}, 6),
          wave({kExperts, kLowRank, kWidth}, 7),
          wave({kExperts, kHidden, kLowRank}, 8)};
}

ops::MoeExperts::Inputs with_experts(const Tensors& in, const at::Tensor& experts) {
  return {in[0], in[1], experts, in[2], in[3], {{{in[4], in[5]}, {in[6], in[7]}}}};
}

/// Rows or experts [begin, begin + count) of each of the first two and the other inputs.
Tensors part(const Tensors& in, std::int64_t token, std::int64_t tokens, std::int64_t expert,
             std::int64_t experts) {
  Tensors result;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const at::Tensor rows =
        i < 2 ? in[i].narrow(0, token, tokens) : in[i].narrow(0, expert, experts);
    result.push_back(rows.clone().set_requires_grad(true));
  }
  return result;
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

ops::KernelTable table(const std::string& kernel, c10::ScalarType dtype) {
  ops::KernelPolicy policy;
  policy.named = {{"moe_experts", kernel}};
  return ops::KernelTable::choose(ops::builtin_registry(), {}, dtype,
                                  {ops::OpRequest::of<ops::MoeExperts>()}, policy);
}

comm::Group expert_group(const std::shared_ptr<comm::World>& world) {
  return comm::Mesh({1, 1, 1, kRanks, 1}, world, kRanks).group({comm::Dim::kEp});
}

/// `tokens` of each rank, and the experts [T,k] of all of them.
void check(const std::string& kernel, const std::vector<std::int64_t>& tokens,
           const at::Tensor& experts) {
  const std::int64_t total = experts.size(0);
  const auto kernels = table(kernel, at::kDouble);
  const Tensors all = inputs_of(total, experts.size(1));
  const Tensors whole = part(all, 0, total, 0, kExperts);
  const at::Tensor expected = ops::moe_experts(kernels, with_experts(whole, experts));
  const at::Tensor dy = at::cos(wave({total, kHidden}, 9));
  ops::run_backward({expected}, {dy});

  const auto errors = testing::run_ranks(kRanks, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Group group = expert_group(world);
    const auto rank = static_cast<std::size_t>(world->rank());
    const std::int64_t first = std::accumulate(
        tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(rank), std::int64_t{0});
    const std::int64_t own = kExperts / kRanks, first_expert = world->rank() * own;
    const Tensors mine = part(all, first, tokens[rank], first_expert, own);
    int meanwhile = 0;
    const at::Tensor y = ops::moe_experts_parallel(
        kernels, with_experts(mine, experts.narrow(0, first, tokens[rank])), group,
        [&] { ++meanwhile; });
    EXPECT_EQ(meanwhile, 1);
    EXPECT_LT(difference(y, expected.narrow(0, first, tokens[rank])), 1e-12);
    ops::run_backward({y}, {dy.narrow(0, first, tokens[rank])});
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const at::Tensor gradient = i < 2 ? whole[i].grad().narrow(0, first, tokens[rank])
                                        : whole[i].grad().narrow(0, first_expert, own);
      EXPECT_LT(difference(mine[i].grad(), gradient), 1e-12)
          << kernel << ", input " << i << " on rank " << rank;
    }
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST(ExpertParallel, EqualsAllExpertsOnOneRank) {
  // Tokens differ per rank, one rank has none; expert 4 gets none.
  const at::Tensor at_random =
      at::tensor({0, 5, 1, 0, 3, 2, 5, 1, 2, 0, 5, 3, 1, 2, 0, 1, 3, 5, 2, 3, 5, 0}, at::kLong)
          .view({11, 2});
  // All go to the experts of the first rank: the others receive nothing.
  const at::Tensor to_one_rank = at::arange(2, at::kLong).repeat({11, 1});
  // Tokens go to one rank, to two and to all three, once to each.
  const at::Tensor several = at::tensor({0, 1, 2, 3, 5, 4, 0, 1, 4, 2, 0, 5, 3, 2, 1, 0,
                                         1, 2, 3, 4, 2, 3, 5, 1, 2, 0, 4, 3, 5, 1, 0, 2},
                                        at::kLong)
                                 .view({8, 4});
  for (const char* kernel : {"reference", "cpu"}) {
    check(kernel, {4, 0, 7}, at_random);
    check(kernel, {5, 5, 1}, to_one_rank);
    check(kernel, {3, 5, 0}, several);
    check(kernel, {0, 0, 0}, several.narrow(0, 0, 0));
  }
}

TEST(ExpertParallel, RefusesExpertsThatDoNotExist) {
  for (const std::int64_t wrong : {std::int64_t{-1}, kExperts, std::int64_t{65536}}) {
    const auto errors = testing::run_ranks(kRanks, [&](const std::shared_ptr<comm::World>& world) {
      Tensors in = inputs_of(4, 2);
      for (std::size_t i = 2; i < in.size(); ++i) in[i] = in[i].narrow(0, 0, kExperts / kRanks);
      at::Tensor experts = at::arange(2, at::kLong).repeat({4, 1});
      experts[2][1].fill_(wrong);
      ops::moe_experts_parallel(table("reference", at::kDouble), with_experts(in, experts),
                                expert_group(world));
    });
    EXPECT_THAT(errors, ::testing::Each(::testing::HasSubstr("outside of [0, 6)"))) << wrong;
  }
}

TEST(ExpertParallel, ATokenIsExpectedOnceOnEachRankOfItsExperts) {
  EXPECT_DOUBLE_EQ(ops::expected_expert_ranks(8, 3, 1), 1);
  EXPECT_DOUBLE_EQ(ops::expected_expert_ranks(8, 1, 4), 1);
  EXPECT_DOUBLE_EQ(ops::expected_expert_ranks(8, 8, 4), 4);
  // Both of a token's experts are among the four of one rank in 3 of 7 cases.
  EXPECT_NEAR(ops::expected_expert_ranks(8, 2, 2), 2 - 3.0 / 7, 1e-12);
}

}  // namespace
}  // namespace heddle
