// Joins the CUDA kernels of attention_decode with ATen.
#include "ops/attention/cuda/decode.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "ops/attention/kernels.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"

namespace heddle::ops::attention_decode_cuda {
namespace {

/// Heads one after another, rows that start on 16 bytes.
at::Tensor with_whole_rows(const at::Tensor& x) {
  const bool fits = x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2)) &&
                    x.stride(0) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return fits ? x : x.contiguous();
}

at::Tensor decode(const AttentionDecode::Inputs& in, const CacheRows& rows) {
  const cuda::OnDevice on(in.q);
  const at::Tensor q = with_whole_rows(in.q), k = with_whole_rows(in.k), v = with_whole_rows(in.v);
  at::Tensor o = at::empty(q.sizes(), q.options());
  cuda::AttentionDecodeShape shape;
  shape.batch = static_cast<int>(q.size(0));
  shape.heads = static_cast<int>(q.size(1));
  shape.kv_heads = static_cast<int>(k.size(1));
  shape.head_dim = static_cast<int>(q.size(2));
  shape.page_tokens = static_cast<int>(in.k_cache.size(1));
  shape.pages = static_cast<int>(rows.pages.size(1));
  shape.longest = rows.longest;
  cuda::AttentionDecodeInputs inputs;
  inputs.q = cuda::input_rows(q);
  inputs.k = cuda::input_rows(k);
  inputs.v = cuda::input_rows(v);
  inputs.k_cache = in.k_cache.mutable_data_ptr();
  inputs.v_cache = in.v_cache.mutable_data_ptr();
  inputs.pages = rows.pages.const_data_ptr<std::int32_t>();
  inputs.lengths = rows.lengths.const_data_ptr<std::int64_t>();
  inputs.scale = static_cast<float>(in.scale);
  const at::Tensor workspace = cuda::workspace_on(q, cuda::attention_decode_workspace(shape));
  cuda::attention_decode(shape, inputs, o.mutable_data_ptr(), workspace.mutable_data_ptr<float>(),
                         on.stream());
  return o;
}

std::optional<std::string> refuse(const AttentionDecode::Dims& dims) {
  if (dims.head_dim == 64 || dims.head_dim == 128 || dims.head_dim == 256) return std::nullopt;
  return fmt::format("head_dim must be 64, 128 or 256, it is {}", dims.head_dim);
}

}  // namespace

}  // namespace heddle::ops::attention_decode_cuda

namespace heddle::ops::cuda {

void add_attention_decode(Registry& registry) {
  using namespace attention_decode_cuda;
  registry.add<AttentionDecode>(KernelInfo::cuda("cuda.split_keys", {c10::ScalarType::BFloat16}),
                                {decode}, {.refuse = refuse});
}

}  // namespace heddle::ops::cuda
