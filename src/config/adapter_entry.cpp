#include "config/adapter_entry.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "base/errors.h"
#include "base/text.h"
#include "config/config.h"
#include "config/field.h"

namespace heddle::config {
namespace {

std::string last_part(const std::string& key) { return key.substr(key.rfind('.') + 1); }

/// Settings that adapters of one run may have of their own. The rest is the run's.
constexpr std::array kAdapterKeys = {"data.train",
                                     "data.eval",
                                     "data.format",
                                     "data.max_length",
                                     "data.loss_on",
                                     "data.packing",
                                     "data.shuffle",
                                     "train.seed",
                                     "train.epochs",
                                     "train.max_steps",
                                     "train.global_batch_size",
                                     "train.micro_batch_tokens",
                                     "optim.lr",
                                     "optim.weight_decay",
                                     "optim.betas",
                                     "optim.eps",
                                     "optim.clip_norm",
                                     "optim.schedule",
                                     "optim.warmup_steps",
                                     "optim.warmup_ratio",
                                     "optim.decay_steps",
                                     "optim.decay_type",
                                     "optim.min_lr_ratio",
                                     "adapter.path",
                                     "adapter.rank",
                                     "adapter.alpha",
                                     "adapter.rslora",
                                     "adapter.dropout",
                                     "adapter.targets",
                                     "adapter.target_parameters",
                                     "adapter.shared_expert_factors",
                                     "adapter.loraplus_lr_ratio",
                                     "adapter.seed"};

/// Meaning of an entry's key: a whole key or its last part, `data` for data.train, `seed` for
/// train.seed. Empty: nothing.
std::string adapter_key(const std::string& name) {
  if (name == "data") return "data.train";
  for (const char* key : kAdapterKeys) {
    if (name == key || name == last_part(key)) return key;
  }
  return "";
}

/// A name that can be that of a folder.
bool is_folder_name(const std::string& name) {
  return !name.empty() && name.size() <= 128 && name.front() != '.' &&
         std::ranges::all_of(name, [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
         });
}

}  // namespace

AdapterEntry read_adapter_entry(const YAML::Node& node,
                                const std::function<std::string(const YAML::Mark&)>& at) {
  const std::string position = at(node.Mark());
  if (!node.IsMap()) {
    throw_error<ConfigError>(
        "{}: adapters: expected entries as {{name: a, data: a.jsonl}}, found {}", position,
        describe(node));
  }
  AdapterEntry entry;
  for (const auto& setting : node) {
    const YAML::Node &first = setting.first, &value = setting.second;
    const std::string name = first.IsScalar() ? first.Scalar() : "";
    if (name == "name") {
      entry.name = value.IsScalar() ? value.Scalar() : "";
      continue;
    }
    const std::string key = adapter_key(name);
    if (key.empty()) {
      std::vector<std::string> names = {"name", "data"};
      for (const char* known : kAdapterKeys) names.push_back(last_part(known));
      const std::string near = text::nearest(name, names);
      throw_error<ConfigError>(
          "{}: adapters: an entry has no '{}'{}; expected one of {}", at(first.Mark()), name,
          near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near), fmt::join(names, ", "));
    }
    entry.settings.push_back({key, value});
  }
  if (!is_folder_name(entry.name)) {
    throw_error<ConfigError>(
        "{}: adapters: expected a name of letters, digits, '_', '-' and '.', found '{}'", position,
        entry.name);
  }
  return entry;
}

void require_for_several(const RunConfig& config) {
  constexpr struct {
    const char* key;
    const char* instead;
  } kOfOneRun[] = {
      {"adapter.modules_to_save", "whole modules belong to the base model, which all share"},
      {"train.freeze", "the base model is frozen, and adapter.targets names what learns"},
      {"train.spike", "leave it off"},
      {"train.neftune_alpha", "leave it out"},
      {"train.grad_cosine", "leave it out"},
      {"train.router_record", "leave it out"},
      {"train.router_replay", "leave it out"},
      {"eval.input", "use heddle eval on final/NAME"},
      {"eval.metric", "evaluations of several adapters have the loss alone"},
      {"ckpt.keep_best", "a checkpoint holds all adapters, whose best steps differ"},
      {"ckpt.every_epochs", "ckpt.every counts rounds"},
      {"log.command", "read NAME/metrics.jsonl"},
      {"log.sample_prompts", "use heddle generate on final/NAME"},
      {"parallel.cp", "use dp, fsdp or tp"},
      {"parallel.ep", "use dp, fsdp or tp"},
      {"parallel.pp", "use dp, fsdp or tp"},
  };
  for (const auto& [key, instead] : kOfOneRun) {
    const Field& field = *find_field(key);
    if (!config.is_set(key) || field.get(config) == field.get({})) continue;
    throw_error<ConfigError>("{}: is not built for several adapters in one run (adapters:); {}",
                             where(config, key), instead);
  }
}

}  // namespace heddle::config
