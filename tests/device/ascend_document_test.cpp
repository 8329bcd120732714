// docs/ascend.md, scripts/versions.sh and the container file name the versions and chips of the
// code.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/files.h"
#include "base/text.h"
#include "device/npu_chip.h"
#include "testing/paths.h"

namespace heddle::device {
namespace {

using ::testing::HasSubstr;

std::string document() { return files::read(testing::source_path("docs/ascend.md")); }

/// The rows below the header of the table that begins with these columns.
std::set<std::string> table_rows(const std::string& header) {
  std::set<std::string> rows;
  bool is_inside = false;
  for (const std::string& line : text::split(document(), '\n')) {
    if (line == header) {
      is_inside = true;
    } else if (is_inside && !line.starts_with("|")) {
      break;
    } else if (is_inside && !line.starts_with("|---")) {
      rows.insert(line);
    }
  }
  return rows;
}

TEST(AscendDocument, VersionsAreThoseOfTheCode) {
  const NpuVersions versions;
  const std::set<std::string> expected = {fmt::format("| torch | {} |", versions.torch),
                                          fmt::format("| torch_npu | {} |", versions.torch_npu),
                                          fmt::format("| CANN | {} |", versions.cann)};
  EXPECT_EQ(table_rows("| part | version |"), expected);
}

TEST(AscendDocument, ChipsAreThoseOfTheCode) {
  std::set<std::string> expected;
  for (const NpuChip& chip : npu_chips()) {
    expected.insert(fmt::format("| {} | {} | {} | {} |", chip.family, chip.soc_prefix,
                                chip.has_fp8 ? "yes" : "no", chip.has_native_gdn ? "yes" : "no"));
  }
  EXPECT_EQ(table_rows("| family | SoC name begins | fp8 | native gated delta rule |"), expected);
}

TEST(AscendDocument, ScriptsAndContainerTakeTheSameVersions) {
  const NpuVersions versions;
  const std::string scripts = files::read(testing::source_path("scripts/versions.sh"));
  EXPECT_THAT(scripts, HasSubstr(fmt::format("\nTORCH_VERSION={}\n", versions.torch)));
  EXPECT_THAT(scripts, HasSubstr(fmt::format("\nTORCH_NPU_VERSION={}\n", versions.torch_npu)));
  EXPECT_THAT(scripts, HasSubstr(fmt::format("\nCANN_VERSION={}\n", versions.cann)));
  const std::string container = files::read(testing::source_path("containers/ascend.Dockerfile"));
  EXPECT_THAT(container, HasSubstr(fmt::format("ARG TORCH_VERSION={}\n", versions.torch)));
  EXPECT_THAT(container, HasSubstr(fmt::format("CANN {}", versions.cann)));
}

}  // namespace
}  // namespace heddle::device
