// Facts about the NPU kernels that need no device: which are offered where, which kernel of the
// gated delta rule runs, and what happens where the operators are missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "ops/attention/attention.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe/moe.h"
#include "ops/npu/call.h"
#include "ops/operator_support.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/registry.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"
#include "ops/swiglu/swiglu.h"
#include "testing/paths.h"

namespace heddle::ops {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// The kernel of the gated delta rule on a chip, and the table's warnings.
struct Chosen {
  std::string kernel;
  std::vector<std::string> warnings;
};
Chosen rule_on(const char* chip, Use use = Use::kGeneration,
               const GatedDeltaRule::Dims& dims = {16, 32, 128, 128},
               c10::ScalarType dtype = c10::ScalarType::BFloat16) {
  const KernelTable table = KernelTable::choose(builtin_registry(), {Platform::kAscend, chip},
                                                dtype, {OpRequest::of<GatedDeltaRule>(dims, use)});
  return {table.choices().at(0).kernel, table.warnings()};
}

TEST(NpuGatedDeltaRule, TheNativeOperatorGeneratesWhereItsLimitsHold) {
  EXPECT_EQ(rule_on("Ascend910B3").kernel, "npu.native");
  EXPECT_EQ(rule_on("Ascend910_9392").kernel, "npu.native");
}

TEST(NpuGatedDeltaRule, ElsewhereOurChunksRunAndTheReasonIsSaid) {
  const Chosen training = rule_on("Ascend910B3", Use::kTraining);
  EXPECT_EQ(training.kernel, "npu.chunk64");
  EXPECT_THAT(training.warnings, ::testing::IsEmpty());
  for (const auto& [chosen, reason] : {
           std::pair{rule_on("Ascend910B3", Use::kGeneration, {16, 32, 128, 128}, at::kFloat),
                     "does not take Float"},
           std::pair{rule_on("Ascend950"), "A2 and A3 only"},
           std::pair{rule_on("Ascend310P3"), "A2 and A3 only"},
           std::pair{rule_on("Ascend910B3", Use::kGeneration, {16, 32, 64, 128}), "heads of 128"},
           std::pair{rule_on("Ascend910B3", Use::kGeneration, {16, 80, 128, 128}), "64 of them"},
       }) {
    EXPECT_EQ(chosen.kernel, "npu.chunk64") << reason;
    EXPECT_THAT(chosen.warnings, ::testing::ElementsAre(HasSubstr(reason)));
  }
}

TEST(NpuKernels, TheDocumentNamesEachOne) {
  const std::string text = files::read(heddle::testing::source_path("docs/ascend.md"));
  for (const auto& entry : builtin_registry().entries()) {
    if (entry.info.name.starts_with("npu.")) {
      EXPECT_THAT(text, HasSubstr(entry.info.name));
    }
  }
}

/// The operators for which a model of experts asks, at a published size.
std::vector<OpRequest> requests(std::int64_t experts) {
  return {OpRequest::of<RmsNorm>({.dim = 2048}),
          OpRequest::of<QkNormRope>({.head_dim = 256, .rotary_dim = 64}),
          OpRequest::of<Attention>({.num_heads = 16, .num_kv_heads = 2, .head_dim = 256}),
          OpRequest::of<GatedDeltaRule>({16, 32, 128, 128}),
          OpRequest::of<CausalConv1d>({.channels = 8192, .width = 4}),
          OpRequest::of<Swiglu>({.dim = 512}),
          OpRequest::of<MoeExperts>({experts, 8, 2048, 512}),
          OpRequest::of<LinearCrossEntropy>({.hidden_size = 2048, .vocab_size = 248320}),
          OpRequest::of<AdamwStep>()};
}

TEST(NpuKernels, EveryOperatorOfABf16ModelHasOne) {
  const auto table = KernelTable::choose(builtin_registry(), {Platform::kAscend, "", 196608},
                                         c10::ScalarType::BFloat16, requests(128));
  for (const auto& choice : table.choices()) {
    EXPECT_TRUE(choice.kernel.starts_with("npu.")) << choice.op << " is " << choice.kernel;
    EXPECT_FALSE(choice.is_reference) << choice.op;
  }
}

TEST(NpuKernels, MoreThan128ExpertsOnARankAreRefusedByName) {
  EXPECT_THAT(
      [] {
        KernelTable::choose(builtin_registry(), {Platform::kAscend}, c10::ScalarType::BFloat16,
                            requests(256));
      },
      ThrowsMessage<DeviceError>(
          AllOf(HasSubstr("256 experts"), HasSubstr("128"), HasSubstr("parallel.ep"))));
}

TEST(NpuKernels, NoneIsOfferedToOtherDevices) {
  for (const auto& entry : builtin_registry().entries()) {
    if (!entry.info.name.starts_with("npu.")) continue;
    EXPECT_THAT(entry.info.platforms, ::testing::ElementsAre(Platform::kAscend, Platform::kSim))
        << entry.info.name;
  }
}

TEST(NpuCall, AMissingOperatorIsNamed) {
  EXPECT_THAT([] { npu::call("npu_no_such_operator", {}); },
              ThrowsMessage<DeviceError>(
                  AllOf(HasSubstr("npu::npu_no_such_operator"), HasSubstr("libtorch_npu"))));
}

}  // namespace
}  // namespace heddle::ops
