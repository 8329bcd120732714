#include "device/npu_chip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/npu_error.h"

namespace heddle::device {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Optional;

std::string family(std::string_view soc) {
  const auto chip = npu_chip(soc);
  return chip ? std::string(chip->family) : "";
}

TEST(NpuChip, IsKnownByItsSocName) {
  EXPECT_EQ(family("Ascend910B1"), "A2");
  EXPECT_EQ(family("Ascend910B4-1"), "A2");
  EXPECT_EQ(family("Ascend910_9392"), "A3");
  EXPECT_EQ(family("Ascend950DT"), "950");
  for (const char* soc : {"Ascend910B", "Ascend910ProB", "Ascend310P3", "", "A2"})
    EXPECT_EQ(family(soc), "") << soc;
}

TEST(NpuChip, VersionsOfCannAreCompared) {
  EXPECT_THAT(parse_cann_version("9.1.0"), Optional(ElementsAre(9, 1, 0)));
  EXPECT_THAT(parse_cann_version("8.5.RC1"), Optional(ElementsAre(8, 5, 1)));
  for (const char* text : {"", "9", "nine.one", "RC1.2"})
    EXPECT_FALSE(parse_cann_version(text)) << text;
}

TEST(NpuChip, WhatDoesNotFitIsSaidWithBothVersions) {
  EXPECT_THAT(npu_mismatches("Ascend910B3", "9.1.0", "2.11.0"), IsEmpty());
  EXPECT_THAT(npu_mismatches("Ascend910B3", "9.2.0", "2.11.0"), IsEmpty());
  EXPECT_THAT(npu_mismatches("Ascend910B3", "8.5.0", "2.11.0"),
              ElementsAre(AllOf(HasSubstr("8.5.0"), HasSubstr("9.1.0"))));
  EXPECT_THAT(npu_mismatches("Ascend910B3", "10.0.0", "2.11.0"), ElementsAre(HasSubstr("10.0.0")));
  EXPECT_THAT(
      npu_mismatches("Ascend310P3", "9.1.0", "2.10.0"),
      ElementsAre(HasSubstr("Ascend310P3"), AllOf(HasSubstr("2.10.0"), HasSubstr("2.11.0"))));
}

TEST(NpuError, NamesTheOperationAndWhatItsCodeMeans) {
  EXPECT_THAT(explain_npu_error("operator():build/x.cpp:12 NPU function error: call "
                                "aclnnFlashAttentionScore failed, error code is 507035"),
              Optional(AllOf(HasSubstr("aclnnFlashAttentionScore"), HasSubstr("507035"),
                             HasSubstr("vector core"))));
  EXPECT_THAT(explain_npu_error("allreduce:x.cpp:9 HCCL function error: HcclAllReduce(p, q), error "
                                "code is 9 [ERROR] 2026 ERR02200 DIST call hccl api failed."),
              Optional(AllOf(HasSubstr("HcclAllReduce"), HasSubstr("error 9"),
                             HasSubstr("did not answer"))));
  EXPECT_THAT(explain_npu_error("NPU function error: aclrtSynchronizeDevice, error code is 123456"),
              Optional(AllOf(HasSubstr("aclrtSynchronizeDevice"), HasSubstr("123456"))));
  EXPECT_THAT(explain_npu_error("call aclnnAdd failed, detail: EZ1001"),
              Optional(AllOf(HasSubstr("aclnnAdd"), Not(HasSubstr("error 0")))));
  EXPECT_FALSE(explain_npu_error("mat1 and mat2 shapes cannot be multiplied"));
}

}  // namespace
}  // namespace heddle::device
