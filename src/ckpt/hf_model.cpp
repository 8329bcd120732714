#include "ckpt/hf_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/errors.h"
#include "base/text.h"
#include "ops/autograd.h"

namespace heddle::ckpt {
namespace {

using models::qwen3_5::Head;

/// A part of a parameter and the file tensor that holds it.
struct Piece {
  std::string name;
  at::Tensor part;
};

/// The file tensors of one parameter, in the spelling of the directory.
std::vector<Piece> pieces(nn::Parameter& parameter, const ModelDirectory& directory) {
  const std::string& name = parameter.name();
  const bool gate_up = name.ends_with(".experts.gate_up_proj");
  if (!(gate_up || name.ends_with(".experts.down_proj")) || directory.find(name) != nullptr) {
    return {{name, parameter.data()}};
  }
  // One by one: experts.E.{gate,up,down}_proj.weight.
  const std::string prefix = name.substr(0, name.rfind('.') + 1);
  const at::Tensor data = parameter.data();
  std::vector<Piece> result;
  for (std::int64_t e = 0; e < data.size(0); ++e) {
    const at::Tensor expert = data.select(0, e);
    if (!gate_up) {
      result.push_back({fmt::format("{}{}.down_proj.weight", prefix, e), expert});
      continue;
    }
    const std::int64_t half = expert.size(0) / 2;
    result.push_back({fmt::format("{}{}.gate_proj.weight", prefix, e), expert.narrow(0, 0, half)});
    result.push_back({fmt::format("{}{}.up_proj.weight", prefix, e), expert.narrow(0, half, half)});
  }
  return result;
}

/// Names of the model's tensors that a checkpoint may hold without this model using them.
std::vector<std::string> may_be_unused(const Model& model) {
  std::vector<std::string> patterns = {"model.visual.*", "visual.*", "mtp.*", "model.mtp.*"};
  if (model.head() != Head::kLanguageModel || model.tied()) patterns.push_back("lm_head.weight");
  if (model.head() != Head::kClassify) patterns.push_back("score.weight");
  return patterns;
}

void fill_new_rows(at::Tensor table, std::int64_t read_rows) {
  if (table.size(0) == read_rows) return;
  // The mean of the trained rows: a new token starts neither loud nor confident.
  const auto wide = table.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor mean = table.narrow(0, 0, read_rows).to(wide).mean(0);
  table.narrow(0, read_rows, table.size(0) - read_rows).copy_(mean);
}

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

at::ScalarType stored_dtype(const ModelDirectory& source, const std::string& name,
                            const at::Tensor& tensor) {
  const StoredTensor* stored = source.find(name);
  return stored != nullptr ? to_scalar_type(stored->dtype).value() : tensor.scalar_type();
}

}  // namespace

std::string text_prefix(const ModelDirectory& directory) {
  for (const char* prefix : {"model.language_model.", "model."}) {
    if (directory.find(std::string(prefix) + "embed_tokens.weight") != nullptr) return prefix;
  }
  throw_error<ModelError>(
      "{}: no tensor model.embed_tokens.weight or model.language_model.embed_tokens.weight; is "
      "this a checkpoint of the "
      "Qwen3.5 or Qwen3-Next text family?",
      directory.path().string());
}

ModelLoadReport load_model(const ModelDirectory& directory, Model& model, std::uint64_t seed) {
  const ops::NoGradient guard;
  ModelLoadReport report;
  std::vector<LoadTarget> targets;
  std::vector<std::pair<at::Tensor, std::int64_t>> grown;
  for (nn::Parameter* parameter : model.parameters()) {
    const std::string& name = parameter->name();
    if (name == "score.weight" && directory.find(name) == nullptr) {
      model.initialize(seed, {name});
      report.initialized.push_back(name);
      continue;
    }
    const bool vocabulary = name.ends_with("embed_tokens.weight") || name == "lm_head.weight";
    const StoredTensor* stored = directory.find(name);
    if (vocabulary && stored != nullptr && stored->shape.size() == 2 &&
        stored->shape[0] < parameter->global_shape()[0]) {
      const at::Tensor table = parameter->data();
      const std::int64_t rows = stored->shape[0];
      targets.push_back({name, {rows, table.size(1)}, table.narrow(0, 0, rows)});
      grown.emplace_back(table, rows);
      report.initialized.push_back(fmt::format("{} rows {} to {}", name, rows, table.size(0) - 1));
      continue;
    }
    for (Piece& piece : pieces(*parameter, directory)) {
      targets.push_back({piece.name, piece.part.sizes().vec(), piece.part});
    }
  }
  LoadReport loaded = load_tensors(directory, targets, may_be_unused(model));
  for (const auto& [table, rows] : grown) fill_new_rows(table, rows);
  report.bytes_read = loaded.bytes_read;
  report.carried = std::move(loaded.carried);
  report.converted = std::move(loaded.converted);
  return report;
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

std::unique_ptr<adapters::LoraSet> load_adapter(const AdapterDirectory& directory, Model& model) {
  const ops::NoGradient guard;
  const std::string text = "model.";
  const auto name_in_model = [&](const std::string& name) {
    return name.rfind(text, 0) == 0 ? model.prefix() + name.substr(text.size()) : name;
  };
  std::vector<adapters::LoraSet::Module> modules;
  for (const LoraPair& pair : directory.pairs()) {
    if (!pair.parameter.empty()) {
      throw_error<ModelError>(
          "{}: target_parameters ('{}' of '{}') are not built; adapt linear layers instead",
          directory.path().string(), pair.parameter, pair.module);
    }
    modules.push_back({name_in_model(pair.module), pair.rank, pair.scaling});
  }
  adapters::LoraOptions options;
  options.rank = directory.config().rank;
  options.alpha = directory.config().alpha;
  options.rslora = directory.config().use_rslora;
  auto set = std::make_unique<adapters::LoraSet>(
      [&](const std::function<void(nn::Linear&)>& visit) { model.visit_linears(visit); }, modules,
      options, model.context());
  std::map<std::string, adapters::Lora*> by_module;
  for (const auto& lora : set->adapters()) by_module[lora->module()] = lora.get();
  for (const LoraPair& pair : directory.pairs()) {
    adapters::Lora& lora = *by_module.at(name_in_model(pair.module));
    at::Tensor a = lora.a().data(), b = lora.b().data();
    copy_into(pair.a, a);
    copy_into(pair.b, b);
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
    at::Tensor data = it->second->data();
    if (saved.tensor.shape != it->second->global_shape()) {
      throw_error<ModelError>("{}: modules_to_save holds '{}' as [{}], this model has [{}]",
                              directory.path().string(), saved.name,
                              fmt::join(saved.tensor.shape, ", "),
                              fmt::join(it->second->global_shape(), ", "));
    }
    copy_into(saved.tensor, data);
  }
  return set;
}

ModelWriterReport export_model(Model& model, const ModelDirectory& source,
                               const TokenizerSource& tokenizer, const Path& output,
                               const ModelWriterOptions& options) {
  const ops::NoGradient guard;
  std::map<std::string, adapters::Lora*> adapters;
  model.visit_linears([&](nn::Linear& linear) {
    if (auto* lora = dynamic_cast<adapters::Lora*>(linear.adapter()))
      adapters[linear.weight().name()] = lora;
  });
  ModelWriter writer(output, options);
  for (nn::Parameter* parameter : model.parameters()) {
    const auto lora = adapters.find(parameter->name());
    for (const Piece& piece : pieces(*parameter, source)) {
      const at::ScalarType dtype = stored_dtype(source, piece.name, piece.part);
      if (lora == adapters.end()) {
        writer.add(piece.name, piece.part, dtype);
        continue;
      }
      writer.add(piece.name, piece.part.sizes().vec(), dtype,
                 [part = piece.part, adapter = lora->second] {
                   const at::Tensor delta = adapter->delta();
                   return part.to(delta.scalar_type()) + delta;
                 });
    }
  }
  // A tied model whose file repeats the table as lm_head must not keep the old one.
  const StoredTensor* repeated = source.find("lm_head.weight");
  if (model.tied() && repeated != nullptr) {
    writer.add("lm_head.weight", model.head_weight().data(),
               to_scalar_type(repeated->dtype).value());
  }
  writer.carry_matching(source, {"*"});

  nlohmann::ordered_json config = source.config();
  nlohmann::ordered_json& text = config.contains("text_config") ? config["text_config"] : config;
  text["vocab_size"] = model.config().vocab_size;
  if (model.head() == Head::kClassify) {
    nlohmann::ordered_json id2label, label2id;
    for (std::int64_t i = 0; i < model.num_labels(); ++i) {
      const std::string label = fmt::format("LABEL_{}", i);
      id2label[std::to_string(i)] = label;
      label2id[label] = i;
    }
    if (!config.contains("id2label") || config["id2label"].size() != id2label.size()) {
      config["id2label"] = id2label;
      config["label2id"] = label2id;
    }
    const std::string type = model.config().model_type;
    config["architectures"] = {type == "qwen3_next" ? "Qwen3NextForSequenceClassification"
                               : type == "qwen3_5"  ? "Qwen3_5ForSequenceClassification"
                                                    : "Qwen3_5TextForSequenceClassification"};
  }
  writer.set_config(std::move(config));
  writer.set_tokenizer(tokenizer);
  writer.copy_companions_from(source.path());
  return writer.commit();
}

void export_adapter(Model& model, const adapters::LoraSet& set,
                    const std::vector<nn::Parameter*>& saved, const ModelDirectory& source,
                    const std::string& base_model, const TokenizerSource& tokenizer,
                    const Path& output, bool overwrite) {
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
  std::set<std::string> suffixes, all_suffixes_elsewhere;
  std::set<std::string> adapted;
  for (const auto& lora : set.adapters()) {
    adapted.insert(lora->module());
    suffixes.insert(lora->module().substr(lora->module().rfind('.') + 1));
    tensors.pairs.push_back({text_name(lora->module()), "", lora->a().data(), lora->b().data()});
  }
  // Suffixes ("q_proj") where they mean exactly the adapted modules, whole names otherwise.
  model.visit_linears([&](nn::Linear& linear) {
    const std::string module = adapters::module_of(linear.weight().name());
    if (adapted.count(module) == 0)
      all_suffixes_elsewhere.insert(module.substr(module.rfind('.') + 1));
  });
  const bool exact = std::none_of(suffixes.begin(), suffixes.end(), [&](const std::string& s) {
    return all_suffixes_elsewhere.count(s) > 0;
  });
  const AdapterSpelling spelling = spelling_for(source.config());
  if (exact) {
    config.target_modules.assign(suffixes.begin(), suffixes.end());
  } else {
    for (const auto& lora : set.adapters()) {
      config.target_modules.push_back(to_spelling(text_name(lora->module()), spelling));
    }
  }
  for (nn::Parameter* parameter : saved) {
    const std::string module = adapters::module_of(parameter->name());
    config.modules_to_save.push_back(module.substr(module.rfind('.') + 1));
    tensors.saved.push_back({text_name(parameter->name()), parameter->data()});
    if (parameter == &model.head_weight() && model.tied() && model.head() == Head::kLanguageModel) {
      config.modules_to_save.push_back("lm_head");
      tensors.saved.push_back({"lm_head.weight", parameter->data()});
    }
  }
  write_adapter(output, config, tensors, spelling, {}, tokenizer, overwrite);
}

}  // namespace heddle::ckpt
