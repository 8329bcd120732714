#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nn/attention.h"
#include "nn/gated_delta_net.h"
#include "nn/mlp.h"

namespace heddle::models {

/// How the ranks along tp divide the weight of a product.
struct Cut {
  enum class Along { kNothing, kOut, kIn };
  Along along = Along::kNothing;
  std::int64_t pieces = 0;   ///< Each rank has as many whole pieces as the others.
  std::string counts;        ///< The key of config.json that gives the pieces.
  bool is_repeated = false;  ///< Ranks that the pieces divide may share one piece.
};

/// A product y = W x of one layer with W [out, in].
struct Product {
  std::string name;   ///< The module within the layer: "self_attn.q_proj".
  std::string group;  ///< Products that read one input, for tables: "attention q, k, v".
  std::int64_t in = 0, out = 0;
  std::int64_t per_token = 1;  ///< How many products of this shape a token takes: active experts.
  Cut cut;
};

/// One decoder layer: the sizes that its modules are made of. Costs, layout checks and benchmarks
/// read them here too.
struct LayerShape {
  // One of the two mixes tokens.
  std::optional<nn::AttentionDims> attention;
  std::optional<nn::GatedDeltaNetDims> gated_delta_net;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;  ///< Width of the dense MLP; 0 in a layer with experts.
  std::optional<nn::MoeDims> moe;

  /// Width of the MLP that every token takes: the dense one or the shared expert; 0 without.
  std::int64_t dense_width() const {
    return moe ? moe->shared_expert_intermediate_size : intermediate_size;
  }
  /// Width of all MLPs that a token takes together.
  std::int64_t active_width() const;
  /// Heads that the ranks of Ulysses divide while tokens are mixed, with their key in config.json.
  std::pair<std::string, std::int64_t> mixer_heads() const;

  std::vector<Product> products() const;
  /// Weights of the products that one token takes.
  std::int64_t matmul_weights() const;
};

}  // namespace heddle::models
