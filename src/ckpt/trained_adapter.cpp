#include "ckpt/trained_adapter.h"

#include <algorithm>
#include <string_view>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/expert_pairs.h"

namespace heddle::ckpt {
namespace {

[[noreturn]] void refuse(const AdapterDirectory& adapter, const std::string& what) {
  throw_error<ModelError>(
      "{}: {}, which a run does not train; merge the adapter: heddle export BASE --adapter {} "
      "--output MERGED, and give MERGED as model.path",
      adapter.path().string(), what, adapter.path().string());
}

std::string name_of(const LoraPair& pair) {
  return pair.parameter.empty() ? pair.module : pair.module + "." + pair.parameter;
}

void require_kinds(const AdapterDirectory& adapter) {
  for (const LoraPair& pair : adapter.pairs()) {
    if (pair.is_embedding || pair.module == "lm_head" || pair.module == "score")
      refuse(adapter, "has factors on " + pair.module);
    // PEFT loads no adapter on a router as a module, which is how runs would write it.
    if (pair.module.ends_with(".mlp.gate")) refuse(adapter, "has factors on " + name_of(pair));
  }
  std::vector<const LoraPair*> pairs;
  for (const LoraPair& pair : adapter.pairs()) pairs.push_back(&pair);
  if (const auto single = stack_experts(pairs); !single.empty())
    refuse(adapter, "has factors on " + name_of(*single.front().pairs.front()));
  for (const SavedParameter& saved : adapter.saved()) {
    // A head that stays the embedding's is written once more.
    const bool is_copy = adapter.config().ensure_weight_tying && saved.name == "lm_head.weight";
    if (saved.is_base && !is_copy) refuse(adapter, "brings along a base layer, " + saved.name);
  }
  if (!adapter.vision_pairs().empty())
    refuse(adapter, "has factors on " + adapter.vision_pairs().front().module);
  if (!adapter.vision_saved().empty())
    refuse(adapter, "brings along " + adapter.vision_saved().front().name);
}

void require_one_scale(const AdapterDirectory& adapter) {
  const LoraPair& first = adapter.pairs().front();
  for (const LoraPair& pair : adapter.pairs()) {
    if (pair.rank != first.rank) {
      refuse(adapter, fmt::format("has rank {} on {} and {} on {}", first.rank, name_of(first),
                                  pair.rank, name_of(pair)));
    }
    if (pair.scaling != first.scaling) {
      refuse(adapter, fmt::format("has scale {} on {} and {} on {}", first.scaling, name_of(first),
                                  pair.scaling, name_of(pair)));
    }
  }
}

/// The name in `known` that means `name` by its ending; else the name from its layer on, which
/// means it whatever the model is called.
std::string target_of(const std::string& name, const std::vector<std::string>& known) {
  const auto found = std::ranges::find_if(
      known, [&](const std::string& entry) { return name.ends_with("." + entry); });
  if (found != known.end()) return *found;
  constexpr std::string_view kModel = "model.";
  return name.starts_with(kModel) ? name.substr(kModel.size()) : name;
}

void add_once(std::vector<std::string>& names, std::string name) {
  if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
}

}  // namespace

TrainedAdapter trained_adapter(const AdapterDirectory& adapter) {
  require_kinds(adapter);
  const AdapterConfig& config = adapter.config();
  TrainedAdapter found;
  found.rank = config.rank;
  found.alpha = config.alpha;
  found.rslora = config.use_rslora;
  if (!adapter.pairs().empty()) {
    require_one_scale(adapter);
    const LoraPair& first = adapter.pairs().front();
    AdapterConfig plain = config;
    plain.rank_pattern.clear();
    plain.alpha_pattern.clear();
    // Patterns may give all of them another rank or scale.
    if (first.rank != plain.rank || first.scaling != plain.scaling_of(first.module)) {
      found.rank = first.rank;
      found.alpha = first.scaling * static_cast<double>(first.rank);
      found.rslora = false;
    }
  }
  // A name stands for all modules that have it only where nothing else restricts them.
  const bool is_restricted = !config.layers_to_transform.empty() ||
                             !config.exclude_modules.empty() || !config.exclude_pattern.empty();
  const std::vector<std::string> none;
  for (const LoraPair& pair : adapter.pairs()) {
    if (pair.parameter.empty()) {
      add_once(found.targets, target_of(pair.module, is_restricted ? none : config.target_modules));
    } else {
      add_once(found.target_parameters,
               target_of(name_of(pair), is_restricted ? none : config.target_parameters));
    }
  }
  found.modules_to_save = config.modules_to_save;
  found.has_shared_factors = adapter.form() == AdapterForm::kCompact;
  return found;
}

}  // namespace heddle::ckpt
