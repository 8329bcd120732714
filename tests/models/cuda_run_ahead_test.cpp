// Recorded steps that begin before the tokens of the last one are known, on a GPU.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "rollout/engine.h"
#include "testing/model_on_gpu.h"

namespace heddle::rollout {
namespace {

constexpr RequestId kRequests = 10;

class GpuRunAhead : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
    placed_.emplace(testing::model_on_gpu(assembly::Purpose::kGenerate));
  }

  /// Ends at a token that nobody foresees, but for the first two. With `waits` no step begins ahead
  /// of its last token.
  static Request request_of(RequestId i, bool waits = false) {
    Request request;
    for (std::int64_t t = 0; t < 20 + i % 3; ++t)
      request.prompt.push_back(
          static_cast<std::int32_t>((31 * i + 7 * t) % testing::kVocabularyOnGpu));
    request.max_new_tokens = 40;
    request.sampling.seed = static_cast<std::uint64_t>(i);
    for (std::int32_t id = 0; i > 1 && id < testing::kVocabularyOnGpu; id += 17)
      request.stop_ids.push_back(id);
    request.keep_state = waits;
    return request;
  }
  Engine engine(std::int64_t at_once) {
    return {*placed_, nullptr, {.max_sequences = at_once, .capacity = 80}};
  }

  /// Steps of an engine until it is idle.
  struct Run {
    std::map<RequestId, Completion> completions;
    std::int64_t recorded = 0, ahead = 0;

    void step(Engine& engine) {
      for (Progress& progress : engine.step()) {
        if (progress.completion) completions[progress.id] = std::move(*progress.completion);
      }
      recorded += engine.last_pass().recorded;
      ahead += engine.last_pass().ahead;
    }
    void finish(Engine& engine) {
      while (!engine.is_idle()) step(engine);
    }
  };
  Run waiting(std::int64_t at_once) {
    Engine engine = this->engine(at_once);
    for (RequestId i = 0; i < kRequests; ++i) engine.submit(request_of(i, /*waits=*/true));
    Run run;
    run.finish(engine);
    EXPECT_EQ(run.ahead, 0);
    return run;
  }
  static void expect_like(const Completion& found, const Completion& other) {
    EXPECT_EQ(found.output_ids, other.output_ids);
    EXPECT_EQ(found.finish_reason, other.finish_reason);
    ASSERT_EQ(found.logprobs.size(), other.logprobs.size());
    // Other sequences are in the steps, with which bf16 rounds otherwise.
    for (std::size_t t = 0; t < found.logprobs.size(); ++t)
      EXPECT_NEAR(found.logprobs[t], other.logprobs[t], 0.05) << t;
  }

  std::optional<assembly::ModelOnRanks> placed_;
};

TEST_F(GpuRunAhead, SequencesEndAndOthersTakeTheirPlaces) {
  for (const std::int64_t at_once : {1, 3, 10}) {
    SCOPED_TRACE(at_once);
    const Run expected = waiting(at_once);
    Engine engine = this->engine(at_once);
    for (RequestId i = 0; i < kRequests; ++i) engine.submit(request_of(i));
    Run run;
    run.finish(engine);
    EXPECT_GT(run.ahead, run.recorded / 2);
    std::int64_t stopped = 0;
    for (RequestId i = 0; i < kRequests; ++i) {
      SCOPED_TRACE(i);
      expect_like(run.completions.at(i), expected.completions.at(i));
      stopped += run.completions.at(i).finish_reason == FinishReason::kStop;
    }
    EXPECT_GT(stopped, 0);
  }
}

TEST_F(GpuRunAhead, RequestsComeAndGoInBetween) {
  const Run expected = waiting(kRequests);
  Engine engine = this->engine(kRequests);
  for (RequestId i = 0; i < 6; ++i) engine.submit(request_of(i));
  Run run;
  while (run.ahead < 3) run.step(engine);
  const Completion aborted = engine.abort(0);
  EXPECT_EQ(aborted.output_ids,
            std::vector<std::int32_t>(
                expected.completions.at(0).output_ids.begin(),
                expected.completions.at(0).output_ids.begin() + std::ssize(aborted.output_ids)));
  engine.preempt(1);
  for (RequestId i = 6; i < kRequests; ++i) engine.submit(request_of(i));
  run.finish(engine);
  for (RequestId i = 1; i < kRequests; ++i) {
    SCOPED_TRACE(i);
    expect_like(run.completions.at(i), expected.completions.at(i));
  }
}

TEST_F(GpuRunAhead, TokensHaveTheVersionThatDrewThem) {
  const Run expected = waiting(2);
  for (const LiveSequences live : {LiveSequences::kKeep, LiveSequences::kRecompute}) {
    Engine engine = this->engine(2);
    for (RequestId i = 0; i < 2; ++i) engine.submit(request_of(i));
    Run run;
    for (std::int64_t step = 0; step < 4; ++step) run.step(engine);
    ASSERT_TRUE(engine.last_pass().ahead);
    engine.release_memory();
    run.step(engine);
    engine.weights_changed(7, live);
    run.finish(engine);
    for (RequestId i = 0; i < 2; ++i) {
      const Completion& found = run.completions.at(i);
      expect_like(found, expected.completions.at(i));
      // The token of the prompt's pass and those of the steps after it.
      const auto& versions = found.weights_versions;
      EXPECT_TRUE(std::is_sorted(versions.begin(), versions.end()));
      EXPECT_EQ(versions.front(), 0);
      EXPECT_EQ(versions.back(), 7);
    }
  }
  Engine engine = this->engine(1);
  engine.submit(request_of(0));
  Run run;
  for (std::int64_t step = 0; step < 4; ++step) run.step(engine);
  ASSERT_TRUE(engine.last_pass().ahead);
  engine.weights_changed(7, LiveSequences::kKeep);
  run.step(engine);
  run.finish(engine);
  const auto& versions = run.completions.at(0).weights_versions;
  // Four tokens were told before, and the fifth was on its way.
  EXPECT_EQ(std::count(versions.begin(), versions.end(), 0), 5);
}

TEST_F(GpuRunAhead, AStateThatIsKeptIsNoTokenFurther) {
  // A sequence beside it makes steps begin ahead when it is alone.
  Engine engine = this->engine(2);
  engine.submit(request_of(0, /*waits=*/true));
  engine.submit(request_of(3));
  Run run;
  run.finish(engine);
  Request next = request_of(0);
  const Completion first = run.completions.at(0);
  next.prompt.insert(next.prompt.end(), first.output_ids.begin(), first.output_ids.end());
  next.prompt.push_back(5);
  next.stop_ids.clear();
  next.max_new_tokens = 8;
  const RequestId again = engine.submit(next);
  run.finish(engine);
  Engine fresh = this->engine(2);
  const RequestId alone = fresh.submit(next);
  Run other;
  other.finish(fresh);
  EXPECT_GT(run.completions.at(again).cached_tokens, 20);
  expect_like(run.completions.at(again), other.completions.at(alone));
}

}  // namespace
}  // namespace heddle::rollout
