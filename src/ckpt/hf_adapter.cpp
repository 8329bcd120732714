#include "ckpt/hf_adapter.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "base/errors.h"
#include "ckpt/adapter_names.h"
#include "ckpt/tensor_io.h"
#include "ops/autograd.h"

namespace heddle::ckpt {
namespace {

using models::Head;

/// A tied model has one table: an adapter that was trained on two different ones does not fit.
void check_tied_head(const AdapterDirectory& directory, const SavedParameter& head) {
  for (const SavedParameter& saved : directory.saved()) {
    if (!saved.name.ends_with("embed_tokens.weight")) continue;
    if (at::equal(read_tensor(saved.tensor), read_tensor(head.tensor))) return;
    break;
  }
  throw_error<ModelError>(
      "{}: modules_to_save holds an lm_head.weight of its own, but this model's head is tied to "
      "its embedding; merge it with PEFT into an untied model",
      directory.path().string());
}

/// The names under which PEFT finds the adapted modules again: dotted suffixes where they mean
/// exactly these, whole names otherwise.
std::vector<std::string> target_names(const std::vector<std::string>& adapted,
                                      const std::vector<std::string>& others,
                                      const std::function<std::string(const std::string&)>& suffix,
                                      AdapterSpelling spelling) {
  std::set<std::string> suffixes, elsewhere;
  for (const std::string& name : adapted) suffixes.insert(suffix(name));
  for (const std::string& name : others) elsewhere.insert(suffix(name));
  const bool exact = std::none_of(suffixes.begin(), suffixes.end(),
                                  [&](const std::string& s) { return elsewhere.count(s) > 0; });
  if (exact) return {suffixes.begin(), suffixes.end()};
  std::vector<std::string> names;
  for (const std::string& name : adapted)
    names.push_back(to_spelling(to_text_spelling(name), spelling));
  return names;
}

/// What this rank owns of a stored tensor.
void fill(nn::Parameter& parameter, const StoredTensor& stored) {
  if (stored.shape != parameter.global_shape()) {
    throw_error<ModelError>("{} is [{}], this model needs [{}]", stored.where(),
                            fmt::join(stored.shape, ", "),
                            fmt::join(parameter.global_shape(), ", "));
  }
  parameter.write_owned(read_tensor(stored));
}

}  // namespace

adapters::Adaptable adaptable(Model& model) {
  return {[&](const std::function<void(nn::Linear&)>& visit) { model.visit_linears(visit); },
          [&](const std::function<void(nn::ExpertWeights&)>& visit) {
            model.visit_expert_weights(visit);
          }};
}

std::int64_t vocabulary_rows(const AdapterDirectory& directory) {
  std::int64_t rows = 0;
  for (const SavedParameter& saved : directory.saved()) {
    const bool vocabulary =
        saved.name.ends_with("embed_tokens.weight") || saved.name == "lm_head.weight";
    if (vocabulary && saved.tensor.shape.size() == 2)
      rows = std::max(rows, static_cast<std::int64_t>(saved.tensor.shape[0]));
  }
  return rows;
}

std::unique_ptr<adapters::LoraSet> load_adapter(
    const AdapterDirectory& directory, Model& model,
    const std::function<void(adapters::LoraSet&)>& divide) {
  const ops::NoGradient guard;
  const std::string text = "model.";
  const auto name_in_model = [&](const std::string& name) {
    return name.rfind(text, 0) == 0 ? model.prefix() + name.substr(text.size()) : name;
  };
  std::vector<adapters::LoraSet::Module> modules;
  const auto key_of = [&](const LoraPair& pair) {
    const std::string module = name_in_model(pair.module);
    return pair.parameter.empty() ? module : module + "." + pair.parameter;
  };
  for (const LoraPair& pair : directory.pairs())
    modules.push_back({key_of(pair), pair.rank, pair.scaling});
  adapters::LoraOptions options;
  options.rank = directory.config().rank;
  options.alpha = directory.config().alpha;
  options.rslora = directory.config().use_rslora;
  auto set =
      std::make_unique<adapters::LoraSet>(adaptable(model), modules, options, model.context());
  if (divide) divide(*set);
  std::map<std::string, adapters::Lora*> by_module;
  for (const auto& lora : set->adapters()) by_module[lora->module()] = lora.get();
  std::map<std::string, adapters::ExpertLora*> by_parameter;
  for (const auto& lora : set->expert_adapters()) by_parameter[lora->parameter()] = lora.get();
  for (const LoraPair& pair : directory.pairs()) {
    if (const auto expert = by_parameter.find(key_of(pair)); expert != by_parameter.end()) {
      expert->second->set_from_peft(read_tensor(pair.a), read_tensor(pair.b));
      continue;
    }
    adapters::Lora& lora = *by_module.at(key_of(pair));
    fill(lora.a(), pair.a);
    fill(lora.b(), pair.b);
  }
  std::map<std::string, nn::Parameter*> parameters;
  for (nn::Parameter* parameter : model.parameters()) parameters[parameter->name()] = parameter;
  for (const SavedParameter& saved : directory.saved()) {
    if (saved.name == "lm_head.weight" && model.tied()) {
      check_tied_head(directory, saved);
      continue;
    }
    const auto it = parameters.find(name_in_model(saved.name));
    if (it == parameters.end()) {
      throw_error<ModelError>("{}: modules_to_save holds '{}', which this model does not have",
                              directory.path().string(), saved.name);
    }
    if (saved.tensor.shape != it->second->global_shape()) {
      throw_error<ModelError>("{}: modules_to_save holds '{}' as [{}], this model has [{}]",
                              directory.path().string(), saved.name,
                              fmt::join(saved.tensor.shape, ", "),
                              fmt::join(it->second->global_shape(), ", "));
    }
    fill(*it->second, saved.tensor);
  }
  return set;
}

void export_adapter(Model& model, const adapters::LoraSet& set,
                    const std::vector<nn::Parameter*>& saved, const ModelDirectory& source,
                    const std::string& base_model, const TokenizerSource& tokenizer,
                    const Path& output, bool overwrite, const ReadWhole& read) {
  const auto text_name = [&](const std::string& name) { return to_text_spelling(name); };
  AdapterConfig config;
  config.base_model_name_or_path = base_model;
  config.task_type = model.head() == Head::kClassify ? "SEQ_CLS"
                     : model.head() == Head::kEmbed  ? "FEATURE_EXTRACTION"
                                                     : "CAUSAL_LM";
  config.rank = set.options().rank;
  config.alpha = set.options().alpha;
  config.dropout = set.options().dropout;
  config.use_rslora = set.options().rslora;

  AdapterTensors tensors;
  AdapterSpelling spelling = spelling_for(source.config());
  if (model.head() == Head::kEmbed) {
    // PEFT's FEATURE_EXTRACTION stands on the class without a head.
    if (spelling == AdapterSpelling::kText) spelling = AdapterSpelling::kBare;
    if (spelling == AdapterSpelling::kNested) spelling = AdapterSpelling::kBareNested;
  }
  std::vector<std::string> modules, parameters, other_modules, other_parameters;
  for (const auto& lora : set.adapters()) {
    modules.push_back(lora->module());
    tensors.pairs.push_back({text_name(lora->module()), "", read(lora->a()), read(lora->b())});
  }
  for (const auto& lora : set.expert_adapters()) {
    const std::string& name = lora->parameter();
    parameters.push_back(name);
    const std::size_t dot = name.rfind('.');
    tensors.pairs.push_back({text_name(name.substr(0, dot)), name.substr(dot + 1),
                             lora->peft_a(read(lora->a())), lora->peft_b(read(lora->b()))});
  }
  model.visit_linears([&](nn::Linear& linear) {
    if (set.of(linear) == nullptr)
      other_modules.push_back(adapters::module_of(linear.weight().name()));
  });
  model.visit_expert_weights([&](nn::ExpertWeights& weights) {
    if (set.of(weights) == nullptr) other_parameters.push_back(weights.weight().name());
  });
  const auto last = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
  const auto from_mlp = [](const std::string& name) { return name.substr(name.rfind("mlp.")); };
  config.target_modules = target_names(modules, other_modules, last, spelling);
  config.target_parameters = target_names(parameters, other_parameters, from_mlp, spelling);
  for (nn::Parameter* parameter : saved) {
    const std::string module = adapters::module_of(parameter->name());
    config.modules_to_save.push_back(module.substr(module.rfind('.') + 1));
    tensors.saved.push_back({text_name(parameter->name()), read(*parameter)});
    if (parameter == &model.head_weight() && model.tied() && model.head() == Head::kLanguageModel) {
      config.modules_to_save.push_back("lm_head");
      tensors.saved.push_back({"lm_head.weight", read(*parameter)});
    }
  }
  write_adapter(output, config, tensors, spelling, {}, tokenizer, overwrite);
}

}  // namespace heddle::ckpt
