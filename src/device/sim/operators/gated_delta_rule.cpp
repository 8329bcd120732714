// npu_chunk_gated_delta_rule: token by token, as the recurrence is written.
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>

#include <array>
#include <cmath>

#include "device/sim/driver.h"
#include "device/sim/operators/operators.h"
#include "device/sim/rules.h"

namespace heddle::device::sim {
namespace {

/// Sizes of the heads the operator is written for.
constexpr std::int64_t kHead = 128;
constexpr std::int64_t kMostHeads = 64;

void check_limits(const Arguments& in, const at::Tensor& q, const at::Tensor& v,
                  const at::Tensor& state) {
  for (const at::Tensor& x : {q, v, state}) {
    if (x.scalar_type() != at::kBFloat16) {
      refuse(Rule::kGdnLimits, "{} takes bfloat16, its state too, not {}", in.op(),
             c10::toString(x.scalar_type()));
    }
  }
  if (q.size(2) != kHead || v.size(2) != kHead || v.size(1) > kMostHeads) {
    refuse(Rule::kGdnLimits, "{}: {} heads of {} and {}; it takes at most {} of {}", in.op(),
           v.size(1), q.size(2), v.size(2), kMostHeads, kHead);
  }
}

/// query, key [T, Nk, 128], value [T, Nv, 128], g [T, Nv] log decay, beta [T, Nv]; the state [S,
/// Nv, Dv, Dk] is read and written.
Results rule_forward(const Arguments& in) {
  const at::Tensor q = in.tensor("query"), k = in.tensor("key"), v = in.tensor("value"),
                   beta = in.tensor("beta"), g = in.tensor("g"),
                   lengths = in.tensor("actual_seq_lengths");
  at::Tensor state = in.tensor("initial_state");
  TORCH_CHECK(beta.defined() && g.defined() && state.defined() && lengths.defined(), in.op(),
              ": the simulation wants beta, g, initial_state and actual_seq_lengths");
  check_limits(in, q, v, state);
  TORCH_CHECK(
      lengths.scalar_type() == at::kInt && lengths.dim() == 1 && lengths.size(0) == state.size(0),
      in.op(), ": actual_seq_lengths is int32 [S], a length for each state");
  const std::int64_t Nv = v.size(1), groups = Nv / q.size(1);
  const auto wide = [](const at::Tensor& x) { return x.to(at::kFloat); };
  const auto spread = [&](const at::Tensor& x) { return wide(x).repeat_interleave(groups, 1); };
  const at::Tensor queries = spread(q) * in.number("scale"), keys = spread(k), values = wide(v),
                   decay = at::exp(wide(g)), rate = wide(beta);
  at::Tensor o = at::empty_like(values);
  std::int64_t t = 0;
  for (std::int64_t s = 0; s < state.size(0); ++s) {
    at::Tensor S = wide(state[s]);  // [Nv, Dv, Dk]
    const std::int64_t end = t + lengths.const_data_ptr<std::int32_t>()[s];
    TORCH_CHECK(end <= q.size(0), in.op(), ": the sequences hold ", end, " tokens of ", q.size(0));
    for (; t < end; ++t) {
      S = S * decay[t].view({Nv, 1, 1});
      const at::Tensor key = keys[t].unsqueeze(2);
      const at::Tensor error = (values[t].unsqueeze(2) - S.bmm(key)) * rate[t].view({Nv, 1, 1});
      S = S + error.bmm(key.transpose(1, 2));
      o[t].copy_(S.bmm(queries[t].unsqueeze(2)).squeeze(2));
    }
    state[s].copy_(S);
  }
  return {o.to(v.scalar_type()), state};
}

}  // namespace

std::span<const FusedOperator> gated_delta_rule_operators() {
  static constexpr std::array<FusedOperator, 1> kOperators = {
      {{"npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, "
        "Tensor? beta=None, Tensor? initial_state=None, Tensor? actual_seq_lengths=None, "
        "float? scale=None, Tensor? g=None) -> (Tensor, Tensor)",
        rule_forward}}};
  return kOperators;
}

}  // namespace heddle::device::sim
