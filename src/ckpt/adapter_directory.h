#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/adapter_config.h"
#include "ckpt/adapter_names.h"
#include "ckpt/companions.h"
#include "ckpt/safetensors.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt {

/// LoRA on one linear module, y += scaling * B (A x), or on one parameter (PEFT's
/// target_parameters), for example "gate_up_proj" of "model.layers.0.mlp.experts". For E experts A
/// is [E * rank, in] with the expert outer, B is [out, rank * E] with the expert inner, as PEFT
/// stores them; in the compact form a factor that the experts share is there once.
struct LoraPair {
  std::string module;     // text spelling, for example "model.layers.0.self_attn.q_proj"
  std::string parameter;  // "" = the module is linear
  StoredTensor a;         // [rank, in_features]
  StoredTensor b;         // [out_features, rank]
  std::int64_t rank = 0;
  double scaling = 0;
  /// The module is the embedding: a is lora_embedding_A [rank, rows], b is lora_embedding_B
  /// [hidden_size, rank], and the table [rows, hidden_size] changes by scaling (B A)^T.
  bool is_embedding = false;
};

/// A whole parameter that was trained beside the adapter (modules_to_save).
struct SavedParameter {
  std::string name;  // text spelling, for example "lm_head.weight"
  StoredTensor tensor;
  /// Not of modules_to_save: PEFT writes an embedding or head that was resized, or has an adapter,
  /// as the base layer, which a tied head shares.
  bool is_base = false;
};

/// How the factors of routed experts lie in a directory.
enum class AdapterForm {
  kPeft,     ///< adapter_model.safetensors: each expert has its own two.
  kCompact,  ///< heddle_adapter.safetensors: one that the experts of a layer share is there once.
};

/// A PEFT adapter directory: adapter_config.json and adapter_model.safetensors; or the same with
/// the factors in the compact form, in a file that PEFT does not take for its own.
class AdapterDirectory {
 public:
  /// Throws ModelError that names file, key or tensors: unsupported features, an A without its B, a
  /// rank that differs from the configuration, tensors that no target covers, tensors of other
  /// methods, adapter_model.bin only, files of both forms.
  static AdapterDirectory open(const Path& path);
  static bool is_one(const Path& path);

  const Path& path() const { return path_; }
  const AdapterConfig& config() const { return config_; }
  AdapterSpelling spelling() const { return spelling_; }
  AdapterForm form() const { return form_; }
  const std::vector<LoraPair>& pairs() const { return pairs_; }
  const std::vector<SavedParameter>& saved() const { return saved_; }
  /// Pairs of the vision tower, through which text does not pass.
  const std::vector<LoraPair>& vision_pairs() const { return vision_pairs_; }
  const std::vector<SavedParameter>& vision_saved() const { return vision_saved_; }

 private:
  AdapterDirectory() = default;
  Path path_;
  AdapterConfig config_;
  AdapterSpelling spelling_ = AdapterSpelling::kText;
  AdapterForm form_ = AdapterForm::kPeft;
  std::vector<LoraPair> pairs_;
  std::vector<SavedParameter> saved_;
  std::vector<LoraPair> vision_pairs_;
  std::vector<SavedParameter> vision_saved_;
};

/// Tensors that write_adapter() writes; names in any spelling.
struct AdapterTensors {
  struct Pair {
    std::string module;
    std::string parameter;  // as in LoraPair
    at::Tensor a;           // [rank, in_features]
    at::Tensor b;           // [out_features, rank]
  };
  std::vector<Pair> pairs;
  std::vector<NamedTensor> saved;  // parameters of modules_to_save: "lm_head.weight"
  AdapterForm form = AdapterForm::kPeft;
};

inline constexpr const char* kAdapterConfig = "adapter_config.json";
// The file of each form, and what the metadata of a compact one says.
inline constexpr const char* kPeftWeights = "adapter_model.safetensors";
inline constexpr const char* kCompactWeights = "heddle_adapter.safetensors";
inline constexpr const char* kExpertFactorsKey = "expert_factors";
inline constexpr const char* kSharedOuter = "shared_outer";

/// Whether A with so many rows and B with so many columns make a pair: as many, or, of a parameter
/// in the compact form, those of one expert beside those of several.
bool makes_pair(std::int64_t rows, std::int64_t columns, std::int64_t rank,
                const std::string& parameter, AdapterForm form);

/// Writes an adapter directory through "<path>.tmp" and a rename. `dtype` is the stored type of
/// all tensors, nothing = each tensor's own. `tokenizer` is written beside them unless its
/// folder is "", and so are `files` and what `add_files` writes there. Throws ConfigError if
/// something stands there that must not be replaced; FileError; InternalError if a pair's rank is
/// not the configuration's or its module is no target.
void write_adapter(const Path& path, const AdapterConfig& config, const AdapterTensors& tensors,
                   AdapterSpelling spelling, std::optional<at::ScalarType> dtype = {},
                   const TokenizerSource& tokenizer = {}, bool overwrite = false,
                   const Files& files = {}, const AddFiles& add_files = {});

/// Writes the adapter as PEFT reads it, a factor that experts share once for each of them, with its
/// configuration, tokenizer and licence files; an adapter in PEFT's form is copied. Returns the
/// bytes of its weights file. Throws ConfigError if something stands there that must not be
/// replaced; FileError.
std::uint64_t write_in_peft_form(const AdapterDirectory& adapter, const Path& path, bool overwrite);

}  // namespace heddle::ckpt
