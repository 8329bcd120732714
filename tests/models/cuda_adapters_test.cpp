// Recorded steps whose rows have any sets of adapters, on a GPU.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "ckpt/hf_adapter.h"
#include "models/answers.h"
#include "rollout/engine.h"
#include "testing/model_on_gpu.h"

namespace heddle::rollout {
namespace {

using testing::kVocabularyOnGpu;

class GpuAdaptersOfRequests : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
    assembly::NewAdapters adapters;
    adapters.targets = {"all-linear"};
    placed_.emplace(testing::model_on_gpu(assembly::Purpose::kGenerate, adapters));
    adapters_ = {set({"all-linear"}, 16), head_set(8), set({"all-linear"}, 64),
                 set({"gate_proj", "down_proj"}, 1),
                 std::make_shared<const Adapter>(Adapter{"base", 0, nullptr})};
  }

  std::shared_ptr<const Adapter> set(const std::vector<std::string>& targets, std::int64_t rank) {
    adapters::LoraOptions options;
    options.rank = rank;
    options.alpha = 2.0 * static_cast<double>(rank);
    auto own =
        std::make_shared<adapters::LoraSet>(ckpt::adaptable(*placed_->model), targets,
                                            std::vector<std::string>{}, options, placed_->context);
    // Changes of few layers are made as visible as those of many.
    fill(*own, targets.size() > 1 ? 0.15 : 0.05);
    return std::make_shared<const Adapter>(Adapter{targets[0] + std::to_string(rank), 0, own});
  }
  /// Changes the values of attention and the language-model head.
  std::shared_ptr<const Adapter> head_set(std::int64_t rank) {
    std::vector<adapters::LoraSet::Module> modules;
    placed_->model->visit_linears([&](const nn::Linear& linear) {
      if (linear.module().ends_with("v_proj") || linear.module() == "lm_head")
        modules.push_back({linear.module(), rank, 2});
    });
    EXPECT_EQ(modules.back().name, "lm_head");
    adapters::LoraOptions options;
    options.rank = rank;
    options.alpha = 2.0 * static_cast<double>(rank);
    auto own = std::make_shared<adapters::LoraSet>(ckpt::adaptable(*placed_->model), modules,
                                                   options, placed_->context);
    fill(*own, 0.15);
    return std::make_shared<const Adapter>(Adapter{"head", 0, own});
  }
  static void fill(adapters::LoraSet& set, double scale) {
    set.initialize();
    set.visit_parameters([&](nn::Parameter& factor) {
      if (factor.name().ends_with("lora_B.weight")) factor.data().normal_(0, scale);
    });
  }

  static std::vector<std::int32_t> prompt(std::int64_t i) {
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < 4 + i % 3; ++t)
      ids.push_back(static_cast<std::int32_t>((31 * i + 7 * t) % kVocabularyOnGpu));
    return ids;
  }

  using Found = testing::Answers;
  /// Answers to `count` requests, request i with adapter of_request(i).
  template <class F>
  Found generate(std::int64_t count, const F& of_request, bool records = true) {
    Engine engine(*placed_, nullptr,
                  {.max_sequences = count, .capacity = 64, .record_steps = records});
    for (std::int64_t i = 0; i < count; ++i) {
      Request request;
      request.prompt = prompt(i);
      request.max_new_tokens = 12;
      request.sampling.seed = static_cast<std::uint64_t>(i);
      request.adapter = adapters_.at(static_cast<std::size_t>(of_request(i)));
      engine.submit(std::move(request));
    }
    return testing::answers_of(engine);
  }

  /// For each adapter, log-probabilities of the answers from launched passes over the whole texts,
  /// in which all sequences have that one adapter.
  std::vector<std::vector<std::vector<double>>> judged(const Found& found) {
    std::vector<std::vector<std::vector<double>>> all;
    for (const std::shared_ptr<const Adapter>& adapter : adapters_) {
      const auto count = static_cast<std::int64_t>(found.completions.size());
      Engine engine(*placed_, nullptr,
                    {.max_sequences = count, .capacity = 64, .record_steps = false});
      for (const auto& [id, completion] : found.completions) {
        Request request;
        request.prompt = prompt(id);
        request.prompt.insert(request.prompt.end(), completion.output_ids.begin(),
                              completion.output_ids.end());
        request.max_new_tokens = 1;
        request.prompt_logprobs = 0;
        request.adapter = adapter;
        engine.submit(std::move(request));
      }
      all.emplace_back(static_cast<std::size_t>(count));
      while (!engine.is_idle()) {
        for (Progress& progress : engine.step()) {
          if (!progress.completion) continue;
          const std::vector<double>& logprobs = progress.completion->prompt_logprobs;
          all.back()[static_cast<std::size_t>(progress.id)].assign(
              logprobs.begin() + static_cast<std::ptrdiff_t>(prompt(progress.id).size()),
              logprobs.end());
        }
      }
    }
    return all;
  }

  /// Expects of each answer that its log-probabilities are those of its adapter, and far from those
  /// of any other. Both sides judge the same tokens: a rounding changes no token that comes after.
  /// Returns the mean distance.
  template <class F>
  double expect_own(const Found& found, const F& of_request) {
    const auto by_adapter = judged(found);
    double sum = 0;
    for (const auto& [id, completion] : found.completions) {
      std::vector<double> distances;
      for (const auto& of_adapter : by_adapter)
        distances.push_back(
            distance(completion.logprobs, of_adapter[static_cast<std::size_t>(id)]));
      const auto own = static_cast<std::size_t>(of_request(id));
      sum += distances[own];
      for (std::size_t other = 0; other < distances.size(); ++other) {
        if (other == own) continue;
        EXPECT_LT(3 * distances[own], distances[other]) << "answer " << id << ", set " << other;
      }
    }
    return sum / static_cast<double>(found.completions.size());
  }

  /// Mean of the differences.
  static double distance(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    double sum = 0;
    for (std::size_t t = 0; t < std::min(a.size(), b.size()); ++t) sum += std::abs(a[t] - b[t]);
    return sum / static_cast<double>(a.size());
  }

  std::optional<assembly::ModelOnRanks> placed_;
  std::vector<std::shared_ptr<const Adapter>> adapters_;
};

TEST_F(GpuAdaptersOfRequests, ShareARecordedStep) {
  for (const std::int64_t count : {7, 30}) {
    const auto mixed = [](std::int64_t i) { return i % 5; };
    const Found found = generate(count, mixed), again = generate(count, mixed),
                launched = generate(count, mixed, /*records=*/false);
    EXPECT_EQ(found.recorded, 11) << count;
    EXPECT_EQ(found.launched, 0) << count;
    EXPECT_EQ(launched.recorded, 0) << count;
    for (const auto& [id, completion] : found.completions) {
      EXPECT_EQ(completion.output_ids, again.completions.at(id).output_ids) << count << " " << id;
      EXPECT_EQ(completion.logprobs, again.completions.at(id).logprobs) << count << " " << id;
    }
    // No farther off than steps of other kernels are.
    const double of_launched = expect_own(launched, mixed), own = expect_own(found, mixed);
    EXPECT_LT(own, 2 * of_launched) << count;
  }
}

TEST_F(GpuAdaptersOfRequests, OfOneSetAreThoseOfThatSet) {
  for (std::int64_t a = 0; a < 5; ++a) {
    const auto same = [a](std::int64_t) { return a; };
    const Found found = generate(10, same), launched = generate(10, same, /*records=*/false);
    EXPECT_EQ(found.recorded, 11) << a;
    EXPECT_LT(expect_own(found, same), 2 * expect_own(launched, same)) << a;
  }
}

TEST_F(GpuAdaptersOfRequests, TakeTheSlotsOfSetsThatAreGone) {
  // More sets than there are slots, one after another at the addresses of old ones.
  Engine engine(*placed_, nullptr, {.max_sequences = 2, .capacity = 64});
  for (int round = 0; round < 5; ++round) {
    adapters_[0] = set({"all-linear"}, 16);
    std::vector<std::vector<double>> found;
    for (Engine* one : {&engine, static_cast<Engine*>(nullptr)}) {
      std::optional<Engine> fresh;
      if (one == nullptr)
        one = &fresh.emplace(*placed_, nullptr, EngineOptions{.max_sequences = 2, .capacity = 64});
      for (const std::size_t adapter : {0, 2}) {
        Request request;
        request.prompt = {5, 6, 7};
        request.max_new_tokens = 6;
        request.adapter = adapters_[adapter];
        one->submit(request);
      }
      while (!one->is_idle()) {
        for (Progress& progress : one->step())
          if (progress.completion) found.push_back(progress.completion->logprobs);
      }
    }
    ASSERT_EQ(found.size(), 4U);
    EXPECT_EQ(found[0], found[2]) << round;
    EXPECT_EQ(found[1], found[3]) << round;
  }
}

TEST_F(GpuAdaptersOfRequests, MergedReplayTheirStepsAfterEachChange) {
  const std::shared_ptr<const nn::AdapterSet> own(placed_->adapters.get(), [](const auto*) {});
  adapters_ = {std::make_shared<const Adapter>(Adapter{"own", 0, own}),
               std::make_shared<const Adapter>(Adapter{"base", 0, nullptr})};
  constexpr std::int64_t kRequests = 7;
  const EngineOptions options{.max_sequences = kRequests, .capacity = 64, .merge_adapter = true};
  const auto answers = [](Engine& engine) {
    for (std::int64_t i = 0; i < kRequests; ++i) {
      Request request;
      request.prompt = prompt(i);
      request.max_new_tokens = 12;
      request.sampling.seed = static_cast<std::uint64_t>(i);
      engine.submit(std::move(request));
    }
    return testing::answers_of(engine);
  };
  Engine engine(*placed_, nullptr, options);
  const auto of_own = [](std::int64_t) { return 0; };
  for (std::int64_t version = 0; version < 3; ++version) {
    placed_->adapters->visit_parameters([](nn::Parameter& factor) {
      if (factor.name().ends_with("lora_B.weight")) factor.data().normal_(0, 0.05);
    });
    engine.weights_changed(version);
    const Found found = answers(engine);
    EXPECT_EQ(found.recorded, 11) << version;
    EXPECT_EQ(found.launched, 0) << version;
    engine.release_weights();
    Found fresh;
    {
      Engine other(*placed_, nullptr, options);
      fresh = answers(other);
    }
    for (const auto& [id, completion] : fresh.completions)
      EXPECT_EQ(found.completions.at(id + version * kRequests).logprobs, completion.logprobs)
          << version << " " << id;
    const double beside = expect_own(generate(kRequests, of_own, /*records=*/false), of_own);
    EXPECT_LT(expect_own(fresh, of_own), 3 * beside) << version;
  }
}

}  // namespace
}  // namespace heddle::rollout
