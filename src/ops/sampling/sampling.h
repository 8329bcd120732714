#pragma once

#include "ops/registry.h"

namespace heddle::ops {

struct SampleTokens {
  static constexpr const char* kName = "sample_tokens";
  using Dims = AnyDims;
  /// How each row is drawn. All on the device of the logits.
  struct Inputs {
    at::Tensor logits;         ///< [B,V], V up to 2^19
    at::Tensor temperature;    ///< [B] float32; 0: the most likely token (ties: the lowest id).
    at::Tensor top_p, min_p;   ///< [B] float64; 1 and 0: no cut.
    at::Tensor top_k;          ///< [B] int64; 0: no cut.
    at::Tensor seeds;          ///< [B] int64, patterns of unsigned numbers: the rows' streams.
    at::Tensor positions;      ///< [B] int64: of the token in its stream.
    std::int64_t support = 0;  ///< Ids told of what the cuts of a row keep, at most.
  };
  struct Tokens {
    at::Tensor ids;       ///< [B] int64
    at::Tensor logprobs;  ///< [B] float64, of the softmax of the logits: temperature and cuts do
                          ///< not enter.
    at::Tensor sampled_logprobs;  ///< [B] float64, of the distribution that it was drawn from, up
                                  ///< to 2e-6.
    /// [B,support] int64: the ids that the cuts of a row keep, in any order, then -1; of a row
    /// without cuts none. Undefined unless asked for.
    at::Tensor supports;
  };
  /// Numbers of a step that goes on by itself, from which its next run begins. All but `told` are
  /// on the device of the logits.
  struct Next {
    at::Tensor tokens;   ///< [B] int64: the drawn ids, 0 where is_real is.
    at::Tensor counts;   ///< [n,B] int64: is_real is added. Positions may be among them.
    at::Tensor is_real;  ///< [B] int64: 1 or 0.
    /// [2,B,3] float64 in pinned memory of the host, which reads it while the next run goes on: id,
    /// logprob and sampled logprob of a draw at position p are in [p % 2].
    at::Tensor told;
  };
  struct Functions {
    Tokens (*forward)(const Inputs&);
    void (*go_on)(const Inputs&, const Next&) = nullptr;  ///< Null: only CUDA devices do.
  };
};

/// Draws one token of each row. Order: temperature; the top_k most likely tokens (of equals the
/// lowest ids); of these the fewest most likely ones that have a share of top_p together; of these
/// those of at least min_p times the most likely one's probability; drawn in the order of ids by
/// CounterRng(seed, "sample").uniform(position). Masses are whole numbers (mass.h), so every device
/// draws the same token of the same logits, whatever the batch. Not differentiable.
SampleTokens::Tokens sample_tokens(const KernelTable& kernels, const SampleTokens::Inputs& inputs);

/// Draws as sample_tokens() does, without supports, and leaves the tokens where the next run of a
/// recorded step wants them. Throws InternalError where the kernel has no such form.
void sample_and_go_on(const KernelTable& kernels, const SampleTokens::Inputs& inputs,
                      const SampleTokens::Next& next);

}  // namespace heddle::ops
