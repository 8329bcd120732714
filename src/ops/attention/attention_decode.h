#pragma once

#include "ops/attention/attention.h"
#include "ops/cache_rows.h"
#include "ops/registry.h"

namespace heddle::ops {

struct AttentionDecode {
  static constexpr const char* kName = "attention_decode";
  using Dims = Attention::Dims;
  struct Inputs {
    at::Tensor q;                 ///< [B,Hq,D]
    at::Tensor k, v;              ///< [B,Hkv,D] of the new token, unit stride over D.
    at::Tensor k_cache, v_cache;  ///< [pages,tokens,Hkv,D] contiguous, appended to; tokens a power
                                  ///< of two.
    double scale = 0;             ///< 0 means D^-1/2.
  };
  struct Functions {
    /// `scale` is set.
    at::Tensor (*forward)(const Inputs&, const CacheRows&);
  };
};

/// Attention of one new token in each of B sequences: writes its key and value to its place in the
/// sequence's pages and attends over all keys of the sequence, softmax in fp32 or wider. Query head
/// h reads KV head h / (Hq/Hkv). Returns o [B,Hq,D]. Not differentiable. TORCH_CHECKs that the
/// caches have the pages and room for one more token; sequences may share pages, but not those that
/// they write to.
at::Tensor attention_decode(const KernelTable& kernels, const AttentionDecode::Inputs& inputs,
                            const CacheRows& rows);

}  // namespace heddle::ops
