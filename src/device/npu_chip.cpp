#include "device/npu_chip.h"

#include <charconv>

#include <fmt/format.h>

namespace heddle::device {

const std::vector<NpuChip>& npu_chips() {
  // Operators as CANN's tables of supported products have them.
  static const std::vector<NpuChip> kChips = {
      {.family = "A3", .soc_prefix = "Ascend910_93", .has_fp8 = false, .has_native_gdn = true},
      {.family = "A2", .soc_prefix = "Ascend910B", .has_fp8 = false, .has_native_gdn = true},
      {.family = "950", .soc_prefix = "Ascend950", .has_fp8 = true, .has_native_gdn = false},
  };
  return kChips;
}

std::optional<NpuChip> npu_chip(std::string_view soc) {
  for (const NpuChip& chip : npu_chips()) {
    if (!soc.starts_with(chip.soc_prefix)) continue;
    // "Ascend910B" alone is an older chip, without bf16.
    if (chip.family == "A2" && soc == chip.soc_prefix) return std::nullopt;
    return chip;
  }
  return std::nullopt;
}

std::optional<std::vector<int>> parse_cann_version(std::string_view text) {
  std::vector<int> numbers;
  while (!text.empty()) {
    const std::size_t dot = text.find('.');
    std::string_view part = text.substr(0, dot);
    text = dot == std::string_view::npos ? "" : text.substr(dot + 1);
    // Pre-releases ("RC1", "alpha002") come before the release: the digits after count.
    const std::size_t digit = part.find_first_of("0123456789");
    if (digit == std::string_view::npos || (digit > 0 && numbers.size() < 2)) return std::nullopt;
    part = part.substr(digit);
    int number = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    if (error != std::errc()) return std::nullopt;
    numbers.push_back(number);
  }
  if (numbers.size() < 2) return std::nullopt;
  return numbers;
}

std::vector<std::string> npu_mismatches(std::string_view soc, std::string_view cann,
                                        std::string_view torch) {
  const NpuVersions wanted;
  std::vector<std::string> found;
  if (!npu_chip(soc)) {
    found.push_back(fmt::format(
        "chip {} is not one that Heddle knows (A2: Ascend910B1-4, A3: Ascend910_93xx, Ascend950)",
        soc));
  }
  const auto have = parse_cann_version(cann), need = parse_cann_version(wanted.cann);
  if (!have) {
    found.push_back(fmt::format("CANN reports version '{}', expected {}", cann, wanted.cann));
  } else if (*have < *need || have->at(0) != need->at(0)) {
    found.push_back(fmt::format("CANN is {}, torch_npu {} wants {} or a later {}.x", cann,
                                wanted.torch_npu, wanted.cann, need->at(0)));
  }
  if (torch != wanted.torch) {
    found.push_back(fmt::format("libtorch is {}, torch_npu {} was made for {}", torch,
                                wanted.torch_npu, wanted.torch));
  }
  return found;
}

}  // namespace heddle::device
