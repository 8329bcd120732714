#include "config/codec.h"

#include <utility>

#include "base/errors.h"

namespace heddle::config {
namespace {

constexpr std::array<std::pair<std::string_view, double>, 9> kUnits{{{"B", 1.},
                                                                     {"kB", 1e3},
                                                                     {"KB", 1e3},
                                                                     {"MB", 1e6},
                                                                     {"GB", 1e9},
                                                                     {"TB", 1e12},
                                                                     {"KiB", 1024.},
                                                                     {"MiB", 1024. * 1024},
                                                                     {"GiB", 1024. * 1024 * 1024}}};

}  // namespace

std::string hint_for_foreign_value(std::string_view value) {
  constexpr std::string_view kInt8 = "write optim.name=adamw and optim.state_dtype=int8";
  constexpr std::array<std::pair<std::string_view, std::string_view>, 13> kHints{{
      {"bf16", "write bfloat16"},
      {"fp32", "write float32"},
      {"tf32", "write float32"},
      {"fp64", "write float64"},
      {"fp16", "half precision needs loss scaling, which is not built: write bfloat16"},
      {"float16", "half precision needs loss scaling, which is not built: write bfloat16"},
      {"adamw_8bit", kInt8},
      {"adamw_bnb_8bit", kInt8},
      {"paged_adamw_8bit", kInt8},
      {"adamw_torch", "write adamw"},
      {"adamw_torch_fused", "write adamw"},
      {"qlora", "quantised base weights are not built: write lora"},
      {"full_finetune", "write full"},
  }};
  for (const auto& [foreign, hint] : kHints) {
    if (foreign == value) return std::string(hint);
  }
  return "";
}

std::string to_string(const DeviceName& device) {
  if (device.type == DeviceType::kCpu) return "cpu";
  return fmt::format("{}:{}", to_string(device.type), device.index);
}

bool Codec<DeviceName>::parse(std::string_view text, DeviceName& device) {
  const std::size_t colon = text.find(':');
  const std::string_view type = text.substr(0, colon);
  for (std::size_t i = 0; i < kNames<DeviceType>.size(); ++i) {
    if (kNames<DeviceType>[i] != type) continue;
    device.type = static_cast<DeviceType>(i);
    device.index = 0;
    if (colon == std::string_view::npos) return true;
    const std::string_view index = text.substr(colon + 1);
    const auto [end, error] =
        std::from_chars(index.data(), index.data() + index.size(), device.index);
    return error == std::errc() && end == index.data() + index.size() && device.index >= 0 &&
           device.type != DeviceType::kCpu;
  }
  return false;
}

DeviceName parse_device(std::string_view text) {
  DeviceName device;
  if (!Codec<DeviceName>::parse(text, device)) {
    throw_error<ConfigError>("device: expected cpu|cuda[:N]|npu[:N], found '{}'", text);
  }
  return device;
}

Bytes Codec<Bytes>::read(const YAML::Node& node, const Range& range) {
  double number = 0;
  if (node.IsScalar()) {
    const std::string& text = node.Scalar();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && number > 0) {
      const std::string_view unit = text::trim({end, text.data() + text.size()});
      for (const auto& [name, factor] : kUnits) {
        const double bytes = number * factor;
        if ((unit == name || unit.empty()) && bytes >= 1 && bytes < 9e18) {
          return {static_cast<std::int64_t>(bytes)};
        }
      }
    }
  }
  mismatch("a number of " + type(range), node);
}

Json Codec<Bytes>::write(Bytes value) {
  constexpr std::array<std::pair<const char*, std::int64_t>, 3> kRound{
      {{"GB", 1'000'000'000}, {"GiB", std::int64_t{1} << 30}, {"MiB", std::int64_t{1} << 20}}};
  for (const auto& [unit, factor] : kRound) {
    if (value.count % factor == 0) return fmt::format("{}{}", value.count / factor, unit);
  }
  return value.count;
}

Scalar Codec<Scalar>::read(const YAML::Node& node, const Range& range) {
  if (!node.IsScalar()) mismatch(type(range), node);
  if (node.Tag() == "!") return node.Scalar();  // quoted: the user means text
  if (node.Scalar() == "true" || node.Scalar() == "false") return node.Scalar() == "true";
  std::int64_t integer = 0;
  if (parse_number(node, integer)) return integer;
  double number = 0;
  if (parse_number(node, number) && std::isfinite(number)) return number;
  return node.Scalar();
}

Json Codec<Scalar>::write(const Scalar& value) {
  return std::visit([](const auto& x) -> Json { return x; }, value);
}

}  // namespace heddle::config
