#include "ops/gated_delta_net/cpu/rule.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "ops/compute_type.h"
#include "ops/gated_delta_net/cpu/rows.h"
#include "ops/gated_delta_net/cpu/rule_kernels.h"

namespace heddle::ops::gdn_cpu {
namespace {

const RuleKernels& chosen_rule_kernels() { return HEDDLE_CPU_SELECT(rule_kernels)(); }

void check_head_dims(const at::Tensor& q, const at::Tensor& v) {
  const auto reason = refuse({.head_k_dim = q.size(2), .head_v_dim = v.size(2)});
  TORCH_CHECK(!reason, "cpu.chunk: ", reason.value_or(""));
}

const void* data(const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
void* mutable_data(const at::Tensor& x) { return x.defined() ? x.mutable_data_ptr() : nullptr; }

/// The inputs as the kernels want them; holds what had to be copied.
struct RuleCall {
  at::Tensor q, k, v, g, beta, initial;
  std::vector<long> first_segment;
  RuleArgs args{};

  explicit RuleCall(const GatedDeltaRule::Inputs& in)
      : q(head_rows(in.q)),
        k(head_rows(in.k)),
        v(head_rows(in.v)),
        g(in.g.contiguous()),
        beta(in.beta.contiguous()),
        initial(in.initial_state.defined() ? in.initial_state.contiguous() : at::Tensor()) {
    first_segment.push_back(0);
    for (std::int64_t s = 0; s < in.sequences.count(); ++s) {
      const long n = in.sequences.cu_seqlens_host[s + 1] - in.sequences.cu_seqlens_host[s];
      first_segment.push_back(first_segment.back() + (n + kSegment - 1) / kSegment);
    }
    args.Hk = q.size(1);
    args.Hv = v.size(1);
    args.K = q.size(2);
    args.V = v.size(2);
    args.T = q.size(0);
    args.scale =
        in.options.scale != 0 ? in.options.scale : 1 / std::sqrt(static_cast<double>(args.K));
    args.normalize = in.options.normalize_qk;
    args.cu_seqlens = in.sequences.cu_seqlens_host.data();
    args.first_segment = first_segment.data();
    args.q = data(q);
    args.k = data(k);
    args.v = data(v);
    args.q_stride = q.stride(0);
    args.k_stride = k.stride(0);
    args.v_stride = v.stride(0);
    args.g = data(g);
    args.beta = data(beta);
    args.initial = data(initial);
  }
  long segments() const { return first_segment.back(); }
};

/// The units of work, longest first, and into how many shares each group of value heads is cut.
struct Plan {
  std::vector<RuleUnit> units;
  long parts = 1, heads = 1;

  explicit Plan(const RuleArgs& a, std::int64_t sequences) {
    const long group = a.Hv / a.Hk;
    const long threads = at::get_num_threads();
    // Shares cost a repeated preparation and a sum: only where the threads would idle without.
    while (parts < group && (sequences * a.Hk * parts < 2 * threads || group % parts != 0)) ++parts;
    while (group % parts != 0) ++parts;
    if (threads == 1) parts = 1;
    heads = group / parts;
    for (long s = 0; s < sequences; ++s) {
      for (long head = 0; head < a.Hk; ++head) {
        for (long part = 0; part < parts; ++part) {
          units.push_back({s, head, head * group + part * heads, heads, part});
        }
      }
    }
    const auto length = [&](const RuleUnit& u) {
      return a.cu_seqlens[u.sequence + 1] - a.cu_seqlens[u.sequence];
    };
    std::stable_sort(units.begin(), units.end(),
                     [&](const RuleUnit& x, const RuleUnit& y) { return length(x) > length(y); });
  }

  /// Each unit on whichever thread is free; a unit's result does not depend on the thread.
  void run(void (*work)(const RuleArgs&, const RuleUnit&, void*), const RuleArgs& a,
           bool backward) const {
    const auto count =
        backward ? chosen_rule_kernels().backward_bytes : chosen_rule_kernels().forward_bytes;
    const auto bytes = static_cast<std::int64_t>(count(a, heads));
    const std::int64_t workers =
        std::min<std::int64_t>(at::get_num_threads(), static_cast<std::int64_t>(units.size()));
    std::atomic<std::size_t> next{0};
    at::parallel_for(0, workers, 1, [&](std::int64_t, std::int64_t) {
      const at::Tensor scratch = at::empty({bytes}, at::kByte);
      for (std::size_t i = next++; i < units.size(); i = next++) {
        work(a, units[i], scratch.mutable_data_ptr());
      }
    });
  }
};

}  // namespace

std::optional<std::string> refuse(const GatedDeltaRule::Dims& dims) {
  for (const auto& [name, size] :
       {std::pair{"head_k_dim", dims.head_k_dim}, std::pair{"head_v_dim", dims.head_v_dim}}) {
    if (size % 16 != 0 || size > kMaxHeadDim)
      return fmt::format("{} must be a multiple of 16 up to {}, it is {}", name, kMaxHeadDim, size);
  }
  return std::nullopt;
}

GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& in, bool keep) {
  check_head_dims(in.q, in.v);
  RuleCall call(in);
  RuleArgs& a = call.args;
  const at::TensorOptions wide = in.q.options().dtype(compute_type(in.q));
  GatedDeltaRuleForward out;
  out.o = at::empty({a.T, a.Hv, a.V}, in.v.options());
  if (in.options.want_final_state) {
    out.final_state = at::empty({in.sequences.count(), a.Hv, a.K, a.V}, wide);
  }
  if (keep) {
    out.saved = {at::empty({a.Hv, a.T, a.V}, wide),
                 at::empty({call.segments(), a.Hv, a.K, a.V}, wide)};
    a.error = mutable_data(out.saved[0]);
    a.states = mutable_data(out.saved[1]);
  }
  a.o = mutable_data(out.o);
  a.final = mutable_data(out.final_state);
  Plan(a, in.sequences.count()).run(chosen_rule_kernels().forward[cpu_element(in.q)], a, false);
  return out;
}

GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs& in,
                                 const GatedDeltaRuleForward& forward, const at::Tensor& grad_o,
                                 const at::Tensor& grad_final_state) {
  RuleCall call(in);
  RuleArgs& a = call.args;
  const at::TensorOptions wide = in.q.options().dtype(compute_type(in.q));
  const at::Tensor d_o =
      grad_o.defined() ? grad_o.contiguous() : at::zeros({a.T, a.Hv, a.V}, in.v.options());
  const at::Tensor d_final =
      grad_final_state.defined() ? grad_final_state.contiguous() : at::Tensor();
  // Columns of one tensor, as those of the projection that q, k and v usually come from.
  const std::int64_t k_columns = a.Hk * a.K, v_columns = a.Hv * a.V;
  const at::Tensor joined = at::empty({a.T, 2 * k_columns + v_columns}, in.q.options());
  GatedDeltaRuleGradients d;
  d.q = joined.narrow(1, 0, k_columns).unflatten(1, {a.Hk, a.K});
  d.k = joined.narrow(1, k_columns, k_columns).unflatten(1, {a.Hk, a.K});
  d.v = joined.narrow(1, 2 * k_columns, v_columns).unflatten(1, {a.Hv, a.V});
  d.g = at::empty({a.T, a.Hv}, wide);
  d.beta = at::empty({a.T, a.Hv}, wide);
  if (in.initial_state.defined()) d.initial_state = at::empty(call.initial.sizes(), wide);

  a.error = mutable_data(forward.saved.at(0));
  a.states = mutable_data(forward.saved.at(1));
  a.d_o = data(d_o);
  a.d_final = data(d_final);
  a.dq = mutable_data(d.q);
  a.dk = mutable_data(d.k);
  a.dv = mutable_data(d.v);
  a.dq_stride = a.dk_stride = a.dv_stride = joined.stride(0);
  a.dg = mutable_data(d.g);
  a.dbeta = mutable_data(d.beta);
  a.d_initial = mutable_data(d.initial_state);

  const Plan plan(a, in.sequences.count());
  at::Tensor dq_parts, dk_parts;
  if (plan.parts > 1) {
    dq_parts = at::empty({plan.parts, a.T, a.Hk, a.K}, wide);
    dk_parts = at::empty_like(dq_parts);
    a.dq_parts = mutable_data(dq_parts);
    a.dk_parts = mutable_data(dk_parts);
  }
  plan.run(chosen_rule_kernels().backward[cpu_element(in.q)], a, true);
  if (plan.parts > 1) {
    const auto reduce = chosen_rule_kernels().reduce[cpu_element(in.q)];
    at::parallel_for(0, a.T, 64, [&](std::int64_t first, std::int64_t last) {
      reduce(a, plan.parts, first, last);
    });
  }
  return d;
}

at::Tensor decode(const GatedDeltaRuleDecode::Inputs& in, const CacheRows& rows) {
  check_head_dims(in.q, in.v);
  Sequences each;  // the token boundaries are not read
  each.cu_seqlens_host = {0};
  const RuleCall call(
      {in.q, in.k, in.v, in.g, in.beta, {}, std::move(each), {in.scale, in.normalize_qk, false}});
  RuleArgs a = call.args;
  at::Tensor o = at::empty({a.T, a.Hv, a.V}, in.v.options());
  a.o = mutable_data(o);
  const auto work = chosen_rule_kernels()
                        .step[cpu_element(in.q)][in.states.scalar_type() == at::kBFloat16 ? 1 : 0];
  char* base = static_cast<char*>(in.states.mutable_data_ptr());
  const std::int64_t state_bytes = a.K * a.V * static_cast<std::int64_t>(in.states.element_size());
  // About a microsecond of work at least for each task.
  const std::int64_t grain = std::max<std::int64_t>(1, 65536 / state_bytes);
  at::parallel_for(0, a.T * a.Hv, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t row = i / a.Hv, head = i % a.Hv;
      const std::int64_t slot = rows.slots_host[static_cast<std::size_t>(row)];
      work(a, row, head, base + (slot * a.Hv + head) * state_bytes);
    }
  });
  return o;
}

}  // namespace heddle::ops::gdn_cpu
