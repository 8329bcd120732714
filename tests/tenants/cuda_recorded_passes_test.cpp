// Training passes of several sets replayed as graphs, on a GPU.
#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>

#include "adapters/lora.h"
#include "assembly/model_on_ranks.h"
#include "device/device.h"
#include "tenants/trainer.h"
#include "testing/model_on_gpu.h"

namespace heddle::tenants {
namespace {

using testing::kVocabularyOnGpu;

/// Several sequences of one set, others for every seed.
Work work_of(SetId set, int seed, const std::vector<int>& lengths, const std::string& loss_fn) {
  Work work;
  work.set = set;
  work.loss_fn = loss_fn;
  for (const int length : lengths) {
    Datum datum;
    for (int t = 0; t < length; ++t) {
      datum.tokens.push_back((seed * 31 + t * t * 7 + t * 3) % kVocabularyOnGpu);
      datum.target_tokens.push_back((seed * 17 + t * 5) % kVocabularyOnGpu);
      if (loss_fn == "cross_entropy") {
        datum.inputs["weights"].push_back(t % 3 == 0 ? 0.0F : 0.01F * static_cast<float>(t % 7));
      } else {
        datum.inputs["logprobs"].push_back(-5.5F - 0.1F * static_cast<float>(t % 5));
        datum.inputs["advantages"].push_back(0.01F * static_cast<float>(t % 7 - 3));
      }
    }
    work.data.push_back(std::move(datum));
  }
  return work;
}

const std::vector<int> kLengths = {64, 37};

/// State that training leaves.
struct Trained {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> logprobs;
  std::vector<at::Tensor> factors;
  std::vector<bool> recorded;  ///< By pass.
};

class Tenants {
 public:
  Tenants(assembly::ModelOnRanks& base, bool records)
      : trainer_(base, {.pass_tokens = 2000, .records = records}) {
    // 0, 1 and 4 are alike. The experts of 2 and 3 have a pair of factors each.
    for (const int rank : {8, 8, 64, 16, 8}) {
      sets_.push_back(trainer_.create({.rank = rank,
                                       .alpha = 32,
                                       .seed = sets_.size() + 1,
                                       .unembed = rank == 8,
                                       .shared_expert_factors = rank == 8}));
    }
  }

  void forward_backward(const std::vector<std::size_t>& which,
                        const std::vector<int>& lengths = kLengths) {
    std::vector<Work> works;
    for (const std::size_t i : which) {
      works.push_back(
          work_of(sets_[i], static_cast<int>(i) + 10 * ++calls_, lengths, loss_fns_.at(i)));
    }
    for (const WorkResult& result : trainer_.forward_backward(works)) {
      EXPECT_EQ(result.error, "");
      trained_.losses.push_back(result.metrics.at("loss:sum"));
      for (const DatumOutput& output : result.data) trained_.logprobs.push_back(output.logprobs);
    }
    for (const PassShape& pass : trainer_.last_passes()) trained_.recorded.push_back(pass.recorded);
  }
  void step(const std::vector<std::size_t>& which) {
    std::vector<SetUpdate> updates;
    for (const std::size_t i : which) {
      updates.push_back(
          {sets_[i],
           {.lr = 1e-3 * static_cast<double>(i + 1), .grad_clip_norm = i % 2 == 0 ? 0.5 : 0}});
    }
    for (const StepResult& result : trainer_.optim_steps(updates))
      trained_.norms.push_back(result.grad_norm);
  }
  void use_loss(std::size_t which, const std::string& loss_fn) { loss_fns_.at(which) = loss_fn; }
  void replace(std::size_t which) {
    trainer_.remove(sets_[which]);
    sets_[which] = trainer_.create(
        {.rank = 8, .alpha = 32, .seed = 77, .unembed = true, .shared_expert_factors = true});
  }
  Trained end() {
    for (const SetId set : sets_) {
      trainer_.snapshot(set)->visit_parameters(
          [&](nn::Parameter& factor) { trained_.factors.push_back(factor.data().clone()); });
    }
    return std::move(trained_);
  }

 private:
  Trainer trainer_;
  std::vector<SetId> sets_;
  std::vector<std::string> loss_fns_ = std::vector<std::string>(5, "cross_entropy");
  int calls_ = 0;
  Trained trained_;
};

/// Whether the process is deterministic: sets then have products of their own; and whether the
/// model has experts.
class RecordedTenantPasses : public ::testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
    const auto [deterministic, has_experts] = GetParam();
    device::set_deterministic(deterministic);
    base_.emplace(testing::model_on_gpu(assembly::Purpose::kTenants, {}, has_experts));
  }
  void TearDown() override { device::set_deterministic(false); }

  Trained train(bool records, const std::function<void(Tenants&)>& work) {
    Tenants tenants(*base_, records);
    work(tenants);
    return tenants.end();
  }
  /// Trains with and without graphs; every number is the same. Returns which passes were replayed.
  std::vector<bool> replayed(const std::function<void(Tenants&)>& work) {
    const Trained launched = train(false, work), again = train(false, work),
                  recorded = train(true, work);
    expect_equal(again, launched, "launched again");
    expect_equal(recorded, launched, "recorded");
    EXPECT_EQ(launched.recorded, std::vector<bool>(launched.recorded.size(), false));
    return recorded.recorded;
  }
  static void expect_equal(const Trained& found, const Trained& expected, const char* what) {
    EXPECT_EQ(found.losses, expected.losses) << what;
    EXPECT_EQ(found.norms, expected.norms) << what;
    EXPECT_TRUE(found.logprobs == expected.logprobs) << what;
    ASSERT_EQ(found.factors.size(), expected.factors.size());
    std::size_t different = 0;
    for (std::size_t i = 0; i < found.factors.size(); ++i)
      different += at::equal(found.factors[i], expected.factors[i]) ? 0 : 1;
    EXPECT_EQ(different, 0U) << what << ": of " << found.factors.size() << " factors";
  }

  std::optional<assembly::ModelOnRanks> base_;
};

TEST_P(RecordedTenantPasses, ServeAnyMixtureOfAlikeSetsBitForBit) {
  const std::vector<bool> found = replayed([](Tenants& tenants) {
    for (const std::vector<std::size_t>& which :
         {std::vector<std::size_t>{0, 1, 2}, {0, 1, 2}, {2, 1, 0}, {4, 2, 0}, {1, 4, 2}}) {
      tenants.forward_backward(which);
      tenants.step(which);
    }
  });
  EXPECT_EQ(found, (std::vector<bool>{false, true, true, true, true}));
}

TEST_P(RecordedTenantPasses, LaunchWhatHasAnotherShapeAndRecordItWhenItComesAgain) {
  const std::vector<bool> found = replayed([](Tenants& tenants) {
    const auto round = [&](const std::vector<std::size_t>& which,
                           const std::vector<int>& lengths = kLengths) {
      tenants.forward_backward(which, lengths);
      tenants.step(which);
    };
    round({0, 2}), round({0, 2});
    round({0, 1, 2}), round({0, 1, 2});      // more sets
    round({0, 3}), round({0, 3});            // another rank
    round({0, 2}, {64, 38}), round({4, 2});  // other lengths, then the first shape
    round({1}), round({1}), round({4});      // one set
  });
  EXPECT_EQ(found, (std::vector<bool>{false, true, false, true, false, true, false, true, false,
                                      true, true}));
}

TEST_P(RecordedTenantPasses, TakeSequencesOfOneToken) {
  // A piece of one token has a row more, without a label.
  const std::vector<bool> found = replayed([](Tenants& tenants) {
    for (const std::vector<std::size_t>& which :
         {std::vector<std::size_t>{0, 1, 2}, {0, 1, 2}, {4, 0, 2}, {1}, {1}, {0}}) {
      tenants.forward_backward(which, {1});
      tenants.step(which);
    }
    tenants.forward_backward({0}, {1, 1, 1}), tenants.forward_backward({4}, {1, 1, 1});
    tenants.step({0, 4});
  });
  EXPECT_EQ(found, (std::vector<bool>{false, true, true, false, true, true, false, true}));
}

TEST_P(RecordedTenantPasses, KeepGradientsThatWaitForAStep) {
  const std::vector<bool> found = replayed([](Tenants& tenants) {
    tenants.forward_backward({0, 1, 2});
    tenants.forward_backward({0, 1, 2});  // adds to launched ones
    tenants.forward_backward({4, 1, 2});  // those of 0 wait, those of 1 and 2 grow
    tenants.forward_backward({0, 4, 2});
    tenants.forward_backward({0, 1}, {5});  // launched, adds to replayed ones
    tenants.step({0, 1, 2, 4});
    tenants.forward_backward({0, 1, 2});
    tenants.replace(0);  // with gradients, on which the next pass is not to count
    tenants.forward_backward({0, 4, 2});
    tenants.step({0, 1, 2, 4});
  });
  EXPECT_EQ(found, (std::vector<bool>{false, true, true, true, false, true, true}));
}

TEST_P(RecordedTenantPasses, MixLossesThatNeedTheLogprobsWithOnesThatDoNot) {
  const std::vector<bool> found = replayed([](Tenants& tenants) {
    for (const char* loss_fn : {"cross_entropy", "ppo", "cross_entropy"}) {
      tenants.use_loss(1, loss_fn);
      for (int i = 0; i < 2; ++i) {
        tenants.forward_backward({0, 1, 2});
        tenants.step({0, 1, 2});
      }
    }
  });
  // With adapters of the head a pass whose derivatives are known before is another one than ppo's.
  EXPECT_EQ(found, (std::vector<bool>{false, true, false, true, true, true}));
}

INSTANTIATE_TEST_SUITE_P(Gpu, RecordedTenantPasses,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "deterministic" : "usual") +
                                  (std::get<1>(info.param) ? "Experts" : "");
                         });

}  // namespace
}  // namespace heddle::tenants
