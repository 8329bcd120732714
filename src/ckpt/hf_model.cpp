#include "ckpt/hf_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <functional>
#include <map>

#include "adapters/lora.h"
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
  std::int64_t expert = -1, row = 0;  ///< Of a single expert's matrix: which, and its first row.
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
      result.push_back({fmt::format("{}{}.down_proj.weight", prefix, e), expert, e});
      continue;
    }
    const std::int64_t half = expert.size(0) / 2;
    result.push_back(
        {fmt::format("{}{}.gate_proj.weight", prefix, e), expert.narrow(0, 0, half), e});
    result.push_back(
        {fmt::format("{}{}.up_proj.weight", prefix, e), expert.narrow(0, half, half), e, half});
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

at::Tensor merged(const Piece& piece, const adapters::Lora& lora) {
  const at::Tensor delta = lora.delta();
  return piece.part.to(delta.scalar_type()) + delta;
}

/// Expert by expert, so that a wide copy of one matrix is all that stands beside the result.
at::Tensor merged(const Piece& piece, const adapters::ExpertLora& lora) {
  if (piece.expert >= 0) {
    const at::Tensor delta = lora.delta(piece.expert).narrow(0, piece.row, piece.part.size(0));
    return piece.part.to(delta.scalar_type()) + delta;
  }
  at::Tensor result = at::empty_like(piece.part);
  for (std::int64_t e = 0; e < result.size(0); ++e) {
    const at::Tensor delta = lora.delta(e);
    result.select(0, e).copy_(piece.part.select(0, e).to(delta.scalar_type()) + delta);
  }
  return result;
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

ModelWriterReport export_model(Model& model, const ModelDirectory& source,
                               const TokenizerSource& tokenizer, const Path& output,
                               const ModelWriterOptions& options) {
  const ops::NoGradient guard;
  std::map<std::string, std::function<at::Tensor(const Piece&)>> merge;
  model.visit_linears([&](nn::Linear& linear) {
    if (auto* lora = dynamic_cast<adapters::Lora*>(linear.adapter()))
      merge[linear.weight().name()] = [lora](const Piece& piece) { return merged(piece, *lora); };
  });
  model.visit_expert_weights([&](nn::ExpertWeights& weights) {
    if (auto* lora = dynamic_cast<adapters::ExpertLora*>(weights.adapter()))
      merge[weights.weight().name()] = [lora](const Piece& piece) { return merged(piece, *lora); };
  });
  ModelWriter writer(output, options);
  for (nn::Parameter* parameter : model.parameters()) {
    const auto adapter = merge.find(parameter->name());
    for (const Piece& piece : pieces(*parameter, source)) {
      const at::ScalarType dtype = stored_dtype(source, piece.name, piece.part);
      if (adapter == merge.end()) {
        writer.add(piece.name, piece.part, dtype);
        continue;
      }
      writer.add(piece.name, piece.part.sizes().vec(), dtype,
                 [piece, make = adapter->second] { return make(piece); });
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

}  // namespace heddle::ckpt
