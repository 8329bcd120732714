#include "ops/attention/attention_decode.h"

#include <ATen/TensorOperators.h>

#include <bit>
#include <cmath>

#include "device/upload.h"
#include "ops/attention/kernels.h"
#include "ops/autograd.h"
#include "ops/compute_type.h"

namespace heddle::ops {
namespace {

void check(const AttentionDecode::Inputs& in, const CacheRows& rows) {
  const at::Tensor &q = in.q, &cache = in.k_cache;
  TORCH_CHECK(q.dim() == 3 && cache.dim() == 4 && cache.sizes() == in.v_cache.sizes() &&
                  cache.size(3) == q.size(2) && q.size(1) % cache.size(2) == 0 &&
                  cache.is_contiguous() && in.v_cache.is_contiguous(),
              "attention_decode: q ", q.sizes(), " must be [B,Hq,D] and the caches ", cache.sizes(),
              " and ", in.v_cache.sizes(), " [pages,tokens,Hkv,D], contiguous");
  TORCH_CHECK(std::has_single_bit(static_cast<std::uint64_t>(cache.size(1))),
              "attention_decode: pages of ", cache.size(1), " tokens; expected a power of two");
  TORCH_CHECK(in.k.dim() == 3 && in.k.sizes() == in.v.sizes() && in.k.size(0) == q.size(0) &&
                  in.k.size(1) == cache.size(2) && in.k.size(2) == q.size(2) &&
                  in.k.stride(2) == 1 && in.v.stride(2) == 1,
              "attention_decode: k ", in.k.sizes(), " and v ", in.v.sizes(),
              " must be [B,Hkv,D] with unit stride over D for q ", q.sizes(), " and caches ",
              cache.sizes());
  for (const at::Tensor& x : {in.k, in.v, in.k_cache, in.v_cache}) {
    TORCH_CHECK(x.scalar_type() == q.scalar_type(), "attention_decode: q is ", q.scalar_type(),
                ", keys, values and caches must be too, found ", x.scalar_type());
  }
  rows.check_pages("attention_decode", q.size(0), cache.size(0), cache.size(1));
}

}  // namespace

at::Tensor attention_decode(const KernelTable& kernels, const AttentionDecode::Inputs& inputs,
                            const CacheRows& rows) {
  check(inputs, rows);
  AttentionDecode::Inputs in = inputs;
  if (in.scale == 0) in.scale = 1 / std::sqrt(static_cast<double>(in.q.size(2)));
  const NoGradient guard;
  return kernels.get<AttentionDecode>().forward(in, rows);
}

void append_to_caches(const AttentionDecode::Inputs& in, const CacheRows& rows) {
  std::vector<std::int64_t> places;
  for (std::size_t b = 0; b < rows.lengths_host.size(); ++b)
    rows.append_places(b, rows.lengths_host[b], 1, in.k_cache.size(1), places);
  const at::Tensor place = device::upload(places, in.k_cache.device());
  in.k_cache.flatten(0, 1).index_copy_(0, place, in.k);
  in.v_cache.flatten(0, 1).index_copy_(0, place, in.v);
}

void register_attention_decode(Registry& registry) {
  registry.add<AttentionDecode>(KernelInfo::cpu("cpu"), {attention_cpu::decode});
  registry.add<AttentionDecode>(
      KernelInfo::reference(), {attention_reference::decode},
      decode_reference_rules<AttentionDecode::Dims>("a loop over the sequences"));
}

}  // namespace heddle::ops
