#pragma once

#include "ops/attention/attention.h"

/// cuDNN's attention of packed sequences of any lengths, one launch for all of them.
namespace heddle::ops::attention_cudnn {

/// Whether it takes these inputs: on sm_90 (head dimension 256 was proven nowhere else), a head
/// dimension that is a multiple of 16, offsets within 32 bits, and in every sequence at least as
/// many keys as queries.
bool ragged_fits(const Attention::Inputs& inputs);

/// Saves the log-sum-exp [Tq,Hq] fp32 and the table of ragged_layout.
Attention::Forward ragged_forward(const Attention::Inputs& inputs, bool keep);
Attention::Gradients ragged_backward(const Attention::Inputs& inputs,
                                     const Attention::Forward& saved, const at::Tensor& grad_o);

}  // namespace heddle::ops::attention_cudnn
