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
  /// Each answer ends where its request says, and its log-probabilities are those of one launched
  /// pass over all of its tokens: had a step read another token or state, they would be far off.
  void expect_right(const std::map<RequestId, Completion>& found) {
    Engine judge(*placed_, nullptr, {.max_sequences = 4, .capacity = 80, .record_steps = false});
    std::map<RequestId, RequestId> judged;
    for (const auto& [id, completion] : found) {
      SCOPED_TRACE(id);
      Request request = request_of(id);
      const std::vector<std::int32_t>& ids = completion.output_ids;
      const auto stop = std::find_first_of(ids.begin(), ids.end(), request.stop_ids.begin(),
                                           request.stop_ids.end());
      if (completion.finish_reason == FinishReason::kStop) {
        EXPECT_EQ(stop - ids.begin(), std::ssize(ids) - 1);
      } else {
        EXPECT_EQ(stop, ids.end());
        EXPECT_EQ(std::ssize(ids) == request.max_new_tokens,
                  completion.finish_reason == FinishReason::kLength);
      }
      request.prompt.insert(request.prompt.end(), ids.begin(), ids.end());
      request.max_new_tokens = 0;
      request.prompt_logprobs = 0;
      judged[id] = judge.submit(std::move(request));
    }
    Run whole;
    whole.finish(judge);
    for (const auto& [id, completion] : found) {
      const std::vector<double>& expected = whole.completions.at(judged.at(id)).prompt_logprobs;
      const std::size_t first = expected.size() - completion.logprobs.size();
      for (std::size_t t = 0; t < completion.logprobs.size(); ++t)
        EXPECT_NEAR(completion.logprobs[t], expected[first + t], 0.1) << id << " " << t;
    }
  }

  std::optional<assembly::ModelOnRanks> placed_;
};

TEST_F(GpuRunAhead, SequencesEndAndOthersTakeTheirPlaces) {
  for (const std::int64_t at_once : {1, 3, 10}) {
    SCOPED_TRACE(at_once);
    Engine engine = this->engine(at_once);
    for (RequestId i = 0; i < kRequests; ++i) engine.submit(request_of(i));
    Run run;
    run.finish(engine);
    EXPECT_GT(run.ahead, run.recorded / 2);
    EXPECT_EQ(std::ssize(run.completions), kRequests);
    expect_right(run.completions);
    const auto stopped = std::ranges::count_if(run.completions, [](const auto& completion) {
      return completion.second.finish_reason == FinishReason::kStop;
    });
    EXPECT_GT(stopped, 0);
  }
}

TEST_F(GpuRunAhead, RequestsComeAndGoInBetween) {
  Engine engine = this->engine(kRequests);
  for (RequestId i = 0; i < 6; ++i) engine.submit(request_of(i));
  Run run;
  while (run.ahead < 3) run.step(engine);
  const Completion aborted = engine.abort(0);
  EXPECT_GE(std::ssize(aborted.output_ids), 3);
  engine.preempt(1);
  for (RequestId i = 6; i < kRequests; ++i) engine.submit(request_of(i));
  run.finish(engine);
  EXPECT_EQ(std::ssize(run.completions), kRequests - 1);
  run.completions[0] = aborted;
  expect_right(run.completions);
}

TEST_F(GpuRunAhead, TokensHaveTheVersionThatDrewThem) {
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
    expect_right(run.completions);
    for (RequestId i = 0; i < 2; ++i) {
      const Completion& found = run.completions.at(i);
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
  EXPECT_GT(run.completions.at(again).cached_tokens, 20);
  // From its kept state on, and from a prompt that is read at once.
  Engine fresh(*placed_, nullptr, {.max_sequences = 2, .capacity = 80, .record_steps = false});
  const Completion found = run.completions.at(again);
  const std::size_t length = next.prompt.size();
  next.prompt.insert(next.prompt.end(), found.output_ids.begin(), found.output_ids.end());
  next.max_new_tokens = 0;
  next.prompt_logprobs = 0;
  const RequestId alone = fresh.submit(next);
  Run other;
  other.finish(fresh);
  for (std::size_t t = 0; t < found.logprobs.size(); ++t) {
    EXPECT_NEAR(found.logprobs[t], other.completions.at(alone).prompt_logprobs[length + t], 0.1)
        << t;
  }
}

}  // namespace
}  // namespace heddle::rollout
