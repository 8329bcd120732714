#pragma once

#include "ops/attention/attention.h"

/// libtorch's call of cuDNN's attention, of sequences of one length. It adds the gradients of q in
/// any order, and makes a plan for every shape it meets, once, in about a fifth of a second: all
/// lengths here are multiples of 256, as of rows cut at a maximal length and of full packs.
namespace heddle::ops::attention_cudnn {

/// Whether all sequences have one length, and as many keys as queries.
bool one_length_fits(const Attention::Inputs& inputs);
Attention::Forward one_length_forward(const Attention::Inputs& inputs, bool keep);
Attention::Gradients one_length_backward(const Attention::Inputs& inputs,
                                         const Attention::Forward& saved, const at::Tensor& grad_o);
/// Tensors saved by one_length_forward, as packed_gradients reads them.
Attention::Forward one_length_as_packed(const Attention::Forward& saved);

/// Whether these are few long sequences of which some have keys before their queries, as context
/// parallelism cuts them. Each is run in two pieces: the keys that all its queries see, and
/// causally the last ones.
bool pieces_fit(const Attention::Inputs& inputs);
Attention::Forward pieces_forward(const Attention::Inputs& inputs, bool keep);
Attention::Gradients pieces_backward(const Attention::Inputs& inputs,
                                     const Attention::Forward& saved, const at::Tensor& grad_o);

}  // namespace heddle::ops::attention_cudnn
