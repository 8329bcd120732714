// Sizes that change from batch to batch are rounded up, so that few graphs serve them all: a graph
// takes any sequences up to a number and a length, which costs it a few percent.
#include "ops/attention/cuda/ragged.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "ops/attention/cuda/ragged_graph.h"
#include "ops/attention/kernels.h"
#include "ops/cuda/tensor.h"

namespace heddle::ops::attention_cudnn {
namespace {

/// At most an eighth above n, of few different values.
std::int64_t rounded_up(std::int64_t n) {
  const auto width = std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(n - 1, 0)));
  const std::int64_t step = std::int64_t{1} << std::max(static_cast<int>(width) - 3, 10);
  return (n + step - 1) / step * step;
}

std::int64_t power_of_two(std::int64_t n, std::int64_t least) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(n, least))));
}

GraphSizes sizes_of(const Attention::Inputs& in, bool is_backward, bool keep) {
  GraphSizes sizes{};
  sizes.device = in.q.device().index();
  sizes.is_backward = is_backward;
  sizes.keep = keep;
  sizes.is_bfloat16 = in.q.scalar_type() == at::kBFloat16;
  sizes.is_deterministic = at::globalContext().deterministicAlgorithms();
  sizes.is_square = in.q_sequences.cu_seqlens_host == in.k_sequences.cu_seqlens_host;
  sizes.batch = power_of_two(in.q_sequences.count(), 1);
  sizes.q_length = power_of_two(in.q_sequences.max_seqlen, 128);
  sizes.k_length = power_of_two(in.k_sequences.max_seqlen, 128);
  sizes.q_tokens = rounded_up(in.q.size(0));
  sizes.k_tokens = rounded_up(in.k.size(0));
  sizes.q_heads = in.q.size(1);
  sizes.k_heads = in.k.size(1);
  sizes.dim = in.q.size(2);
  const auto strides = [](const at::Tensor& x, std::int64_t* to) {
    to[0] = x.stride(0);
    to[1] = x.stride(1);
  };
  strides(in.k, sizes.k_strides);
  strides(in.v, sizes.v_strides);
  sizes.scale = attention_scale(in);
  return sizes;
}

/// Copies of what cuDNN cannot read: it wants the elements of a head side by side, and writes the
/// gradient of q where q itself would lie in a tensor of its own.
Attention::Inputs readable(const Attention::Inputs& in) {
  Attention::Inputs result = in;
  result.q = in.q.contiguous();
  result.k = cuda::with_unit_stride(in.k);
  result.v = cuda::with_unit_stride(in.v);
  return result;
}

at::Tensor layout_of(const Attention::Inputs& in, const cuda::OnDevice& on) {
  const std::int64_t batch = power_of_two(in.q_sequences.count(), 1);
  at::Tensor table = at::empty(
      {static_cast<std::int64_t>(cuda::RaggedRow::kCount), cuda::ragged_row_length(batch)},
      in.q_sequences.cu_seqlens.options());
  const std::int64_t q_heads = in.q.size(1), dim = in.q.size(2);
  cuda::ragged_layout({in.q_sequences.count(), batch, q_heads * dim, in.k.stride(0), in.v.stride(0),
                       in.k.size(1) * dim, q_heads},
                      in.q_sequences.cu_seqlens.const_data_ptr<std::int32_t>(),
                      in.k_sequences.cu_seqlens.const_data_ptr<std::int32_t>(),
                      table.mutable_data_ptr<std::int32_t>(), on.stream());
  return table;
}

void add(Pack& pack, Uid uid, const at::Tensor& x) { pack[uid] = x.data_ptr(); }

Pack pack_of(const Attention::Inputs& in, const at::Tensor& table) {
  Pack pack;
  add(pack, kQ, in.q);
  add(pack, kK, in.k);
  add(pack, kV, in.v);
  for (std::int64_t row = 0; row < table.size(0); ++row)
    pack[kTable + row] = table.mutable_data_ptr<std::int32_t>() + row * table.stride(0);
  return pack;
}

}  // namespace

bool ragged_fits(const Attention::Inputs& in) {
  if (in.q.size(2) % 16 != 0) return false;
  const std::vector<std::int32_t>&cu_q = in.q_sequences.cu_seqlens_host,
        &cu_k = in.k_sequences.cu_seqlens_host;
  for (std::size_t s = 0; s + 1 < cu_q.size(); ++s) {
    if (cu_k[s + 1] - cu_k[s] < cu_q[s + 1] - cu_q[s]) return false;
  }
  const auto reaches = [](const at::Tensor& x) {
    return x.size(0) * std::max(x.stride(0), x.size(1) * x.size(2));
  };
  return std::max({reaches(in.q), reaches(in.k), reaches(in.v)}) <=
         std::numeric_limits<std::int32_t>::max();
}

Attention::Forward ragged_forward(const Attention::Inputs& inputs, bool keep) {
  const cuda::OnDevice on(inputs.q);
  const Attention::Inputs in = readable(inputs);
  Attention::Forward result;
  result.o = at::empty(in.q.sizes(), in.q.options());
  if (in.q.size(0) == 0) return result;
  const at::Tensor table = layout_of(in, on);
  Pack pack = pack_of(in, table);
  add(pack, kO, result.o);
  if (keep) {
    const at::Tensor lse =
        at::empty({in.q.size(0), in.q.size(1)}, in.q.options().dtype(at::kFloat));
    add(pack, kLse, lse);
    result.saved = {lse, table};
  }
  execute(sizes_of(in, /*is_backward=*/false, keep), pack, in.q);
  return result;
}

Attention::Gradients ragged_backward(const Attention::Inputs& inputs,
                                     const Attention::Forward& saved, const at::Tensor& grad_o) {
  const cuda::OnDevice on(inputs.q);
  const Attention::Inputs in = readable(inputs);
  // Zeros, as keys of a sequence without queries are not visited.
  Attention::Gradients result = {at::empty(in.q.sizes(), in.q.options()),
                                 at::zeros(in.k.sizes(), in.k.options()),
                                 at::zeros(in.v.sizes(), in.v.options())};
  if (in.q.size(0) == 0) return result;
  const at::Tensor dy = grad_o.contiguous();
  Pack pack = pack_of(in, saved.saved[1]);
  add(pack, kO, saved.o);
  add(pack, kGradO, dy);
  add(pack, kLse, saved.saved[0]);
  add(pack, kDq, result.q);
  add(pack, kDk, result.k);
  add(pack, kDv, result.v);
  execute(sizes_of(in, /*is_backward=*/true, /*keep=*/true), pack, in.q);
  return result;
}

}  // namespace heddle::ops::attention_cudnn
