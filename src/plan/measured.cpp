#include "plan/measured.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>

#include "base/errors.h"
#include "base/files.h"
#include "config/config.h"
#include "config/yaml_text.h"
#include "models/registry.h"
#include "plan/layout_report.h"

namespace heddle::plan {
namespace {

/// One run of the file; `where` is its place in messages.
class Row {
 public:
  Row(const YAML::Node& node, const std::string& file)
      : node_(node), where_(fmt::format("{}:{}", file, node.Mark().line + 1)) {
    if (!node.IsMap()) throw_error<ConfigError>("{}: expected a run, as {{name: ...}}", where_);
    const std::vector<std::string> known = {"name",     "preset",        "batch",
                                            "length",   "micro_batches", "ranks",
                                            "settings", "step_ms",       "peak_gib"};
    for (const auto& entry : node) {
      const auto key = entry.first.as<std::string>("");
      if (std::find(known.begin(), known.end(), key) == known.end())
        throw_error<ConfigError>("{}: unknown key '{}'", where_, key);
    }
  }

  template <class T>
  T get(const char* key) const {
    T value{};
    const YAML::Node node = node_[key];
    if (!node || !YAML::convert<T>::decode(node, value))
      throw_error<ConfigError>("{}: {} is missing or no value of its kind", where_, key);
    return value;
  }
  template <class T>
  T get(const char* key, T otherwise) const {
    return node_[key] ? get<T>(key) : otherwise;
  }

  Comparison compare(const Hardware& hardware) const {
    const auto batch = get<std::int64_t>("batch"), length = get<std::int64_t>("length");
    const auto ranks = get<std::int64_t>("ranks", 1);
    auto settings = get<std::vector<std::string>>("settings", {});
    settings.insert(settings.begin(), "model.dtype=bfloat16");
    settings.push_back(fmt::format("data.max_length={}", length));
    settings.push_back(fmt::format("train.micro_batch_tokens={}", batch * length));
    config::RunConfig config = config::parse("", where_, settings, config::Completeness::kPartial);
    const std::int64_t data_ranks =
        ranks / (config.parallel.tp * config.parallel.cp * config.parallel.pp);
    config.train.global_batch_size = batch * get<std::int64_t>("micro_batches", 1) * data_ranks;
    const LayoutReport report =
        plan_layout(config, models::preset(get<std::string>("preset")), ranks, hardware);
    return {get<std::string>("name"), get<double>("step_ms") * 1e-3, report.time->total,
            get<double>("peak_gib", 0) * (1u << 30), report.peak_bytes()};
  }

 private:
  YAML::Node node_;
  std::string where_;
};

}  // namespace

std::vector<Comparison> compare_with_measured(const std::string& file,
                                              const std::string& hardware) {
  YAML::Node root;
  try {
    const std::string text = files::read(file, files::kYamlLimit);
    config::require_yaml_text(text);
    root = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    throw_error<ConfigError>("{}:{}: not valid YAML: {}", file, error.mark.line + 1, error.msg);
  }
  if (!root.IsMap() || !root["runs"] || !root["runs"].IsSequence())
    throw_error<ConfigError>("{}: expected runs: a list", file);
  const std::string name =
      hardware.empty() && root["hardware"] ? root["hardware"].as<std::string>("") : hardware;
  const Hardware found = find_hardware(name);
  std::vector<Comparison> comparisons;
  for (const YAML::Node& node : root["runs"]) comparisons.push_back(Row(node, file).compare(found));
  return comparisons;
}

}  // namespace heddle::plan
