#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// One matrix, or a stack of them, in a step of Muon. All tensors have its shape.
struct MuonTensor {
  at::Tensor parameter;        ///< [out,in] or [n,out,in], updated in place.
  at::Tensor gradient;         ///< Any floating dtype.
  at::Tensor momentum_buffer;  ///< fp32 (fp64 for fp64), updated in place.
  at::Tensor master;           ///< fp32 copy of a bf16 parameter; undefined if none.
  double weight_decay = 0;
};

/// "Muon" (Keller Jordan, 2024), with the operations of torch.optim.Muon in their order. First half
/// of a step: buffer += (1 - momentum) (g - buffer). Returns what is orthogonalised, Nesterov's
/// g + momentum (buffer - g), in the buffer's dtype.
at::Tensor muon_direction(const MuonTensor& tensor, double momentum, double gradient_multiplier);

/// The nearest matrix with equal singular values, about: five steps of Newton and Schulz with the
/// coefficients 3.4445, -4.7750, 2.0315, after which they are between 0.7 and 1.2. x [out,in] or
/// [n,out,in], each matrix by itself. Computed in fp64 for fp64, in fp32 on a CPU, else in bf16.
/// Returns the dtype of `x`.
at::Tensor orthogonalized(const at::Tensor& x);

/// 0.2 sqrt(max(out, in)): gives the orthogonal matrix the root mean square of AdamW's updates, so
/// that both take the same learning rate ("Muon is Scalable for LLM Training", arXiv 2502.16982).
double muon_scale(std::int64_t out, std::int64_t in);

/// Second half: p *= 1 - lr wd; p -= lr * scale * update, `scale` being that of the matrix, of
/// which the tensor may be a part.
void muon_apply(const MuonTensor& tensor, const at::Tensor& update, double lr, double scale);

}  // namespace heddle::ops
