#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/context_parallel/context_parallel.h"

namespace heddle::ops {
ContextParallel::ContextParallel(ContextPlan the_plan, comm::Group the_group, c10::Device device)
    : plan(std::move(the_plan)),
      group(std::move(the_group)),
      sequences(Sequences::from_host(plan.cu_seqlens(), device)),
      fragments(plan.fragment_sequences(device)) {
  if (plan.method() != ContextMethod::kState || !plan.any_leaves()) return;
  const std::int64_t stride = plan.most_tokens();
  std::vector<std::int32_t> boundaries = {0};
  for (const std::int64_t held : plan.held(plan.rank())) {
    std::vector<std::int64_t> rows;
    for (const Fragment& fragment : plan.fragments()) {
      if (fragment.segment != held) continue;
      const std::int64_t first = plan.cu_seqlens()[fragment.sequence];
      for (std::int64_t token = first; token < fragment.end;) {
        const std::int64_t stop = std::min(fragment.end, plan.end(plan.segment_of(token)));
        std::int64_t row = plan.gathered_row(token, stride);
        for (; token < stop; ++token) rows.push_back(row++);
      }
      boundaries.push_back(boundaries.back() + static_cast<std::int32_t>(fragment.end - first));
    }
    key_rows.push_back(device::upload(rows, device));
  }
  key_sequences = Sequences::from_host(std::move(boundaries), device);
}

at::Tensor context_conv_state(const at::Tensor& x, std::int64_t width,
                              const ContextParallel& context) {
  const ContextPlan& plan = context.plan;
  const std::int64_t halo = width - 1, C = x.size(1);
  const auto F = static_cast<std::int64_t>(plan.fragments().size());
  if (!plan.any_leaves()) return {};
  // The last rows of every segment, and after them one row of zeros. Of a shorter segment the
  // first row stands in for those before it, which are looked up further in front.
  std::vector<std::int64_t> ends;
  std::int64_t row = 0;
  for (const std::int64_t segment : plan.held(plan.rank())) {
    const std::int64_t size = plan.end(segment) - plan.begin(segment);
    for (std::int64_t i = size - halo; i < size; ++i)
      ends.push_back(row + std::max<std::int64_t>(i, 0));
    row += size;
  }
  const at::Tensor gathered =
      all_gather_rows(x.index_select(0, device::upload(ends, x.device())), context.group);
  const at::Tensor table = at::cat({gathered, at::zeros({1, C}, x.options())});
  const std::int64_t nothing = gathered.size(0);
  std::vector<std::int64_t> rows;
  for (const Fragment& fragment : plan.fragments()) {
    std::int64_t segment = fragment.segment - 1;
    std::vector<std::int64_t> before;  // newest first
    const std::int64_t first = plan.cu_seqlens()[fragment.sequence];
    for (std::int64_t token = fragment.begin - 1; token >= fragment.begin - halo; --token) {
      if (token < first) {
        before.push_back(nothing);
        continue;
      }
      while (token < plan.begin(segment)) --segment;
      before.push_back((plan.gathered_place(segment) + 1) * halo - (plan.end(segment) - token));
    }
    rows.insert(rows.end(), before.rbegin(), before.rend());
  }
  return table.index_select(0, device::upload(rows, x.device())).view({F, halo, C}).transpose(1, 2);
}

Attention::Inputs context_attention_inputs(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const ContextParallel& context) {
  const ContextPlan& plan = context.plan;
  if (!plan.any_leaves()) return {q, k, v, context.fragments, context.fragments, 0};
  const std::int64_t T = k.size(0), stride = plan.most_tokens(), heads = k.size(1), D = k.size(2);
  TORCH_CHECK(k.sizes() == v.sizes(), "context_attention_inputs: k ", k.sizes(), " and v ",
              v.sizes(), " must have one shape");
  // k and v side by side: [rows, 2, Hkv, D].
  const at::Tensor gathered = run_without_gradient([&] {
    at::Tensor own = at::zeros({stride, 2, heads, D}, k.options());
    own.narrow(0, 0, T).select(1, 0).copy_(k);
    own.narrow(0, 0, T).select(1, 1).copy_(v);
    at::Tensor all = at::empty({plan.ranks() * stride, 2, heads, D}, k.options());
    context.group.all_gather(all, own);
    return all;
  });
  const auto seen = [&](std::int64_t which) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& rows : context.key_rows)
      parts.push_back(gathered.select(1, which).index_select(0, rows));
    return at::cat(parts);
  };
  const Tensors keys_and_values = run_without_gradient([&] { return Tensors{seen(0), seen(1)}; });
  const Tensors recorded = with_gradient(
      "context_attention_inputs", {k, v}, keys_and_values,
      [context, T, stride, heads, D,
       options = k.options().requires_grad(false)](const Tensors& grads) -> Tensors {
        at::Tensor all = at::zeros({context.plan.ranks() * stride, 2, heads, D}, options);
        for (const std::int64_t which : {0, 1}) {
          if (!grads[which].defined()) continue;
          std::int64_t at = 0;
          at::Tensor to = all.select(1, which);
          for (const at::Tensor& rows : context.key_rows) {
            // Inside a segment no row comes twice: each sum has one order.
            to.index_add_(0, rows, grads[which].narrow(0, at, rows.numel()));
            at += rows.numel();
          }
        }
        at::Tensor own = at::empty({stride, 2, heads, D}, options);
        context.group.reduce_scatter_sum(own, all);
        own = own.narrow(0, 0, T);
        return {own.select(1, 0), own.select(1, 1)};
      });
  return {q, recorded[0], recorded[1], context.fragments, context.key_sequences, 0};
}

}  // namespace heddle::ops
