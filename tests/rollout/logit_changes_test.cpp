#include "rollout/logit_changes.h"

#include <ATen/ops/log_softmax.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ops/builtin.h"
#include "ops/sampling/sampling.h"
#include "rollout/request.h"

namespace heddle::rollout {
namespace {

std::map<std::int32_t, LogitChange> by_id(const LogitChanges& changes) {
  std::map<std::int32_t, LogitChange> found;
  for (const LogitChange& change : changes.now()) found[change.id] = change;
  return found;
}

TEST(LogitChanges, FollowTheTokensSoFar) {
  Request request;
  request.prompt = {1, 2, 2};
  request.sampling.repetition_penalty = 2;
  request.sampling.presence_penalty = 0.5;
  request.sampling.frequency_penalty = 0.25;
  request.sampling.logit_bias = {{2, 3.0}, {9, -1.0}};
  request.stop_ids = {7};
  request.min_tokens = 2;
  LogitChanges changes(request);
  changes.saw(2);
  auto found = by_id(changes);
  EXPECT_EQ(found.size(), 4u);
  EXPECT_EQ(found[1].penalty, 2);
  EXPECT_EQ(found[1].taken, 0) << "it is in the prompt alone";
  EXPECT_EQ(found[2].bias, 3);
  EXPECT_EQ(found[2].taken, 0.75F);
  EXPECT_EQ(found[9].penalty, 1);
  EXPECT_EQ(found[7].bias, -INFINITY);
  changes.saw(2);
  found = by_id(changes);
  EXPECT_EQ(found[2].taken, 1.0F);
  EXPECT_FALSE(found.contains(7)) << "two tokens are there";
}

TEST(LogitChanges, AreAppliedInOrderBeforeTheDraw) {
  const auto kernels = ops::KernelTable::choose(ops::builtin_registry(), {}, at::kFloat,
                                                {ops::OpRequest::of<ops::SampleTokens>()});
  const at::Tensor logits = at::tensor({1.0F, -1.0F, 0.5F, 2.0F}).unsqueeze(0);
  Draw draw;
  draw.changes = {{0, 0.5F, 2, 0.1F}, {1, 0, 2, 0}};
  // (1 + 0.5) / 2 - 0.1, -1 * 2.
  const at::Tensor expected = at::log_softmax(at::tensor({0.65, -2.0, 0.5, 2.0}, at::kDouble), 0);
  const at::Tensor own = at::log_softmax(logits[0].to(at::kDouble), 0);
  for (std::uint64_t position = 0; position < 20; ++position) {
    draw.position = position;
    const SampledToken token = sample(kernels, logits, {draw})[0];
    EXPECT_NEAR(token.sampled_logprob, expected[token.id].item<double>(), 1e-5);
    EXPECT_NEAR(token.logprob, own[token.id].item<double>(), 1e-5);
  }
}

}  // namespace
}  // namespace heddle::rollout
