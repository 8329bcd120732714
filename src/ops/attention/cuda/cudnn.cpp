// cuDNN's fused attention: libtorch's call of it where all sequences have one length and where
// context parallelism cuts a few long ones; one ragged graph for any others; our own backward of
// all but those few where it fits; libtorch's FlashAttention-2 where nothing of cuDNN's fits. At
// head dimension 256 on an H200 cuDNN takes 0.45 (forward) and 0.7 (backward) of the time of that.
#include <ATen/Context.h>
#include <fmt/format.h>

#include "ops/attention/cuda/dense.h"
#include "ops/attention/cuda/packed.h"
#include "ops/attention/cuda/ragged.h"
#include "ops/attention/kernels.h"
#include "ops/cuda/element.h"
#include "ops/cuda/kernels.h"

namespace heddle::ops::attention_cudnn {
namespace {

enum class Path { kOneLength, kPieces, kRagged, kFlash };

/// Whether our own backward runs, the same bits on every run.
bool takes_ours(const Attention::Inputs& in) { return packed_fits(in) && packed_is_balanced(in); }

Path path_of(const Attention::Inputs& in) {
  const Path any_lengths = ragged_fits(in) ? Path::kRagged : Path::kFlash;
  // libtorch's call of cuDNN adds the gradients of q in any order; the others can be told not to.
  const bool any_order = !at::globalContext().deterministicAlgorithms();
  if (one_length_fits(in) && (any_order || takes_ours(in))) return Path::kOneLength;
  if (!any_order) return any_lengths;
  return pieces_fit(in) ? Path::kPieces : any_lengths;
}

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  switch (path_of(in)) {
    case Path::kOneLength:
      return one_length_forward(in, keep);
    case Path::kPieces:
      return pieces_forward(in, keep);
    case Path::kRagged:
      return ragged_forward(in, keep);
    case Path::kFlash:
      break;
  }
  return attention_flash_varlen::forward(in, keep);
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o) {
  switch (path_of(in)) {
    case Path::kOneLength:
      return takes_ours(in) ? packed_gradients(in, one_length_as_packed(saved), grad_o)
                            : one_length_backward(in, saved, grad_o);
    case Path::kPieces:
      return pieces_backward(in, saved, grad_o);
    case Path::kRagged:
      return takes_ours(in) ? packed_gradients(in, saved, grad_o)
                            : ragged_backward(in, saved, grad_o);
    case Path::kFlash:
      break;
  }
  return attention_flash_varlen::backward(in, saved, grad_o);
}

std::optional<std::string> refuse_device(const Target&) {
  if (const int found = cuda::compute_capability(); found != 90)
    return fmt::format("needs a device of compute capability 9.0, this one has sm_{}", found);
  return std::nullopt;
}

}  // namespace

}  // namespace heddle::ops::attention_cudnn

namespace heddle::ops::cuda {

void add_attention(Registry& registry) {
  using namespace attention_cudnn;
  KernelInfo info = KernelInfo::cuda("cuda.sm90_cudnn_or_flash_varlen",
                                     {c10::ScalarType::BFloat16, c10::ScalarType::Half});
  info.refuse_device = refuse_device;
  info.falls_back =
      "flash_varlen where cuDNN takes the batch neither as sequences of one length, nor as few "
      "long pieces, nor as one ragged graph";
  registry.add<Attention>(info, {forward, backward}, {.refuse = attention_flash_varlen::refuse});
  attention_flash_varlen::add(registry);
}

}  // namespace heddle::ops::cuda
