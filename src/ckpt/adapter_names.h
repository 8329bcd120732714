#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/adapter_config.h"

namespace heddle::ckpt {

/// How an adapter file spells the decoder's modules, after "base_model.model.": it depends on the
/// transformers class that the adapter was made for.
enum class AdapterSpelling {
  kText,        // model.layers.0...                 causal language model, sequence classification
  kNested,      // model.language_model.layers.0...  image-text class
  kBare,        // layers.0...                       text model without a head
  kBareNested,  // language_model.layers.0...        image-text model without a head
};

/// The spelling of the transformers class for a model of this config.json: with a head the causal
/// language model or sequence classification (text), for a configuration with a vision tower the
/// image-text class (nested); without a head the same, bare. A flat configuration, and a nested one
/// whose `architectures` name a text class ("...ForCausalLM", "...TextModel"), has no vision tower.
AdapterSpelling spelling_for(const nlohmann::ordered_json& config, bool has_head = true);
/// The class of transformers for it, "AutoModelForCausalLM": an adapter acts on that one alone.
std::string auto_class(const nlohmann::ordered_json& config, bool is_embedding, bool is_classifier);
/// A module or parameter name in any of the spellings, as the causal language model spells it:
/// "model.layers.0...", "model.embed_tokens", "lm_head".
std::string to_text_spelling(std::string_view name);
/// A name in any spelling, in the one asked for.
std::string to_spelling(std::string_view name, AdapterSpelling spelling);
/// Nothing for a name that all spellings share ("lm_head").
std::optional<AdapterSpelling> spelling_of(std::string_view name);

/// "base_model.model.", before every name in an adapter file.
inline constexpr std::string_view kAdapterPrefix = "base_model.model.";

/// A module or parameter of the vision tower, in text spelling.
bool is_vision(std::string_view name);

/// PEFT's rule for modules_to_save: an entry means every module whose name ends with it ("norm" is
/// also "input_layernorm"), with all that lies in it. `parameter`: a name such as
/// "model.norm.weight".
bool is_saved_whole(const std::vector<std::string>& modules_to_save, std::string_view parameter);

/// PEFT wraps the targeted parameters of one module in each other, in the module's own order: those
/// of `module` (any spelling) that `config` targets, the innermost (deepest ".base_layer") first.
std::vector<std::string> targeted_parameters(const AdapterConfig& config, std::string_view module);

}  // namespace heddle::ckpt
