#include "plan/hardware.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "config/yaml_text.h"

namespace heddle::plan {
namespace {

/// Peaks from the vendors' data sheets. The shares are those of an H200, where steps were measured
/// (docs/performance-parallel.md); on the others they are assumed.
std::vector<Hardware> presets() {
  const auto of = [](const char* name, double tflops, double gib, double gbs, double link,
                     double network, double host_memory) {
    Hardware hardware;
    hardware.name = name;
    hardware.peak_tflops = tflops;
    hardware.memory_gib = gib;
    hardware.memory_gbs = gbs;
    hardware.host_link_gbs = link;
    hardware.network_gbs = network;
    hardware.host_memory_gbs = host_memory;
    return hardware;
  };
  return {of("h200", 989, 139, 4800, 450, 50, 50),  of("h100", 989, 79, 3350, 450, 50, 50),
          of("h20", 148, 95, 4000, 450, 50, 50),    of("a100", 312, 79, 2039, 300, 25, 25),
          of("b200", 2250, 178, 8000, 900, 50, 50), of("910b", 376, 61, 1600, 196, 25, 25)};
}

/// Keys of the file and what each may be.
struct Key {
  const char* name;
  double Hardware::*member;
  double high;  ///< Above 0, up to this.
};
constexpr double kAny = 1e12;
const std::vector<Key> kKeys = {
    {"memory_gib", &Hardware::memory_gib, kAny},
    {"peak_tflops", &Hardware::peak_tflops, kAny},
    {"memory_gbs", &Hardware::memory_gbs, kAny},
    {"host_link_gbs", &Hardware::host_link_gbs, kAny},
    {"network_gbs", &Hardware::network_gbs, kAny},
    {"host_memory_gbs", &Hardware::host_memory_gbs, kAny},
    {"host_latency_us", &Hardware::host_latency_us, kAny},
    {"network_latency_us", &Hardware::network_latency_us, kAny},
    {"products", &Hardware::products, 1},
    {"expert_products", &Hardware::expert_products, 1},
    {"eight_bit_products", &Hardware::eight_bit_products, kAny},
    {"eight_bit_experts", &Hardware::eight_bit_experts, kAny},
    {"attention", &Hardware::attention, 1},
    {"attention_half_length", &Hardware::attention_half_length, kAny},
    {"gated_delta_rule", &Hardware::gated_delta_rule, 1},
    {"elementwise", &Hardware::elementwise, 1},
    {"links", &Hardware::links, 1},
    {"launch_us", &Hardware::launch_us, kAny},
    {"wait_us", &Hardware::wait_us, kAny},
    {"step_ms", &Hardware::step_ms, kAny},
};

std::string scalar_of(const YAML::Node& node) {
  return node.IsScalar() ? "'" + node.Scalar() + "'" : "no single value";
}

double number_at(const std::string& where, const std::string& key, const YAML::Node& node,
                 double high) {
  double value = 0;
  if (!YAML::convert<double>::decode(node, value) || !(value > 0 && value <= high)) {
    throw_error<ConfigError>("{}: {}: expected a number above 0{}, found {}", where, key,
                             high == 1 ? " and at most 1 (a share of the peak)" : "",
                             scalar_of(node));
  }
  return value;
}

Hardware preset(const std::string& name, const std::string& where) {
  for (const Hardware& hardware : presets()) {
    if (hardware.name == name) return hardware;
  }
  throw_error<ConfigError>("{}: unknown hardware '{}': expected a file or one of {}", where, name,
                           text::join(hardware_names(), ", "));
}

std::vector<std::string> key_names() {
  std::vector<std::string> names = {"name", "base", "gpus_per_host"};
  for (const Key& key : kKeys) names.emplace_back(key.name);
  return names;
}

void set(Hardware& hardware, const std::string& where, const std::string& key,
         const YAML::Node& value) {
  if (key == "base") return;  // read first
  if (key == "name") {
    hardware.name = value.IsScalar() ? value.Scalar() : "";
    return;
  }
  if (key == "gpus_per_host") {
    hardware.gpus_per_host =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(number_at(where, key, value, kAny)));
    return;
  }
  const auto known =
      std::find_if(kKeys.begin(), kKeys.end(), [&](const Key& k) { return key == k.name; });
  if (known == kKeys.end()) {
    const std::string near = text::nearest(key, key_names());
    throw_error<ConfigError>("{}: unknown key '{}'{}", where, key,
                             near.empty() ? "" : ", did you mean '" + near + "'?");
  }
  hardware.*known->member = number_at(where, key, value, known->high);
}

Hardware read(const std::string& file) {
  YAML::Node root;
  try {
    const std::string text = files::read(file, files::kYamlLimit);
    config::require_yaml_text(text);
    root = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    throw_error<ConfigError>("{}:{}: not valid YAML: {}", file, error.mark.line + 1, error.msg);
  }
  if (!root.IsMap()) throw_error<ConfigError>("{}: expected keys such as peak_tflops: 989", file);
  Hardware hardware;
  hardware.name = std::filesystem::path(file).stem().string();
  if (const YAML::Node base = root["base"]) {
    hardware = preset(base.as<std::string>(""), fmt::format("{}:{}", file, base.Mark().line + 1));
  }
  for (const auto& entry : root) {
    set(hardware, fmt::format("{}:{}", file, entry.first.Mark().line + 1),
        entry.first.as<std::string>(""), entry.second);
  }
  for (const Key& key : kKeys) {
    if (!(hardware.*key.member > 0))
      throw_error<ConfigError>("{}: {} is missing: give it, or a base", file, key.name);
  }
  return hardware;
}

}  // namespace

std::vector<std::string> hardware_names() {
  std::vector<std::string> names;
  for (const Hardware& hardware : presets()) names.push_back(hardware.name);
  return names;
}

Hardware find_hardware(const std::string& name_or_file) {
  const std::vector<std::string> names = hardware_names();
  const bool is_name = std::find(names.begin(), names.end(), name_or_file) != names.end();
  if (!is_name && std::filesystem::exists(name_or_file)) return read(name_or_file);
  return preset(name_or_file, "--hardware");
}

}  // namespace heddle::plan
