// What of the NPU kernels can be said without a device: which are offered where, which path of the
// gated delta rule runs, and what happens where the operators are missing.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/errors.h"
#include "base/files.h"
#include "ops/gated_delta_net/npu/path.h"
#include "ops/npu/call.h"
#include "ops/operator_support.h"
#include "ops/registry.h"
#include "testing/paths.h"

namespace heddle::ops {
namespace {

using gated_delta_rule_npu::choose_path;
using gated_delta_rule_npu::Environment;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

Environment generation() {
  return {.soc = "Ascend910B3",
          .is_training = false,
          .dtype = c10::ScalarType::BFloat16,
          .num_k_heads = 16,
          .num_v_heads = 32,
          .head_k_dim = 128,
          .head_v_dim = 128};
}

TEST(NpuGdnPath, TheNativeOperatorGeneratesWhereItsLimitsHold) {
  EXPECT_EQ(choose_path(generation()).kernel, "npu.native");
  Environment e = generation();
  e.soc = "Ascend910_9392";
  EXPECT_EQ(choose_path(e).kernel, "npu.native");
}

TEST(NpuGdnPath, ElsewhereOurChunksRunAndTheReasonIsSaid) {
  const auto changed = [](const auto& change) {
    Environment e = generation();
    change(e);
    return choose_path(e);
  };
  for (const auto& [path, reason] : {
           std::pair{changed([](Environment& e) { e.is_training = true; }), "no backward"},
           std::pair{changed([](Environment& e) { e.dtype = c10::ScalarType::Float; }),
                     "bf16 only"},
           std::pair{changed([](Environment& e) { e.soc = "Ascend950"; }), "A2 and A3 only"},
           std::pair{changed([](Environment& e) { e.soc = "Ascend310P3"; }), "A2 and A3 only"},
           std::pair{changed([](Environment& e) { e.head_k_dim = 64; }), "heads of 128"},
           std::pair{changed([](Environment& e) { e.num_v_heads = 80; }), "64 of them"},
       }) {
    EXPECT_EQ(path.kernel, "npu.chunk64") << reason;
    EXPECT_THAT(path.reason, HasSubstr(reason));
  }
}

TEST(NpuGdnPath, Float64IsRefused) {
  Environment e = generation();
  e.dtype = c10::ScalarType::Double;
  EXPECT_EQ(choose_path(e).kernel, "");
  EXPECT_THAT(choose_path(e).reason, HasSubstr("no float64"));
}

TEST(NpuGdnPath, TheDocumentShowsTheTable) {
  const std::string text = files::read(heddle::testing::source_path("docs/ascend.md"));
  std::string table = "| when | kernel | why |\n|---|---|---|\n";
  for (const auto& row : gated_delta_rule_npu::path_rows()) {
    table += fmt::format("| {} | {} | {} |\n", row.condition,
                         row.kernel.empty() ? "refused" : row.kernel, row.reason);
  }
  EXPECT_THAT(text, HasSubstr(table));
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
  return {{"rms_norm", {{{"dim", 2048}}}},
          {"qk_norm_rope", {{{"head_dim", 256}, {"rotary_dim", 64}}}},
          {"attention", {{{"num_heads", 16}, {"num_kv_heads", 2}, {"head_dim", 256}}}},
          {"gated_delta_rule",
           {{{"num_k_heads", 16}, {"num_v_heads", 32}, {"head_k_dim", 128}, {"head_v_dim", 128}}}},
          {"causal_conv1d", {{{"channels", 8192}, {"width", 4}}}},
          {"swiglu", {{{"dim", 512}}}},
          {"moe_experts",
           {{{"num_experts", experts},
             {"top_k", 8},
             {"hidden_size", 2048},
             {"intermediate_size", 512}}}},
          {"linear_cross_entropy", {{{"hidden_size", 2048}, {"vocab_size", 248320}}}},
          {"adamw", {{}}}};
}

TEST(NpuKernels, EveryOperatorOfABf16ModelHasOne) {
  KernelPolicy policy;
  policy.on_chip_limit_bytes = 196608;
  const auto table = KernelTable::choose(builtin_registry(), kNpu, c10::ScalarType::BFloat16,
                                         requests(128), policy);
  for (const auto& choice : table.choices()) {
    EXPECT_TRUE(choice.kernel.starts_with("npu.")) << choice.op << " is " << choice.kernel;
    EXPECT_FALSE(choice.is_reference) << choice.op;
  }
}

TEST(NpuKernels, MoreThan128ExpertsOnARankAreRefusedByName) {
  EXPECT_THAT(
      [] {
        KernelTable::choose(builtin_registry(), kNpu, c10::ScalarType::BFloat16, requests(256));
      },
      ThrowsMessage<DeviceError>(
          AllOf(HasSubstr("256 experts"), HasSubstr("128"), HasSubstr("parallel.ep"))));
}

TEST(NpuKernels, NoneIsOfferedToOtherDevices) {
  for (const auto& entry : builtin_registry().entries()) {
    if (!entry.info.name.starts_with("npu.")) continue;
    ASSERT_TRUE(entry.info.device.has_value()) << entry.info.name;
    EXPECT_EQ(*entry.info.device, kNpu) << entry.info.name;
  }
}

TEST(NpuCall, AMissingOperatorIsNamed) {
  EXPECT_THAT([] { npu::call("npu_no_such_operator", {}); },
              ThrowsMessage<DeviceError>(
                  AllOf(HasSubstr("npu::npu_no_such_operator"), HasSubstr("libtorch_npu"))));
}

}  // namespace
}  // namespace heddle::ops
