#pragma once

#include "ops/attention/attention.h"

/// Our own backward of packed sequences, after cuDNN's ragged forward.
namespace heddle::ops::attention_cudnn {

/// Whether it takes these inputs: bf16 at head dimension 256 on sm_90, as many keys as queries.
bool packed_fits(const Attention::Inputs& inputs);

/// Whether they keep the device busy: a CTA takes the queries of all heads that read 64 keys, so
/// the longest sequence must not outlast the others' share by more than a tenth.
bool packed_is_balanced(const Attention::Inputs& inputs);

/// `saved`: of ragged_forward. The same bits on every run.
Attention::Gradients packed_gradients(const Attention::Inputs& inputs,
                                      const Attention::Forward& saved, const at::Tensor& grad_o);

}  // namespace heddle::ops::attention_cudnn
