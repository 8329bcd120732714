// Attention by npu_fusion_attention in its packed layout, TND, with the compressed causal mask.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <memory>

#include "device/upload.h"
#include "ops/attention/kernels.h"
#include "ops/npu/call.h"
#include "ops/npu/kernels.h"

namespace heddle::ops::attention_npu {
namespace {

/// The operator cuts this one tile of a causal mask to every length itself.
constexpr std::int64_t kCompressedMask = 2048;
/// Causal, aligned at the end of both sequences.
constexpr std::int64_t kRightDownCausal = 3;

/// True where a key is masked: above the diagonal. Built once and never destroyed, as a tensor must
/// not outlive the platform of its device. A mask of [Tq,Tk] is never built: the kernel would fail
/// asynchronously.
const at::Tensor& compressed_mask(c10::Device device) {
  static const at::Tensor& mask = *new at::Tensor(
      at::ones({kCompressedMask, kCompressedMask}, at::TensorOptions(device).dtype(at::kBool))
          .triu(1));
  TORCH_CHECK(mask.device() == device, "npu.fusion_attention: this process has used ",
              mask.device(), " and is now given ", device);
  return mask;
}

/// Cumulative lengths without the leading 0, of the host: they came with the batch. Sequences that
/// are empty on both sides are left out.
struct Lengths {
  std::vector<std::int64_t> q, k;
  explicit Lengths(const Attention::Inputs& in) {
    const auto &cu_q = in.q_sequences.cu_seqlens_host, &cu_k = in.k_sequences.cu_seqlens_host;
    for (std::size_t s = 1; s < cu_q.size(); ++s) {
      if (cu_q[s] == cu_q[s - 1] && cu_k[s] == cu_k[s - 1]) continue;
      q.push_back(cu_q[s]);
      k.push_back(cu_k[s]);
    }
  }
};

npu::Named common_arguments(const Attention::Inputs& in, const Lengths& lengths) {
  return {{"query", in.q.contiguous()},         {"key", in.k.contiguous()},
          {"value", in.v.contiguous()},         {"head_num", in.q.size(1)},
          {"input_layout", std::string("TND")}, {"atten_mask", compressed_mask(in.q.device())},
          {"actual_seq_qlen", lengths.q},       {"actual_seq_kvlen", lengths.k},
          {"sparse_mode", kRightDownCausal}};
}

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  Attention::Forward result;
  if (in.q.size(0) == 0) {
    result.o = at::empty_like(in.q);
    return result;
  }
  npu::Named arguments = common_arguments(in, Lengths(in));
  arguments.emplace_back("scale", attention_scale(in));
  const auto out = npu::call("npu_fusion_attention", arguments);
  result.o = out[0];
  if (keep) result.saved = {out[1], out[2], out[3]};  // maximum and sum of the softmax, its output
  return result;
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o) {
  if (in.q.size(0) == 0) return {at::zeros_like(in.q), at::zeros_like(in.k), at::zeros_like(in.v)};
  npu::Named arguments = common_arguments(in, Lengths(in));
  arguments.emplace_back("scale_value", attention_scale(in));
  arguments.emplace_back("dy", grad_o.to(in.q.scalar_type()).contiguous());
  arguments.emplace_back("softmax_max", saved.saved[0]);
  arguments.emplace_back("softmax_sum", saved.saved[1]);
  arguments.emplace_back("softmax_in", saved.saved[2]);
  arguments.emplace_back("attention_in", saved.o);
  const auto out = npu::call("npu_fusion_attention_grad", arguments);
  return {out[0], out[1], out[2]};
}

/// The keys of the sequences are packed for one call: a copy of what is read anyway.
at::Tensor decode(const AttentionDecode::Inputs& in, const CacheRows& rows) {
  if (rows.count() == 0) return at::empty_like(in.q);
  append_to_caches(in, rows);
  std::vector<std::int64_t> places;
  std::vector<std::int32_t> cu_q{0}, cu_k{0};
  for (std::size_t b = 0; b < rows.lengths_host.size(); ++b) {
    const std::int64_t seen = rows.lengths_host[b] + 1;
    rows.append_places(b, 0, seen, in.k_cache.size(1), places);
    cu_q.push_back(cu_q.back() + 1);
    cu_k.push_back(cu_k.back() + static_cast<std::int32_t>(seen));
  }
  Attention::Inputs packed;
  packed.q = in.q;
  const at::Tensor index = device::upload(places, in.q.device());
  packed.k = in.k_cache.flatten(0, 1).index_select(0, index);
  packed.v = in.v_cache.flatten(0, 1).index_select(0, index);
  // The operator takes the lengths of the host.
  packed.q_sequences.cu_seqlens_host = cu_q;
  packed.k_sequences.cu_seqlens_host = cu_k;
  packed.scale = in.scale;
  return forward(packed, /*keep=*/false).o;
}

std::optional<std::string> refuse(const Attention::Dims& dims) {
  if (dims.head_dim % 16 != 0 || dims.head_dim > 768)
    return fmt::format("head_dim {} is no multiple of 16 up to 768", dims.head_dim);
  return std::nullopt;
}

}  // namespace

}  // namespace heddle::ops::attention_npu

namespace heddle::ops::npu {

void add_attention(Registry& registry) {
  using namespace attention_npu;
  const KernelInfo info = KernelInfo::ascend("npu.fusion_attention", dtypes());
  registry.add<Attention>(info, {forward, backward}, {.refuse = refuse});
  registry.add<AttentionDecode>(info, {decode}, {.refuse = refuse});
}

}  // namespace heddle::ops::npu
