#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/attention/cpu/vector/attention_blocks.h"
#include "ops/attention/kernels.h"
#include "ops/compute_type.h"

namespace heddle::ops::attention_cpu {
namespace {

constexpr std::int64_t kBlock = kAttentionBlock;

struct Sequence {
  std::int64_t q_begin, queries, k_begin, keys;
  std::int64_t packed_begin;  ///< First token of its blocks in the packed keys and values.
};

struct Layout {
  std::vector<Sequence> sequences;
  std::int64_t packed_tokens = 0;
};

Layout layout_of(const Attention::Inputs& in) {
  Layout layout;
  for (std::size_t s = 0; s < static_cast<std::size_t>(in.q_sequences.count()); ++s) {
    const auto& q = in.q_sequences.cu_seqlens_host;
    const auto& k = in.k_sequences.cu_seqlens_host;
    layout.sequences.push_back(
        {q[s], q[s + 1] - q[s], k[s], k[s + 1] - k[s], layout.packed_tokens});
    layout.packed_tokens += (k[s + 1] - k[s] + kBlock - 1) / kBlock * kBlock;
  }
  return layout;
}

/// Calls body(task) for every task, the largest first, each whole on one thread. What a
/// task computes does not depend on the thread, so neither do the bits.
template <class Body>
void run_tasks(std::size_t count, const std::vector<std::int64_t>& cost, const Body& body) {
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  std::atomic<std::size_t> next{0};
  const int threads = static_cast<int>(
      std::min<std::size_t>(count, static_cast<std::size_t>(at::get_num_threads())));
  at::parallel_for(0, threads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t worker = first; worker < last; ++worker) {
      for (std::size_t i = next++; i < count; i = next++) body(order[i]);
    }
  });
}

const void* element_at(const at::Tensor& x, std::int64_t token, std::int64_t head) {
  return static_cast<const char*>(x.const_data_ptr()) +
         (token * x.stride(0) + head * x.stride(1)) * static_cast<std::int64_t>(x.element_size());
}

void* element_at(at::Tensor& x, std::int64_t token, std::int64_t head) {
  return static_cast<char*>(x.mutable_data_ptr()) +
         (token * x.stride(0) + head * x.stride(1)) * static_cast<std::int64_t>(x.element_size());
}

/// Keys or values of all heads in blocks of compute_type: [Hkv, packed tokens, padded], each block
/// as rows or as columns.
struct Packed {
  at::Tensor rows, columns;
};

Packed pack(const AttentionKernels& kernels, const Layout& layout, const at::Tensor& x,
            bool want_rows, bool want_columns) {
  const std::int64_t heads = x.size(1), padded = attention_padded_dim(x.size(2));
  const auto options = x.options().dtype(compute_type(x));
  Packed packed;
  if (want_rows) packed.rows = at::empty({layout.packed_tokens, heads, padded}, options);
  if (want_columns) packed.columns = at::empty({layout.packed_tokens, heads, padded}, options);
  // [head][packed token] order in memory: a head's blocks of one sequence follow each other.
  if (want_rows)
    packed.rows = packed.rows.view({heads, layout.packed_tokens, padded}).transpose(0, 1);
  if (want_columns) {
    packed.columns = packed.columns.view({heads, layout.packed_tokens, padded}).transpose(0, 1);
  }
  const std::size_t count = layout.sequences.size() * static_cast<std::size_t>(heads);
  std::vector<std::int64_t> cost(count);
  for (std::size_t i = 0; i < count; ++i) {
    cost[i] = layout.sequences[i / static_cast<std::size_t>(heads)].keys;
  }
  run_tasks(count, cost, [&](std::size_t i) {
    const Sequence& s = layout.sequences[i / static_cast<std::size_t>(heads)];
    const auto head = static_cast<std::int64_t>(i) % heads;
    if (s.keys == 0) return;
    kernels.pack(element_at(x, s.k_begin, head), x.stride(0), s.keys, x.size(2),
                 want_rows ? element_at(packed.rows, s.packed_begin, head) : nullptr,
                 want_columns ? element_at(packed.columns, s.packed_begin, head) : nullptr);
  });
  return packed;
}

at::Tensor with_unit_stride(const at::Tensor& x) {
  return x.stride(2) == 1 || x.size(2) == 1 ? x : x.contiguous();
}

/// Scratch memory in elements of the dtype.
at::Tensor scratch(std::int64_t elements, c10::ScalarType type) {
  return at::empty({elements}, at::TensorOptions().dtype(type));
}

}  // namespace

Attention::Forward forward(const Attention::Inputs& in, bool keep) {
  const at::Tensor q = with_unit_stride(in.q), k = with_unit_stride(in.k),
                   v = with_unit_stride(in.v);
  const std::int64_t hq = q.size(1), group = hq / k.size(1), dim = q.size(2),
                     padded = attention_padded_dim(dim);
  const c10::ScalarType type = compute_type(q);
  const AttentionKernels kernels = HEDDLE_CPU_SELECT(attention_kernels)(cpu_element(q));
  const Layout layout = layout_of(in);
  Packed keys = pack(kernels, layout, k, false, true);
  Packed values = pack(kernels, layout, v, true, false);
  Attention::Forward result;
  result.o = at::empty(q.sizes(), q.options());
  at::Tensor lse;
  if (keep) lse = at::empty({q.size(0), hq}, q.options().dtype(type));

  struct Task {
    const Sequence* sequence;
    std::int64_t head, begin, end;
  };
  std::vector<Task> tasks;
  std::vector<std::int64_t> cost;
  for (const Sequence& s : layout.sequences) {
    for (std::int64_t head = 0; head < hq; ++head) {
      for (std::int64_t begin = 0; begin < s.queries; begin += kBlock) {
        const std::int64_t end = std::min(begin + kBlock, s.queries);
        tasks.push_back({&s, head, begin, end});
        cost.push_back((end - begin) * std::max<std::int64_t>(s.keys - s.queries + end, 0));
      }
    }
  }
  run_tasks(tasks.size(), cost, [&](std::size_t i) {
    const Task& task = tasks[i];
    const Sequence& s = *task.sequence;
    const at::Tensor memory = scratch(attention_forward_scratch(padded), type);
    AttentionHead a;
    a.queries = s.queries;
    a.keys = s.keys;
    a.dim = dim;
    a.padded = padded;
    a.scale = attention_scale(in);
    a.q = element_at(q, s.q_begin, task.head);
    a.q_stride = q.stride(0);
    a.out = element_at(result.o, s.q_begin, task.head);
    a.o_stride = result.o.stride(0);
    if (keep) a.lse = element_at(lse, s.q_begin, task.head);
    a.lse_stride = hq;
    a.key_columns = element_at(keys.columns, s.packed_begin, task.head / group);
    a.value_rows = element_at(values.rows, s.packed_begin, task.head / group);
    a.scratch = memory.mutable_data_ptr();
    kernels.forward(a, task.begin, task.end);
  });
  if (keep) result.saved = {lse};
  return result;
}

Attention::Gradients backward(const Attention::Inputs& in, const Attention::Forward& saved,
                              const at::Tensor& grad_o_in) {
  const at::Tensor q = with_unit_stride(in.q), k = with_unit_stride(in.k),
                   v = with_unit_stride(in.v);
  const at::Tensor grad_o = grad_o_in.contiguous();
  const std::int64_t hq = q.size(1), hkv = k.size(1), group = hq / hkv, dim = q.size(2),
                     padded = attention_padded_dim(dim);
  const c10::ScalarType type = compute_type(q);
  const AttentionKernels kernels = HEDDLE_CPU_SELECT(attention_kernels)(cpu_element(q));
  const Layout layout = layout_of(in);
  Packed keys = pack(kernels, layout, k, true, true);
  Packed values = pack(kernels, layout, v, false, true);
  at::Tensor dq = at::empty(q.sizes(), q.options());
  const at::Tensor lse = saved.saved[0];
  // Each query head writes its own share of dk and dv; the shares of a group are added afterwards.
  const auto options = q.options().dtype(type);
  at::Tensor dk_heads = at::empty({hq, layout.packed_tokens, padded}, options);
  at::Tensor dv_heads = at::empty({hq, layout.packed_tokens, padded}, options);
  const std::size_t count = layout.sequences.size() * static_cast<std::size_t>(hq);
  std::vector<std::int64_t> cost(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Sequence& s = layout.sequences[i / static_cast<std::size_t>(hq)];
    cost[i] = s.queries * s.keys;
  }
  run_tasks(count, cost, [&](std::size_t i) {
    const Sequence& s = layout.sequences[i / static_cast<std::size_t>(hq)];
    const auto head = static_cast<std::int64_t>(i) % hq;
    const at::Tensor memory = scratch(attention_backward_scratch(s.queries, padded), type);
    AttentionHead a;
    a.queries = s.queries;
    a.keys = s.keys;
    a.dim = dim;
    a.padded = padded;
    a.scale = attention_scale(in);
    a.q = element_at(q, s.q_begin, head);
    a.q_stride = q.stride(0);
    a.o = element_at(saved.o, s.q_begin, head);
    a.grad_o = element_at(grad_o, s.q_begin, head);
    a.grad_q = element_at(dq, s.q_begin, head);
    a.o_stride = grad_o.stride(0);
    a.lse = const_cast<void*>(element_at(lse, s.q_begin, head));  // read only in the backward
    a.lse_stride = hq;
    a.key_rows = element_at(keys.rows, s.packed_begin, head / group);
    a.key_columns = element_at(keys.columns, s.packed_begin, head / group);
    a.value_columns = element_at(values.columns, s.packed_begin, head / group);
    at::Tensor dk_head = dk_heads.transpose(0, 1), dv_head = dv_heads.transpose(0, 1);
    a.grad_k = element_at(dk_head, s.packed_begin, head);
    a.grad_v = element_at(dv_head, s.packed_begin, head);
    a.scratch = memory.mutable_data_ptr();
    kernels.backward(a);
  });
  Attention::Gradients result{dq, at::empty(k.sizes(), k.options()),
                              at::empty(v.sizes(), v.options())};
  const auto collect = [&](const at::Tensor& shares, at::Tensor& gradient) {
    for (const Sequence& s : layout.sequences) {
      if (s.keys == 0) continue;
      const at::Tensor sum = shares.view({hkv, group, layout.packed_tokens, padded})
                                 .narrow(2, s.packed_begin, s.keys)
                                 .narrow(3, 0, dim)
                                 .sum(1);
      gradient.narrow(0, s.k_begin, s.keys).copy_(sum.transpose(0, 1));
    }
  };
  collect(dk_heads, result.k);
  collect(dv_heads, result.v);
  return result;
}

at::Tensor decode(const AttentionDecode::Inputs& in, const CacheRows& rows) {
  const at::Tensor q = in.q.contiguous();
  const std::int64_t hkv = in.k.size(1), group = q.size(1) / hkv, dim = q.size(2);
  const c10::ScalarType type = compute_type(q);
  const std::size_t bytes = static_cast<std::size_t>(dim) * q.element_size();
  const AttentionKernels kernels = HEDDLE_CPU_SELECT(attention_kernels)(cpu_element(q));
  at::Tensor o = at::empty(q.sizes(), q.options());
  const std::int64_t page_tokens = in.k_cache.size(1);
  const std::size_t count = rows.lengths_host.size() * static_cast<std::size_t>(hkv);
  std::vector<std::int64_t> cost(count);
  for (std::size_t i = 0; i < count; ++i)
    cost[i] = rows.lengths_host[i / static_cast<std::size_t>(hkv)] + 1;
  run_tasks(count, cost, [&](std::size_t i) {
    const std::size_t b = i / static_cast<std::size_t>(hkv);
    const auto head = static_cast<std::int64_t>(i) % hkv;
    const auto row = static_cast<std::int64_t>(b);
    const std::int64_t before = rows.lengths_host[b];
    const at::Tensor memory = scratch(group * (before + 1 + attention_padded_dim(dim)), type);
    at::Tensor k = in.k_cache.flatten(0, 1), v = in.v_cache.flatten(0, 1);
    const std::vector<std::int32_t>& pages = rows.pages_host[b];
    const std::int64_t place =
        pages[static_cast<std::size_t>(before / page_tokens)] * page_tokens + before % page_tokens;
    std::memcpy(element_at(k, place, head), element_at(in.k, row, head), bytes);
    std::memcpy(element_at(v, place, head), element_at(in.v, row, head), bytes);
    AttentionStep step;
    step.q = element_at(q, row, head * group);
    step.k = element_at(k, 0, head);
    step.v = element_at(v, 0, head);
    step.stride = k.stride(0);
    step.pages = pages.data();
    step.page_tokens = page_tokens;
    step.keys = before + 1;
    step.group = group;
    step.dim = dim;
    step.scale = in.scale;
    step.out = element_at(o, row, head * group);
    step.scratch = memory.mutable_data_ptr();
    kernels.step(step);
  });
  return o;
}

}  // namespace heddle::ops::attention_cpu
