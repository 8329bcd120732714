#pragma once

#include <utility>
#include <vector>

#include "ops/cache_rows.h"
#include "ops/norm_weight.h"
#include "ops/registry.h"

namespace heddle::ops {

/// A step of generation from the sequences' tokens to the logits, all layers of a dense hybrid
/// model in one kernel.
struct DecodeStep {
  static constexpr const char* kName = "decode_step";
  struct Dims {
    std::int64_t layers = 0, hidden_size = 0, intermediate_size = 0, vocab_size = 0;
    // Gated DeltaNet.
    std::int64_t num_key_heads = 0, num_value_heads = 0, key_head_dim = 0, value_head_dim = 0,
                 conv_kernel = 0;
    // Attention.
    std::int64_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0, rotary_dim = 0;
    bool has_output_gate = false;
  };
  /// Weights and caches of a decoder layer, detached.
  struct Layer {
    at::Tensor norm_mixer, norm_mlp;  ///< [H]
    /// Gated DeltaNet: q, k and v together, z, b, a. Attention: q with the gates, k, v. [out,H]
    std::vector<at::Tensor> inputs;
    at::Tensor out, gate, up, down;
    // Gated DeltaNet, see GatedDeltaNetDecode; undefined with attention.
    at::Tensor conv, a_log, dt_bias, norm, conv_states, states;
    // Attention, see AttentionDecode; undefined with Gated DeltaNet.
    at::Tensor q_norm, k_norm, keys, values;
    /// Slots of low-rank changes of `inputs`, out, gate, up and down, see LowRankSlots::layers;
    /// undefined where no set changes the matrix, empty without changes.
    std::vector<at::Tensor> slots;
  };
  struct Model {
    std::vector<Layer> layers;
    at::Tensor embedding;    ///< [V,H]
    at::Tensor norm, head;   ///< [H], [V,H]
    double norm_offset = 0;  ///< Norms but the gated one scale by this plus their weight.
    double eps = 0;
    /// Slots of the rows, and the changes' widest rank, see LowRankSlots; undefined: the base
    /// model.
    at::Tensor runs;
    std::int64_t rank = 0;
  };
  struct Functions {
    /// Memory of the steps of so many sequences; undefined where the kernel does not take them.
    at::Tensor (*exchange)(const KernelTable&, const Model&, std::int64_t rows);
    at::Tensor (*forward)(const Model&, const at::Tensor& tokens, const CacheRows&,
                          const std::pair<at::Tensor, at::Tensor>& rotary,
                          const at::Tensor& exchange);
  };
};

/// Whether a kernel was requested and chosen that has all layers.
bool can_decode_in_one_step(const KernelTable& kernels);

/// Memory in which the parts of that kernel meet, for steps of `rows` sequences that run one after
/// another, with as many runs of changes of one widest rank or without; undefined where the layers
/// run one by one: the kernel does not take the weights' types, so many rows or such a rank, or
/// another kernel was chosen for one of its parts.
at::Tensor decode_step_exchange(const KernelTable& kernels, const DecodeStep::Model& model,
                                std::int64_t rows);

/// Logits [B,V] fp32 after one new token in each of B sequences, whose caches go on by it. `tokens`
/// [B] int64. `rotary`: cos and sin of positions from 0 on, fp32. `exchange`:
/// what decode_step_exchange gave for B rows. Sequences have slots and last pages of their own;
/// rows that share one have no meaning. Not differentiable.
at::Tensor decode_step(const KernelTable& kernels, const DecodeStep::Model& model,
                       const at::Tensor& tokens, const CacheRows& rows,
                       const std::pair<at::Tensor, at::Tensor>& rotary, const at::Tensor& exchange);

}  // namespace heddle::ops
