#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/registry.h"

namespace heddle::ops {

/// The sequences that a generation pass continues, and where the layers' caches hold them. Made
/// once a pass. Host and device copies: kernels of some devices want the numbers of the host, and
/// none has to upload them.
struct CacheRows {
  at::Tensor slots;    ///< [B] int64 on the device of the activations: slots of recurrent states.
  at::Tensor lengths;  ///< [B] int64 there: tokens in the cache before this pass.
  /// [B,P] int32 there: page p of sequence b holds the keys and values of its tokens from p times
  /// the tokens of a page on. Undefined for caches of recurrent states alone.
  at::Tensor pages;
  std::vector<std::int64_t> slots_host, lengths_host;  ///< Host copies of the numbers.
  std::vector<std::vector<std::int32_t>> pages_host;   ///< Without what fills rows up to P.
  std::int64_t longest = 0;                            ///< No length is above it.

  std::int64_t count() const { return slots.defined() ? slots.size(0) : 0; }

  /// TORCH_CHECKs that there are as many lengths as slots and that none is negative.
  static CacheRows from_host(std::vector<std::int64_t> slots, std::vector<std::int64_t> lengths,
                             c10::Device device);
  static CacheRows from_host(std::vector<std::int64_t> slots, std::vector<std::int64_t> lengths,
                             std::vector<std::vector<std::int32_t>> pages, c10::Device device);
  /// TORCH_CHECKs, in the name of `op`, that there is a row for each of `batch` sequences, and that
  /// the caches have every slot.
  void check(const char* op, std::int64_t batch, std::int64_t slots_of_cache) const;
  /// TORCH_CHECKs likewise that pages of so many tokens exist and have room for one token more.
  void check_pages(const char* op, std::int64_t batch, std::int64_t pages_of_cache,
                   std::int64_t page_tokens) const;
  /// Appends where the keys of sequence b's tokens [first, first + count) lie in caches of pages of
  /// so many tokens, counted in tokens.
  void append_places(std::size_t b, std::int64_t first, std::int64_t count,
                     std::int64_t page_tokens, std::vector<std::int64_t>& places) const;
};

/// Rules of the reference of a decoding operator: a warning that generation is slow with it.
/// `pieces`: how it runs.
template <class Dims>
KernelRules<Dims> decode_reference_rules(const std::string& pieces) {
  return {.warnings = [pieces](const Dims&) -> std::vector<std::string> {
    return {"no kernel of its own decodes here, " + pieces + " runs instead"};
  }};
}

}  // namespace heddle::ops
