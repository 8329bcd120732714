#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "models/layer_shape.h"

namespace heddle::models {

using Json = nlohmann::ordered_json;

/// How checkpoints of a model name its tensors, and what PEFT makes of those names. Patterns have
/// `*` for any characters.
struct WeightNames {
  /// Before the text model's names, the more specific ones first: "model."; "" where AutoModel
  /// wrote it, which has no head.
  std::vector<std::string> prefixes = {"model.", ""};
  /// Tensors that a checkpoint may hold without this model using them: vision tower, MTP head.
  std::vector<std::string> may_be_unused;
  /// The class of transformers with a classification head: "...ForSequenceClassification".
  std::string classification_class;
  /// Modules that `adapter.targets: all-linear` leaves out, and why.
  std::vector<std::string> not_adapted;
  std::string why_not_adapted;
};

/// The text model that a config.json describes, whatever its family. Plain values have their names
/// there.
struct Config {
  std::string model_type;  ///< As read at the top level.
  bool nested = false;     ///< The text model stands in `text_config`.

  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::vector<LayerShape> layers;
  double rms_norm_eps = 0;
  float norm_offset = 0;  ///< Norms scale by this plus their weight: 1 if weights are zero-centred.
  double initializer_range = 0;
  bool tie_word_embeddings = false;

  double rope_theta = 0;
  std::int64_t rotary_dim = 0;  ///< Entries of a head that are rotated.
  std::vector<std::int64_t> mrope_section;

  bool output_router_logits = false;
  double router_aux_loss_coef = 0;

  std::int64_t num_labels = 0;  ///< Labels of a classification head; 0 if config.json names none.
  WeightNames weights;
  /// "rope_theta = 10000", for every value the file did not give.
  std::vector<std::string> defaulted;

  std::int64_t num_hidden_layers() const { return std::ssize(layers); }
  // Layers of one kind have the same sizes in every family; null: no layer is of the kind.
  const nn::AttentionDims* attention() const;
  const nn::GatedDeltaNetDims* gated_delta_net() const;
  const nn::MoeDims* moe() const;
  bool is_moe() const { return moe() != nullptr; }
  /// By layer: routed experts instead of a dense MLP.
  std::vector<bool> sparse_layers() const;
};

}  // namespace heddle::models
