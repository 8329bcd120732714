#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "ckpt/adapter_names.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/saved_modules.h"

namespace heddle::ckpt {
namespace {

using models::Head;

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

}  // namespace

void export_adapter(Model& model, const adapters::LoraSet& set,
                    const std::vector<nn::Parameter*>& saved, const ModelDirectory& source,
                    const std::string& base_model, const TokenizerSource& tokenizer,
                    const Path& output, bool overwrite, const ReadWhole& read, const Files& files,
                    const AddFiles& add_files, AdapterForm form) {
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
  const AdapterSpelling spelling =
      spelling_for(source.config(), /*has_head=*/model.head() != Head::kEmbed);
  std::vector<std::string> modules, parameters, other_modules, other_parameters;
  for (const auto& lora : set.adapters()) {
    modules.push_back(lora->module());
    tensors.pairs.push_back({text_name(lora->module()), "", read(lora->a()), read(lora->b())});
  }
  for (const auto& lora : set.expert_adapters()) {
    const std::string& name = lora->parameter();
    parameters.push_back(name);
    const std::size_t dot = name.rfind('.');
    const bool is_compact =
        form == AdapterForm::kCompact && lora->factors() == nn::ExpertFactors::kSharedOuter;
    if (is_compact) tensors.form = form;
    const at::Tensor a = read(lora->a()), b = read(lora->b());
    tensors.pairs.push_back({text_name(name.substr(0, dot)), name.substr(dot + 1),
                             is_compact ? lora->compact_a(a) : lora->peft_a(a),
                             is_compact ? lora->compact_b(b) : lora->peft_b(b)});
  }
  model.visit_linears([&](nn::Linear& linear) {
    if (set.of(linear) == nullptr) other_modules.push_back(linear.module());
  });
  model.visit_expert_weights([&](nn::ExpertWeights& weights) {
    if (set.of(weights) == nullptr) other_parameters.push_back(weights.weight().name());
  });
  const auto last = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
  const auto from_mlp = [](const std::string& name) { return name.substr(name.rfind("mlp.")); };
  config.target_modules = target_names(modules, other_modules, last, spelling);
  config.target_parameters = target_names(parameters, other_parameters, from_mlp, spelling);
  // The names of the class that PEFT loads the adapter on, with vision, without prediction heads.
  std::map<std::string, nn::Parameter*> by_name;
  std::vector<std::string> all;
  for (nn::Parameter* parameter : model.parameters()) {
    all.push_back(to_spelling(parameter->name(), spelling));
    by_name[all.back()] = parameter;
  }
  for (const StoredTensor& tensor : source.tensors()) {
    if (is_vision(to_text_spelling(tensor.name))) all.push_back(to_spelling(tensor.name, spelling));
  }
  std::set<std::string> trained;
  for (nn::Parameter* parameter : saved) trained.insert(to_spelling(parameter->name(), spelling));
  const SavedModules whole = modules_to_save(trained, all);
  config.modules_to_save = whole.entries;
  for (const std::string& name : whole.parameters)
    tensors.saved.push_back({name, read(*by_name.at(name))});
  nn::Parameter& table = model.embedding_weight();
  if (model.tied() && model.head() == Head::kLanguageModel &&
      trained.contains(to_spelling(table.name(), spelling))) {
    config.modules_to_save.emplace_back("lm_head");
    tensors.saved.push_back({"lm_head.weight", read(table)});
  }
  write_adapter(output, config, tensors, spelling, {}, tokenizer, overwrite, files, add_files);
}

}  // namespace heddle::ckpt
