#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Facts about Ascend chips and the versions that Heddle is built for; no header of the vendor.
/// docs/ascend.md shows the same tables, which a test compares.
namespace heddle::device {

/// The versions Heddle is made for, in the vendor's spelling.
struct NpuVersions {
  std::string_view torch = "2.11.0";
  std::string_view torch_npu = "2.11.0.post3";
  std::string_view cann = "9.1.0";
};

/// Unified buffer of a vector core of A2 and A3, for which every chip is planned.
inline constexpr std::int64_t kUnifiedBufferBytes = 192 * 1024;

struct NpuChip {
  std::string_view family;      ///< "A2"
  std::string_view soc_prefix;  ///< How aclrtGetSocName() begins: "Ascend910B".
  bool has_fp8;
  bool has_native_gdn;  ///< aclnnChunkGatedDeltaRule and aclnnRecurrentGatedDeltaRule.
};

/// A2, A3, 950.
const std::vector<NpuChip>& npu_chips();
/// The chip of a SoC name such as "Ascend910B3"; nothing for one that Heddle does not know.
std::optional<NpuChip> npu_chip(std::string_view soc);

/// "9.1.0", "8.5.RC1" as numbers; nothing if it is no version.
std::optional<std::vector<int>> parse_cann_version(std::string_view text);

/// Mismatches of versions, one sentence each, with both versions; empty if all fits.
std::vector<std::string> npu_mismatches(std::string_view soc, std::string_view cann,
                                        std::string_view torch);

}  // namespace heddle::device
