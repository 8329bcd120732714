// One token of the gated delta rule for many sequences: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

struct GdnDecodeShape {
  int batch = 0, k_heads = 0, v_heads = 0;
  int head_dim = 0;  ///< Size of keys and values: 64, 128 or, for the rule alone, 256.
  /// Format of the states that a step reads and writes, [slots,v_heads,head_dim,head_dim]. A step
  /// computes in fp32; bf16 states are rounded to nearest even when they are stored.
  Element state_type = Element::kFloat32;
};

/// Rows are those of the sequences; heads of head_dim elements follow each other. bf16.
struct GdnDecodeInputs {
  InputRows q, k, v;
  const float *g = nullptr, *beta = nullptr;  ///< [batch,v_heads]
  const int64_t* slots = nullptr;             ///< [batch]
  void* states = nullptr;
  float scale = 1;
  bool normalize_qk = true;
};

/// o [batch,v_heads,head_dim] bf16. The states of the slots are updated in place.
void gated_delta_rule_decode(const GdnDecodeShape& shape, const GdnDecodeInputs& in, void* o,
                             cudaStream_t stream);

/// A layer's whole mixer between its projections: convolution, gates, rule and gated norm.
struct GdnMixerInputs {
  InputRows qkv, a, b, z;  ///< bf16: q|k|v before the convolution; [v_heads]; [v_heads,head_dim]
  const void* conv_weight = nullptr;                ///< [channels,width]
  const void *a_log = nullptr, *dt_bias = nullptr;  ///< [v_heads]
  const void* norm_weight = nullptr;                ///< [head_dim]
  Element conv_weight_type, a_log_type, dt_bias_type, norm_weight_type;
  int width = 4;
  void* conv_states = nullptr;  ///< [slots,channels,width-1] bf16, shifted in place.
  void* states = nullptr;
  const int64_t* slots = nullptr;
  float scale = 1, eps = 0;
};

/// y [batch,v_heads*head_dim] bf16, with the roundings of the four kernels one after another.
void gated_delta_net_decode(const GdnDecodeShape& shape, const GdnMixerInputs& in, void* y,
                            cudaStream_t stream);

}  // namespace heddle::ops::cuda
