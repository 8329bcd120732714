#pragma once

#include <optional>
#include <string>
#include <utility>

#include "ops/attention/attention.h"
#include "ops/attention/attention_decode.h"

namespace heddle::ops::attention_reference {

Attention::Forward forward(const Attention::Inputs& inputs, bool keep);
Attention::Gradients backward(const Attention::Inputs& inputs, const Attention::Forward& saved,
                              const at::Tensor& grad_o);
at::Tensor decode(const AttentionDecode::Inputs& inputs, const CacheRows& rows);

}  // namespace heddle::ops::attention_reference

namespace heddle::ops {

/// The scale asked for, or head_dim^-1/2.
double attention_scale(const Attention::Inputs& inputs);

/// Writes the new tokens' keys and values into the caches.
void append_to_caches(const AttentionDecode::Inputs& inputs, const CacheRows& rows);

/// Adds the kernels of attention_decode.
void register_attention_decode(Registry& registry);

}  // namespace heddle::ops

namespace heddle::ops::attention_flash_varlen {

/// Why head dimensions do not fit libtorch's fused attention; nothing if they do.
std::optional<std::string> refuse(const Attention::Dims& dims);
Attention::Forward forward(const Attention::Inputs& inputs, bool keep);
Attention::Gradients backward(const Attention::Inputs& inputs, const Attention::Forward& saved,
                              const at::Tensor& grad_o);
void add(Registry& registry);

}  // namespace heddle::ops::attention_flash_varlen

namespace heddle::ops::output_gate_reference {

at::Tensor forward(const at::Tensor& x, const at::Tensor& gate);
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const at::Tensor& gate,
                                           const at::Tensor& grad_y);

}  // namespace heddle::ops::output_gate_reference

namespace heddle::ops::output_gate_cpu {

at::Tensor forward(const at::Tensor& x, const at::Tensor& gate);
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const at::Tensor& gate,
                                           const at::Tensor& grad_y);

}  // namespace heddle::ops::output_gate_cpu

namespace heddle::ops::attention_cpu {

Attention::Forward forward(const Attention::Inputs& inputs, bool keep);
Attention::Gradients backward(const Attention::Inputs& inputs, const Attention::Forward& saved,
                              const at::Tensor& grad_o);
at::Tensor decode(const AttentionDecode::Inputs& inputs, const CacheRows& rows);

}  // namespace heddle::ops::attention_cpu
