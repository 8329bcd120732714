// Data that waits in the memory of the host changes no number: on the simulated NPU, and there also
// with streams that are late, where a copy that nobody waits for gives NaN.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

#include "ops/optimizer_step/optimizer_step.h"
#include "ops/registry.h"
#include "testing/process.h"
#include "train/state_offload.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

class Offload : public TrainerTest {
 protected:
  /// `heddle sft` in a process of its own, on a simulated NPU with these options.
  void sft(const std::string& run, const std::string& npu, std::vector<std::string> more) const {
    std::string command = "HEDDLE_SIM_NPU=" + npu + " " + testing::heddle_program() + " sft";
    more.insert(more.end(), {"device.name=npu:0", "train.max_steps=4"});
    for (const std::string& argument : arguments(run, more)) command += " '" + argument + "'";
    command += " > '" + (dir_ / (run + ".log")).string() + "' 2>&1";
    const int status = std::system(command.c_str());
    ASSERT_EQ(WEXITSTATUS(status), 0) << files::read(dir_ / (run + ".log"));
  }
};

TEST_F(Offload, ChangesNoBit) {
  for (const std::string recompute : {"full", "selective"}) {
    std::vector<std::string> options = {"model.dtype=bfloat16", "train.recompute=" + recompute};
    sft("plain-" + recompute, "float64", options);
    options.insert(options.end(), {"optim.offload=true", "train.offload_activations=true"});
    sft("offloaded-" + recompute, "float64", options);
    EXPECT_EQ(weights("plain-" + recompute), weights("offloaded-" + recompute)) << recompute;
    if (recompute != "full") continue;
    sft("late", "deferred", options);
    EXPECT_EQ(weights("plain-full"), weights("late"));
  }
}

TEST_F(Offload, ARunContinuesFromItsCheckpointAndWithoutOffloading) {
  const std::vector<std::string> offload = {"optim.offload=true", "device.name=npu:0"};
  sft("whole", "float64", offload);
  ASSERT_EQ(setenv("HEDDLE_SIM_NPU", "float64", 1), 0);
  std::vector<std::string> in_process = offload;
  in_process.push_back("train.max_steps=4");
  testing::simulated_npu();
  train_until(config("cut", in_process), 2);
  sft("cut", "float64", offload);
  EXPECT_EQ(weights("whole"), weights("cut"));
  train_until(config("other", in_process), 2);
  sft("other", "float64", {});
  EXPECT_EQ(weights("whole"), weights("other"));
}

TEST_F(Offload, OfWhatIsNotRecomputedIsRefused) {
  try {
    config("run", {"train.offload_activations=true"});
    FAIL() << "expected an error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("train.offload_activations"));
    EXPECT_THAT(error.what(), HasSubstr("set train.recompute to full or selective"));
  }
}

/// States of a tensor that is cut into pieces, the last one short.
TEST(StateOffload, PiecesEqualTheWholeAlsoWhereBitsAreRandom) {
  const c10::Device npu = testing::simulated_npu();
  ops::KernelPolicy policy;
  policy.allow_fallback = true;
  const auto kernels =
      ops::KernelTable::choose(ops::builtin_registry(), ops::target_of(npu), at::kBFloat16,
                               {ops::OpRequest::of<ops::AdamwStep>()}, policy);
  for (const at::ScalarType state : {at::kFloat, at::kBFloat16, at::kByte}) {
    const bool is_coded = state == at::kByte;
    const std::int64_t columns = is_coded ? 512 : 311, piece = is_coded ? 768 : 500;
    const auto tensor = [&](at::ScalarType dtype) {
      return at::randn({7, columns}).mul(is_coded ? 40 : 1).to(dtype).to(npu);
    };
    const bool has_master = state == at::kFloat;
    ops::AdamwTensor whole{tensor(at::kBFloat16),
                           tensor(at::kFloat),
                           tensor(state),
                           tensor(state).abs(),
                           {},
                           0.1,
                           12345};
    if (has_master) whole.master = whole.parameter.to(at::kFloat);
    if (is_coded) {
      whole.exp_avg_scale = at::rand({7, 2}).to(npu);
      whole.exp_avg_sq_scale = at::rand({7, 2}).to(npu);
    }
    ops::AdamwTensor away = whole;
    away.parameter = whole.parameter.clone();
    for (const auto member :
         {&ops::AdamwTensor::exp_avg, &ops::AdamwTensor::exp_avg_sq, &ops::AdamwTensor::master,
          &ops::AdamwTensor::exp_avg_scale, &ops::AdamwTensor::exp_avg_sq_scale}) {
      if ((whole.*member).defined())
        away.*member = device::host_like(whole.*member).copy_(whole.*member);
    }
    ops::AdamwOptions options;
    options.lr = 1e-2;
    ops::adamw_step(kernels, {whole}, options);
    int pieces = 0;
    train::StateOffload(npu, piece).step({away}, [&](const std::vector<ops::AdamwTensor>& piece) {
      ++pieces;
      ops::adamw_step(kernels, piece, options);
    });
    device::synchronize(npu);
    EXPECT_EQ(pieces, 5);
    EXPECT_TRUE(at::equal(whole.parameter.cpu(), away.parameter.cpu()));
    EXPECT_TRUE(at::equal(whole.exp_avg.cpu(), away.exp_avg));
    EXPECT_TRUE(at::equal(whole.exp_avg_sq.cpu(), away.exp_avg_sq));
    if (has_master) {
      EXPECT_TRUE(at::equal(whole.master.cpu(), away.master));
    }
    if (is_coded) {
      EXPECT_TRUE(at::equal(whole.exp_avg_scale.cpu(), away.exp_avg_scale));
      EXPECT_TRUE(at::equal(whole.exp_avg_sq_scale.cpu(), away.exp_avg_sq_scale));
    }
  }
}

}  // namespace
}  // namespace heddle
