#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/compute_type.h"
#include "ops/context_parallel/context_parallel.h"

namespace heddle::ops {
namespace {

using Inputs = GatedDeltaRule::Inputs;

/// Consecutive rows of this rank's tokens.
struct Rows {
  std::int64_t begin, size;
};

Sequences sequences_of(const std::vector<Rows>& fragments, c10::Device device) {
  std::vector<std::int32_t> boundaries = {0};
  for (const Rows& rows : fragments)
    boundaries.push_back(boundaries.back() + static_cast<std::int32_t>(rows.size));
  return Sequences::from_host(std::move(boundaries), device);
}

/// The inputs of some fragments alone, not recorded.
Inputs pick(const Inputs& in, const std::vector<Rows>& fragments) {
  const auto of = [&](const at::Tensor& x) {
    std::vector<at::Tensor> parts;
    for (const Rows& rows : fragments) parts.push_back(x.narrow(0, rows.begin, rows.size));
    return parts.size() == 1 ? parts[0] : at::cat(parts);
  };
  return {of(in.q),
          of(in.k),
          of(in.v),
          of(in.g),
          of(in.beta),
          {},
          sequences_of(fragments, in.q.device()),
          in.options,
          {}};
}

/// The rank's tokens in those of fragments that cross segments and those of the others.
struct Division {
  std::vector<Rows> crossing, inside;  ///< Fragments.
  std::vector<std::int64_t> runs;      ///< Lengths of the alternating runs of both.
  bool begins_inside = false;

  explicit Division(const ContextPlan& plan) {
    for (const Fragment& fragment : plan.fragments()) {
      const bool is_inside = !fragment.enters && !fragment.leaves;
      (is_inside ? inside : crossing).push_back({fragment.row, fragment.size()});
      if (runs.empty() || is_inside != last_is_inside_) {
        if (runs.empty()) begins_inside = is_inside;
        runs.push_back(0);
      }
      last_is_inside_ = is_inside;
      runs.back() += fragment.size();
    }
  }

  /// Crossing and inside rows of x. One split, so that the gradient is one concatenation.
  std::array<at::Tensor, 2> divide(const at::Tensor& x) const {
    std::array<std::vector<at::Tensor>, 2> parts;
    bool is_inside = begins_inside;
    for (at::Tensor& run : x.split_with_sizes(runs, 0)) {
      parts[is_inside ? 1 : 0].push_back(std::move(run));
      is_inside = !is_inside;
    }
    const auto joined = [&](const std::vector<at::Tensor>& of) {
      if (of.empty()) return x.narrow(0, 0, 0);
      return of.size() == 1 ? of[0] : at::cat(of);
    };
    return {joined(parts[0]), joined(parts[1])};
  }

  std::array<Inputs, 2> divide(const Inputs& in) const {
    std::array<Inputs, 2> both;
    const auto q = divide(in.q), k = divide(in.k), v = divide(in.v), g = divide(in.g),
               beta = divide(in.beta);
    for (const std::size_t i : {std::size_t{0}, std::size_t{1}}) {
      both[i] = {q[i],
                 k[i],
                 v[i],
                 g[i],
                 beta[i],
                 {},
                 sequences_of(i == 0 ? crossing : inside, in.q.device()),
                 in.options,
                 {}};
      if (!in.qkv_again) continue;
      both[i].qkv_again = [again = in.qkv_again, division = *this, i] {
        const std::array<at::Tensor, 3> all = again();
        return std::array{division.divide(all[0])[i], division.divide(all[1])[i],
                          division.divide(all[2])[i]};
      };
    }
    return both;
  }

  /// The way back.
  at::Tensor join(const at::Tensor& of_crossing, const at::Tensor& of_inside) const {
    std::array<std::vector<std::int64_t>, 2> sizes;
    for (std::size_t i = 0; i < runs.size(); ++i)
      sizes[begins_inside == (i % 2 == 0) ? 1 : 0].push_back(runs[i]);
    // A rank without crossing tokens joins their empty tensor, whose backward exchanges states.
    if (sizes[0].empty()) return at::cat({of_crossing, of_inside});
    const std::vector<at::Tensor> a = of_crossing.split_with_sizes(sizes[0], 0),
                                  b = of_inside.split_with_sizes(sizes[1], 0);
    std::vector<at::Tensor> parts;
    std::array<std::size_t, 2> next = {0, 0};
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const bool is_inside = begins_inside == (i % 2 == 0);
      parts.push_back(is_inside ? b[next[1]++] : a[next[0]++]);
    }
    return at::cat(parts);
  }

 private:
  bool last_is_inside_ = false;
};

/// log of the decay below which a transition is invisible beside what is added to the state.
double invisible_decay(c10::ScalarType type) {
  if (type == at::kDouble) return -46;
  return type == at::kFloat ? -20 : -14;
}

/// The fragments of this rank whose sequences cross segments, numbered as in the kernel's inputs.
struct Crossing {
  std::vector<Fragment> fragments;

  explicit Crossing(const ContextPlan& plan) {
    for (const Fragment& fragment : plan.fragments()) {
      if (fragment.enters || fragment.leaves) fragments.push_back(fragment);
    }
  }
  /// Place of the fragment that enters, or leaves, a segment; -1 if none does.
  std::int64_t entering(std::int64_t segment) const {
    for (std::size_t i = 0; i < fragments.size(); ++i) {
      if (fragments[i].segment == segment && fragments[i].enters)
        return static_cast<std::int64_t>(i);
    }
    return -1;
  }
  std::int64_t leaving(std::int64_t segment) const {
    for (std::size_t i = 0; i < fragments.size(); ++i) {
      if (fragments[i].segment == segment && fragments[i].leaves)
        return static_cast<std::int64_t>(i);
    }
    return -1;
  }
  /// Rows of one of them among the crossing fragments' rows.
  Rows rows(std::int64_t place) const {
    std::int64_t begin = 0;
    for (std::int64_t i = 0; i < place; ++i) begin += fragments[i].size();
    return {begin, fragments[place].size()};
  }
};

/// [Hv,K,K] M of the map S -> M S + S_ext of one fragment: the rule on states, with nothing
/// written. Zero where the decay makes it invisible.
at::Tensor transition(const GatedDeltaRule::Functions& functions, Inputs in) {
  const std::int64_t Hk = in.q.size(1), K = in.q.size(2), Hv = in.v.size(1), r = Hv / Hk;
  const at::Tensor zero = at::zeros({Hv, K, K}, in.g.options());
  const at::Tensor decays = at::sum(in.g, {0}).view({Hk, r}).amax({1});
  // Shapes without values: every head is seen.
  const at::Tensor decay =
      decays.is_meta() ? at::zeros({Hk}, at::kDouble) : decays.cpu().to(at::kDouble);
  std::vector<std::int64_t> k_heads, v_heads;
  for (std::int64_t h = 0; h < Hk; ++h) {
    if (decay[h].item<double>() < invisible_decay(in.q.scalar_type())) continue;
    k_heads.push_back(h);
    for (std::int64_t j = 0; j < r; ++j) v_heads.push_back(h * r + j);
  }
  if (k_heads.empty()) return zero;
  const auto seen = static_cast<std::int64_t>(v_heads.size());
  const auto of = [&](const at::Tensor& x, const std::vector<std::int64_t>& heads) {
    if (static_cast<std::int64_t>(heads.size()) == x.size(1)) return x;
    return x.index_select(1, device::upload(heads, x.device()));
  };
  in.q = in.k = of(in.k, k_heads);
  in.g = of(in.g, v_heads);
  in.beta = of(in.beta, v_heads);
  in.v = at::zeros({in.k.size(0), seen, K}, in.k.options());
  in.initial_state = at::eye(K, in.g.options()).expand({1, seen, K, K}).contiguous();
  in.options.want_final_state = true;
  const at::Tensor M = functions.forward(in, /*keep=*/false).final_state[0];
  if (seen == Hv) return M;
  return zero.index_copy(0, device::upload(v_heads, M.device()), M);
}

/// The tensors [Hv,K,...] of all segments, in order, from those of the held ones.
std::vector<at::Tensor> gather_segments(const std::vector<at::Tensor>& held,
                                        const ContextParallel& context) {
  const ContextPlan& plan = context.plan;
  const at::Tensor own = at::stack(held);
  std::vector<std::int64_t> shape = own.sizes().vec();
  shape[0] = plan.segments();
  at::Tensor all = at::empty(shape, own.options());
  context.group.all_gather(all, own);
  std::vector<at::Tensor> segments;
  for (std::int64_t j = 0; j < plan.segments(); ++j)
    segments.push_back(all[plan.gathered_place(j)]);
  return segments;
}

/// A rank's knowledge of the states after the forward's gather.
struct States {
  at::Tensor initial;                   ///< [F,Hv,K,V] of the crossing fragments.
  std::vector<at::Tensor> transitions;  ///< Transition of every segment that is passed through.
};

States gather_states(const GatedDeltaRule::Functions& functions, const Inputs& in,
                     const Crossing& crossing, const ContextParallel& context) {
  const ContextPlan& plan = context.plan;
  const std::int64_t K = in.q.size(2), Hv = in.v.size(1), V = in.v.size(2);
  const bool with_transitions = plan.any_is_passed_through();
  const auto wide = in.g.options();
  std::vector<Rows> leaving;
  for (std::size_t i = 0; i < crossing.fragments.size(); ++i) {
    if (crossing.fragments[i].leaves)
      leaving.push_back(crossing.rows(static_cast<std::int64_t>(i)));
  }
  at::Tensor added;  // S_ext
  if (!leaving.empty()) {
    Inputs part = pick(in, leaving);
    part.options.want_final_state = true;
    added = functions.forward(part, /*keep=*/false).final_state;
  }
  std::vector<at::Tensor> held;
  std::int64_t next = 0;
  for (const std::int64_t segment : plan.held(plan.rank())) {
    at::Tensor message = at::zeros({Hv, K, with_transitions ? V + K : V}, wide);
    if (plan.leaves(segment)) message.narrow(2, 0, V).copy_(added[next++]);
    if (plan.is_passed_through(segment)) {
      const Rows rows = crossing.rows(crossing.leaving(segment));
      message.narrow(2, V, K).copy_(transition(functions, pick(in, {rows})));
    }
    held.push_back(std::move(message));
  }
  const std::vector<at::Tensor> all = gather_segments(held, context);
  States states;
  states.initial =
      at::zeros({static_cast<std::int64_t>(crossing.fragments.size()), Hv, K, V}, wide);
  states.transitions.resize(all.size());
  at::Tensor state;
  for (std::int64_t j = 0; j < plan.segments(); ++j) {
    if (const std::int64_t place = crossing.entering(j); place >= 0)
      states.initial[place].copy_(state);
    if (!plan.leaves(j)) continue;
    const at::Tensor ext = all[j].narrow(2, 0, V);
    if (!plan.is_passed_through(j)) {
      state = ext;
      continue;
    }
    states.transitions[j] = all[j].narrow(2, V, K).contiguous();
    state = at::bmm(states.transitions[j], state.contiguous()) + ext;
  }
  return states;
}

/// dS at the end of each crossing fragment [F,Hv,K,V], from the gradients of the states that enter,
/// as far as they come from the fragments themselves.
at::Tensor gather_state_gradients(const at::Tensor& own, const std::vector<at::Tensor>& transitions,
                                  const Crossing& crossing, const ContextParallel& context) {
  const ContextPlan& plan = context.plan;
  std::vector<at::Tensor> held;
  for (const std::int64_t segment : plan.held(plan.rank())) {
    const std::int64_t place = crossing.entering(segment);
    held.push_back(place >= 0 ? own[place] : at::zeros(own.sizes().slice(1), own.options()));
  }
  const std::vector<at::Tensor> all = gather_segments(held, context);
  at::Tensor leaving = at::zeros_like(own);
  at::Tensor gradient;  // of the state between segments
  for (std::int64_t j = plan.segments() - 1; j >= 0; --j) {
    if (plan.leaves(j)) {
      if (const std::int64_t place = crossing.leaving(j); place >= 0)
        leaving[place].copy_(gradient);
    }
    if (!plan.enters(j)) continue;
    gradient = plan.is_passed_through(j)
                   ? at::bmm(transitions[j].transpose(1, 2), gradient.contiguous()) + all[j]
                   : all[j];
  }
  return leaving;
}

GatedDeltaRuleGradients sum(GatedDeltaRuleGradients a, const GatedDeltaRuleGradients& b) {
  return {a.q + b.q, a.k + b.k, a.v + b.v, a.g + b.g, a.beta + b.beta, {}};
}

/// The rule on the crossing fragments, all of them packed in `in`. A rank that has none takes part
/// in the exchanges.
at::Tensor crossing_rule(const KernelTable& kernels, const Inputs& in,
                         const ContextParallel& context) {
  const GatedDeltaRule::Functions functions = kernels.get<GatedDeltaRule>();
  const Tensors inputs{in.q, in.k, in.v, in.g, in.beta};
  const bool keep = needs_gradient(inputs);
  const Crossing crossing(context.plan);
  Inputs saved = in;
  for (at::Tensor* tensor : {&saved.q, &saved.k, &saved.v, &saved.g, &saved.beta})
    *tensor = detached(*tensor);
  States states;
  GatedDeltaRuleForward out = run_without_gradient([&]() -> GatedDeltaRuleForward {
    states = gather_states(functions, saved, crossing, context);
    saved.initial_state = states.initial;
    if (crossing.fragments.empty()) return {at::empty_like(saved.v), {}, {}};
    return functions.forward(saved, keep);
  });
  const at::Tensor o = std::exchange(out.o, {});
  if (!keep) return o;
  if (saved.qkv_again) saved.q = saved.k = saved.v = at::Tensor();
  const auto backward = [functions, saved, out, crossing, context,
                         transitions = states.transitions](const Tensors& grads) -> Tensors {
    Inputs all = saved;
    if (all.qkv_again) std::tie(all.q, all.k, all.v) = std::tuple_cat(all.qkv_again());
    if (crossing.fragments.empty()) {
      gather_state_gradients(all.initial_state, transitions, crossing, context);
      return Tensors(5);
    }
    GatedDeltaRuleGradients d = functions.backward(all, out, grads[0], {});
    const at::Tensor leaving =
        gather_state_gradients(d.initial_state, transitions, crossing, context);
    const bool any_leaves = std::any_of(crossing.fragments.begin(), crossing.fragments.end(),
                                        [](const Fragment& fragment) { return fragment.leaves; });
    // The rule's backward is linear in the gradients of its two results.
    if (any_leaves) d = sum(std::move(d), functions.backward(all, out, {}, leaving));
    return {d.q, d.k, d.v, d.g, d.beta};
  };
  return with_gradient("context_gated_delta_rule", inputs, {o}, backward)[0];
}

}  // namespace

at::Tensor context_gated_delta_rule(const KernelTable& kernels, const Inputs& in,
                                    const ContextParallel& context) {
  if (!context.plan.any_leaves()) return gated_delta_rule(kernels, in).o;
  const Division division(context.plan);
  if (division.inside.empty()) return crossing_rule(kernels, in, context);
  const auto [crossing, inside] = division.divide(in);
  return division.join(crossing_rule(kernels, crossing, context),
                       gated_delta_rule(kernels, inside).o);
}

}  // namespace heddle::ops
