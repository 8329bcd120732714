#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/adapter_config.h"
#include "ckpt/safetensors.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt {

/// How an adapter file spells the decoder's modules, after "base_model.model.": it depends on the
/// transformers class that the adapter was made for.
enum class AdapterSpelling {
  kText,        // model.layers.0...                 causal language model, sequence classification
  kNested,      // model.language_model.layers.0...  image-text class
  kBare,        // layers.0...                       text model without a head
  kBareNested,  // language_model.layers.0...        image-text model without a head
};

/// The spelling that fits `architectures` of config.json ("Qwen3_5ForConditionalGeneration":
/// nested; "...ForCausalLM",
/// "...ForSequenceClassification" and anything unknown: text; "...TextModel": bare; "...Model":
/// bare nested).
AdapterSpelling spelling_for(const nlohmann::ordered_json& config);
/// A module or parameter name in any of the spellings, as the causal language model spells it:
/// "model.layers.0...", "model.embed_tokens", "lm_head".
std::string to_text_spelling(std::string_view name);
/// The reverse: a name in the text spelling in another one.
std::string from_text_spelling(std::string_view name, AdapterSpelling spelling);

/// LoRA on one module, y += scaling * B (A x).
struct LoraPair {
  std::string module;  // text spelling, for example "model.layers.0.self_attn.q_proj"
  StoredTensor a;      // [rank, in_features]
  StoredTensor b;      // [out_features, rank]
  std::int64_t rank = 0;
  double scaling = 0;
};

/// A whole parameter that was trained beside the adapter (modules_to_save).
struct SavedParameter {
  std::string name;  // text spelling, for example "lm_head.weight"
  StoredTensor tensor;
};

/// A PEFT adapter directory: adapter_config.json and adapter_model.safetensors.
class AdapterDirectory {
 public:
  /// Throws ModelError that names file, key or tensors: unsupported features, an A without its B, a
  /// rank that differs from the configuration, tensors that no target covers, tensors of other
  /// methods, adapter_model.bin only.
  static AdapterDirectory open(const Path& path);
  static bool is_one(const Path& path);

  const Path& path() const { return path_; }
  const AdapterConfig& config() const { return config_; }
  AdapterSpelling spelling() const { return spelling_; }
  const std::vector<LoraPair>& pairs() const { return pairs_; }
  const std::vector<SavedParameter>& saved() const { return saved_; }

 private:
  AdapterDirectory() = default;
  Path path_;
  AdapterConfig config_;
  AdapterSpelling spelling_ = AdapterSpelling::kText;
  std::vector<LoraPair> pairs_;
  std::vector<SavedParameter> saved_;
};

/// What write_adapter() writes; names in any spelling.
struct AdapterTensors {
  struct Pair {
    std::string module;
    at::Tensor a;  // [rank, in_features]
    at::Tensor b;  // [out_features, rank]
  };
  std::vector<Pair> pairs;
  std::vector<NamedTensor> saved;  // parameters of modules_to_save: "lm_head.weight"
};

/// Writes a PEFT adapter directory through "<path>.tmp" and a rename. `dtype` is the stored type of
/// all tensors, nothing = each tensor's own. `companions`: a folder whose tokenizer and template
/// files are copied, "" = none. Throws FileError; InternalError if a pair's rank is not the
/// configuration's or its module is no target.
void write_adapter(const Path& path, const AdapterConfig& config, const AdapterTensors& tensors,
                   AdapterSpelling spelling, std::optional<at::ScalarType> dtype = {},
                   const Path& companions = {}, bool overwrite = false);

}  // namespace heddle::ckpt
