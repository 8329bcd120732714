// Waits of a training step on the simulated NPU. A wait costs the host the lead that it
// has over the device: each is written down here, another one is an accident.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/sim/simulation.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using device::sim::Counts;

/// The waits between the ends of two steps.
class WatchWaits : public train::Observer {
 public:
  void on_step(const train::StepInfo&) override {
    of_step.push_back(device::sim::waits_since(before_));
    before_ = device::sim::waits();
  }
  std::vector<Counts> of_step;

 private:
  Counts before_;
};

class NpuSteps : public TrainerTest {
 protected:
  std::vector<Counts> waits_of(const std::string& run, std::vector<std::string> more) const {
    more.insert(more.end(), {"device.name=" + testing::simulated_npu().str(), "ckpt.every=0",
                             "train.max_steps=4"});
    std::atomic<bool> stop = false;
    WatchWaits watch;
    train::Trainer trainer(config(run, more), watch, stop);
    trainer.run();
    // The first step also builds what is kept.
    return {watch.of_step.begin() + 1, watch.of_step.end()};
  }
};

TEST_F(NpuSteps, WaitOnlyWhereTheyMust) {
  using ::testing::Each;
  using ::testing::Eq;
  // Loss and entropy; the norm of the gradients, by which they are clipped; the end, for the time
  // it took.
  const Counts expected = {{"aten::_copy_from", 2}, {"synchronize", 1}};
  EXPECT_THAT(waits_of("full", {"model.dtype=bfloat16"}), Each(Eq(expected)));
  EXPECT_THAT(waits_of("lora", {"train.method=lora", "adapter.rank=4", "model.dtype=bfloat16"}),
              Each(Eq(expected)));
}

TEST_F(NpuSteps, OfPairsWaitForNoLoss) {
  std::ofstream rows(dir_ / "pairs.jsonl");
  for (int i = 0; i < 32; ++i) {
    rows << nlohmann::json{{"prompt", "Is " + std::to_string(i)},
                           {"chosen", " yes please"},
                           {"rejected", " no " + std::to_string(i)}}
         << "\n";
  }
  rows.close();
  using ::testing::Each;
  using ::testing::Eq;
  // As those of a language model, however many micro-batches a step has.
  const Counts expected = {{"aten::_copy_from", 2}, {"synchronize", 1}};
  const std::vector<std::string> pairs = {"data.train=" + (dir_ / "pairs.jsonl").string(),
                                          "model.dtype=bfloat16", "train.global_batch_size=8",
                                          "train.micro_batch_tokens=64"};
  std::vector<std::string> dpo = pairs, reward = pairs;
  dpo.push_back("train.objective=dpo");
  EXPECT_THAT(waits_of("dpo", dpo), Each(Eq(expected)));
  dpo.push_back("dpo.loss=orpo");
  EXPECT_THAT(waits_of("orpo", dpo), Each(Eq(expected)));
  for (const char* setting :
       {"train.objective=reward", "model.head=classify", "model.num_labels=1"})
    reward.push_back(setting);
  EXPECT_THAT(waits_of("reward", reward), Each(Eq(expected)));
}

TEST_F(NpuSteps, OfExpertsReadTheirLoadOnceMore) {
  make_model("moe", {{"model_type", "qwen3_5_moe_text"},
                     {"num_experts", 6},
                     {"num_experts_per_tok", 2},
                     {"moe_intermediate_size", 24},
                     {"shared_expert_intermediate_size", 16}});
  using ::testing::Each;
  using ::testing::Eq;
  const Counts expected = {
      {"aten::_local_scalar_dense", 1}, {"aten::_copy_from", 3}, {"synchronize", 1}};
  EXPECT_THAT(waits_of("run", {"model.path=" + (dir_ / "moe").string(), "model.dtype=bfloat16",
                               "train.router_aux_loss_coef=0.01"}),
              Each(Eq(expected)));
}

}  // namespace
}  // namespace heddle
