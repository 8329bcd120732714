#include "ckpt/hf_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <functional>
#include <map>

#include "adapters/lora.h"
#include "base/errors.h"
#include "base/text.h"
#include "ckpt/hf_vocabulary.h"
#include "ckpt/label_names.h"
#include "ckpt/vision_adapter.h"
#include "ops/autograd.h"

namespace heddle::ckpt {
namespace {

using models::Head;

/// A file tensor and the part of a parameter that it holds, in the parameter's dimensions.
struct FilePart {
  std::string name;
  std::vector<std::int64_t> offset, shape;
  bool is_one_expert = false;  ///< The file's tensor lacks dimension 0, which has size 1 here.

  std::vector<std::int64_t> file_shape() const {
    return {shape.begin() + (is_one_expert ? 1 : 0), shape.end()};
  }
  /// The part as the file has it, of the whole parameter.
  at::Tensor of(const at::Tensor& whole) const {
    at::Tensor part = whole;
    for (std::size_t d = 0; d < shape.size(); ++d)
      part = part.narrow(static_cast<std::int64_t>(d), offset[d], shape[d]);
    return is_one_expert ? part.select(0, 0) : part;
  }
};

/// The file tensors of one parameter, in the spelling of the directory.
std::vector<FilePart> file_parts(const nn::Parameter& parameter, const ModelDirectory& directory) {
  const std::string& name = parameter.name();
  const std::vector<std::int64_t>& shape = parameter.global_shape();
  const bool gate_up = name.ends_with(".experts.gate_up_proj");
  if (!(gate_up || name.ends_with(".experts.down_proj")) || directory.find(name) != nullptr) {
    return {{name, std::vector<std::int64_t>(shape.size(), 0), shape}};
  }
  // One by one: experts.E.{gate,up,down}_proj.weight.
  const std::string prefix = name.substr(0, name.rfind('.') + 1);
  std::vector<FilePart> result;
  for (std::int64_t e = 0; e < shape[0]; ++e) {
    const auto add = [&](const char* projection, std::int64_t row, std::int64_t rows) {
      result.push_back({fmt::format("{}{}.{}.weight", prefix, e, projection),
                        {e, row, 0},
                        {1, rows, shape[2]},
                        true});
    };
    if (!gate_up) {
      add("down_proj", 0, shape[1]);
      continue;
    }
    add("gate_proj", 0, shape[1] / 2);
    add("up_proj", shape[1] / 2, shape[1] / 2);
  }
  return result;
}

/// Parts as the file has them: a tied table may stand under the other's name, with fewer
/// rows.
std::vector<FilePart> parts_to_read(const nn::Parameter& parameter,
                                    const ModelDirectory& directory) {
  std::vector<FilePart> parts = file_parts(parameter, directory);
  if (const StoredTensor* table = stored_table(directory, parameter.name()))
    parts.front().name = table->name;
  if (const StoredTensor* table = smaller_table(parameter, directory))
    parts.front().shape = table->shape;
  return parts;
}

/// The part of the file tensor that goes into this rank's memory of the parameter. If none does,
/// one target that reads nothing says that the model knows the tensor.
std::vector<LoadTarget> targets_of(const FilePart& part, const std::vector<nn::Box>& boxes) {
  std::vector<LoadTarget> targets;
  for (const nn::Box& box : boxes) {
    const auto common = intersect({part.offset, part.shape}, box.global);
    if (!common) continue;
    at::Tensor destination = box.tensor;
    std::vector<Range> ranges;
    for (std::size_t d = 0; d < part.shape.size(); ++d) {
      const auto dim = static_cast<std::int64_t>(d);
      const std::int64_t begin = common->offset[d], size = common->size[d];
      destination = destination.narrow(dim, begin - box.global.offset[d], size);
      if (size != part.shape[d])
        ranges.push_back({dim - (part.is_one_expert ? 1 : 0), begin - part.offset[d], size});
    }
    if (part.is_one_expert) destination = destination.select(0, 0);
    targets.push_back({part.name, part.file_shape(), destination, ranges});
  }
  if (targets.empty()) targets.push_back({part.name, part.file_shape(), {}, {}});
  return targets;
}

/// Names of the model's tensors that a checkpoint may hold without this model using them.
std::vector<std::string> may_be_unused(const Model& model) {
  std::vector<std::string> patterns = model.config().weights.may_be_unused;
  if (model.head() != Head::kLanguageModel || model.tied()) patterns.push_back("lm_head.weight");
  if (model.head() != Head::kClassify) patterns.push_back("score.weight");
  return patterns;
}

at::Tensor merged(const at::Tensor& tensor, const FilePart&, const adapters::Lora& lora) {
  const at::Tensor delta = lora.delta();
  return tensor.to(delta.scalar_type()) + delta;
}

/// Expert by expert, so that a wide copy of one matrix is all that stands beside the result.
at::Tensor merged(const at::Tensor& tensor, const FilePart& part,
                  const adapters::ExpertLora& lora) {
  if (part.is_one_expert) {
    const at::Tensor delta = lora.delta(part.offset[0]).narrow(0, part.offset[1], part.shape[1]);
    return tensor.to(delta.scalar_type()) + delta;
  }
  at::Tensor result = at::empty_like(tensor);
  for (std::int64_t e = 0; e < result.size(0); ++e) {
    const at::Tensor delta = lora.delta(e);
    result.select(0, e).copy_(tensor.select(0, e).to(delta.scalar_type()) + delta);
  }
  return result;
}

at::ScalarType stored_dtype(const ModelDirectory& source, const std::string& name,
                            const at::Tensor& tensor) {
  const StoredTensor* stored = source.find(name);
  if (stored == nullptr) stored = stored_table(source, name);
  if (stored != nullptr) return to_scalar_type(stored->dtype).value();
  // A new head of a model that was trained in float64.
  return tensor.scalar_type() == at::kDouble ? at::kFloat : tensor.scalar_type();
}

}  // namespace

std::string text_prefix(const ModelDirectory& directory, const models::Config& model) {
  std::vector<std::string> tables, found;
  for (const std::string& prefix : model.weights.prefixes) {
    tables.push_back(prefix + "embed_tokens.weight");
    // A tied table may stand under the head's name alone.
    for (const std::string& name : {tables.back(), prefix + "norm.weight"}) {
      if (directory.find(name) != nullptr) return prefix;
    }
  }
  for (const StoredTensor& tensor : directory.tensors()) found.push_back(tensor.name);
  throw_error<ModelError>("{}: no tensor {}; is this a checkpoint of model_type '{}'? It holds {}",
                          directory.path().string(), text::join(tables, " or "), model.model_type,
                          text::list_some(found));
}

ModelLoadReport load_model(const ModelDirectory& directory, Model& model, std::uint64_t seed) {
  const ops::NoGradient guard;
  ModelLoadReport report;
  std::vector<LoadTarget> targets;
  std::vector<std::pair<std::vector<nn::Box>, const StoredTensor*>> grown;
  for (nn::Parameter* parameter : model.parameters()) {
    const std::string& name = parameter->name();
    if (name == "score.weight" && directory.find(name) == nullptr) {
      model.initialize(seed, {name});
      report.initialized.push_back(name);
      continue;
    }
    const std::vector<nn::Box> boxes = parameter->boxes(parameter->owned());
    if (const StoredTensor* stored = smaller_table(*parameter, directory)) {
      grown.emplace_back(boxes, stored);
      report.initialized.push_back(fmt::format("{} rows {} to {}", name, stored->shape[0],
                                               parameter->global_shape()[0] - 1));
    }
    for (const FilePart& part : parts_to_read(*parameter, directory)) {
      for (LoadTarget& target : targets_of(part, boxes)) targets.push_back(std::move(target));
    }
  }
  LoadReport loaded = load_tensors(directory, targets, may_be_unused(model));
  for (const auto& [boxes, stored] : grown) fill_new_rows(boxes, *stored);
  report.bytes_read = loaded.bytes_read;
  report.carried = std::move(loaded.carried);
  report.converted = std::move(loaded.converted);
  return report;
}

at::Tensor read_from_memory(const nn::Parameter& parameter) { return parameter.data(); }

at::Tensor read_from_directory(const ModelDirectory& directory, const nn::Parameter& parameter) {
  const ops::NoGradient guard;
  const at::Tensor whole = at::empty(parameter.global_shape(), parameter.value().scalar_type());
  const std::vector<nn::Box> boxes = {{whole_region(parameter.global_shape()), whole}};
  for (const FilePart& part : parts_to_read(parameter, directory)) {
    for (LoadTarget& target : targets_of(part, boxes))
      copy_into(directory.at(target.name), target.destination, target.ranges);
  }
  if (const StoredTensor* table = smaller_table(parameter, directory)) fill_new_rows(boxes, *table);
  return whole;
}

ModelWriterReport export_model(Model& model, const adapters::LoraSet* adapters,
                               const ModelDirectory& source, const TokenizerSource& tokenizer,
                               const Path& output, const ModelWriterOptions& options,
                               const ReadWhole& read, const AdapterDirectory* adapter) {
  const ops::NoGradient guard;
  using Merge = std::function<at::Tensor(const at::Tensor&, const FilePart&)>;
  std::map<std::string, Merge> merge;
  const auto add = [&](const std::string& name, const auto& lora) {
    merge[name] = [&lora](const at::Tensor& tensor, const FilePart& part) {
      return merged(tensor, part, lora);
    };
  };
  if (adapters != nullptr) {
    for (const auto& lora : adapters->adapters()) add(lora->module() + ".weight", *lora);
    for (const auto& lora : adapters->expert_adapters()) add(lora->parameter(), *lora);
  }
  ModelWriter writer(output, options);
  for (nn::Parameter* parameter : model.parameters()) {
    const auto found = merge.find(parameter->name());
    const Merge make = found == merge.end() ? Merge() : found->second;
    for (const FilePart& part : file_parts(*parameter, source)) {
      const at::ScalarType dtype = stored_dtype(source, part.name, parameter->value());
      writer.add(part.name, part.file_shape(), dtype, [&read, parameter, part, make] {
        const at::Tensor tensor = part.of(read(*parameter));
        return make ? make(tensor, part) : tensor;
      });
    }
  }
  // A tied model whose file repeats the table as lm_head must not keep the old one.
  const StoredTensor* repeated = source.find("lm_head.weight");
  if (model.tied() && repeated != nullptr) {
    nn::Parameter& head = model.head_weight();
    writer.add("lm_head.weight", head.global_shape(), to_scalar_type(repeated->dtype).value(),
               [&read, &head] { return read(head); });
  }
  if (adapter != nullptr) add_vision_changes(writer, source, *adapter);
  writer.carry_matching(source, {"*"});

  nlohmann::ordered_json config = source.config();
  nlohmann::ordered_json& text = config.contains("text_config") ? config["text_config"] : config;
  text["vocab_size"] = model.config().vocab_size;
  if (model.head() == Head::kLanguageModel && !model.tied()) {
    // Two tables are written: what tied them in the source must not tie them again.
    for (nlohmann::ordered_json* level : {&config, &text}) {
      if (level->contains("tie_word_embeddings")) (*level)["tie_word_embeddings"] = false;
    }
  }
  if (model.head() == Head::kClassify) {
    set_label_names(config, options.label_names, model.num_labels());
    config["architectures"] = {model.config().weights.classification_class};
  }
  writer.set_config(std::move(config));
  writer.set_tokenizer(tokenizer);
  writer.copy_companions(source.companions());
  return writer.commit();
}

}  // namespace heddle::ckpt
