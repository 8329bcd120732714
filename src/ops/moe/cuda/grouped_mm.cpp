// The products of all experts in one launch each, by libtorch or by our kernel for Hopper, and our
// kernels between them. Nothing comes back to the host. The weights of the assignments scale the
// inputs of the second product and not its outputs: their gradients then come from rows of the
// intermediate size, and the outputs are not kept.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/moe/cuda/expert_row_tensors.h"
#include "ops/moe/cuda/expert_rows.h"
#include "ops/moe/cuda/grouped_fp8.h"
#include "ops/moe/cuda/grouped_product.h"
#include "ops/moe/cuda/grouped_weight_gradient.h"
#include "ops/moe/cuda/shared_expert.h"
#include "ops/moe/frozen_experts.h"
#include "ops/moe/kernels.h"
#include "ops/moe/order.h"

namespace heddle::ops::moe_experts_grouped_mm {
namespace {

using namespace moe_cuda;

/// The large products, each of all rows by their experts; `ends` [E] int32.
struct Library {
  static constexpr bool kTakesEightBits = false;
  /// x [N,in] W_e^T, weight [E,out,in].
  static at::Tensor outputs(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends) {
    return at::_grouped_mm(x, weight.transpose(1, 2), ends);
  }
  /// dy [N,out] W_e.
  static at::Tensor input_gradients(const at::Tensor& dy, const at::Tensor& weight,
                                    const at::Tensor& ends) {
    return at::_grouped_mm(dy, weight, ends);
  }
  /// [E,out,in]: dy^T x over the rows of each expert.
  static at::Tensor weight_gradients(const at::Tensor& dy, const at::Tensor& x,
                                     const at::Tensor& ends) {
    return at::_grouped_mm(dy.t(), x, ends);
  }
};

struct Wgmma {
  static constexpr bool kTakesEightBits = true;
  static at::Tensor outputs(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends) {
    return product(x, weight, ends, weight.size(1), /*depth_first=*/false);
  }
  static at::Tensor input_gradients(const at::Tensor& dy, const at::Tensor& weight,
                                    const at::Tensor& ends) {
    return product(dy, weight, ends, weight.size(2), /*depth_first=*/true);
  }
  static at::Tensor weight_gradients(const at::Tensor& dy, const at::Tensor& x,
                                     const at::Tensor& ends) {
    const cuda::OnDevice on(x);
    const at::Tensor rows = x.contiguous(), gradients = dy.contiguous();
    const std::int64_t out = dy.size(1), in = x.size(1), experts = ends.size(0);
    at::Tensor dw = at::empty({experts, out, in}, x.options());
    cuda::grouped_weight_gradient(
        {gradients.const_data_ptr(), rows.const_data_ptr(), dw.mutable_data_ptr(),
         ends.const_data_ptr<std::int32_t>(), x.size(0), out, in, experts},
        on.stream());
    return dw;
  }

 private:
  static at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends,
                            std::int64_t width, bool depth_first) {
    const cuda::OnDevice on(x);
    const at::Tensor rows = x.contiguous(), matrices = weight.contiguous();
    at::Tensor y = rows_like(x, x.size(0), width);
    cuda::grouped_product({rows.const_data_ptr(), matrices.const_data_ptr(), y.mutable_data_ptr(),
                           ends.const_data_ptr<std::int32_t>(), x.size(0), x.size(1), width,
                           weight.size(0), depth_first},
                          on.stream());
    return y;
  }
};

/// Factors whose rank is a multiple of 8: rows must start on 16 bytes.
ExpertLowRank padded(const ExpertLowRank& change) {
  if (!change.defined()) return change;
  const std::int64_t missing = -change.down.size(1) & 7;
  if (missing == 0) return {change.down.contiguous(), change.up.contiguous()};
  return {at::constant_pad_nd(change.down, {0, 0, 0, missing}, 0),
          at::constant_pad_nd(change.up, {0, missing}, 0)};
}

/// The tokens of one set of adapters, and its rows among those of all experts, in the order of its
/// experts.
struct SetRows {
  at::Tensor index;            ///< [n] places of its rows; undefined: they are all rows.
  at::Tensor ends;             ///< [E] int32
  at::Tensor source, place;    ///< See MoeOrder; of its own tokens and rows.
  std::int64_t first, tokens;  ///< The place of its tokens among all.
  std::int64_t k;

  at::Tensor of(const at::Tensor& rows) const {
    return index.defined() ? at::index_select(rows, 0, index) : rows;
  }
  void add(const at::Tensor& own, at::Tensor& rows) const {
    if (index.defined()) {
      rows.index_copy_(0, index, at::index_select(rows, 0, index).add_(own));
    } else {
      rows.add_(own);
    }
  }
  at::Tensor tokens_of(const at::Tensor& by_token) const {
    return by_token.narrow(0, first, tokens);
  }
  at::Tensor sent(const at::Tensor& own_tokens) const { return send(own_tokens, source, place, k); }
  at::Tensor summed(const at::Tensor& own_rows) const { return sum(own_rows, place, k); }
};

std::vector<SetRows> rows_of_sets(const MoeExperts::Inputs& in, const at::Tensor& source,
                                  const at::Tensor& place, const at::Tensor& ends) {
  const std::int64_t k = in.experts.size(1);
  if (in.changes.size() < 2) return {{{}, ends, source, place, 0, in.x.size(0), k}};
  std::vector<SetRows> sets;
  std::int64_t first = 0;
  for (const ExpertChanges& change : in.changes) {
    const DeviceMoeOrder own =
        order_of(in.experts.narrow(0, first, change.tokens).contiguous(), in.gate_up.size(0));
    sets.push_back({at::index_select(place.narrow(0, first * k, change.tokens * k), 0, own.source),
                    own.ends, own.source, own.place, first, change.tokens, k});
    first += change.tokens;
  }
  return sets;
}

/// The matrix of a factor that experts share.
at::Tensor matrix(const at::Tensor& factor) { return factor.select(0, 0); }

/// y += (x down_e^T) up_e^T; returns x down_e^T. A shared `down` multiplies the `tokens`; a shared
/// `up` is left to add_to_tokens().
at::Tensor add_change(const ExpertLowRank& change, const at::Tensor& x, const at::Tensor& tokens,
                      const SetRows& set, at::Tensor& y) {
  if (!change.defined()) return {};
  const ExpertLowRank factors = padded(change);
  at::Tensor low = change.shares_down()
                       ? set.sent(at::mm(set.tokens_of(tokens), matrix(factors.down).t()))
                       : at::_grouped_mm(set.of(x), factors.down.transpose(1, 2), set.ends);
  if (!change.shares_up()) set.add(at::_grouped_mm(low, factors.up.transpose(1, 2), set.ends), y);
  return low;
}

/// y [T,H] += what the sums of a token's lows make of a shared `up`.
void add_to_tokens(const ExpertLowRank& change, const at::Tensor& low, const SetRows& set,
                   const at::Tensor& y) {
  if (!change.shares_up()) return;
  set.tokens_of(y).addmm_(set.summed(low), matrix(padded(change).up).t());
}

/// dx += (dy up_e) down_e; returns dy up_e. A shared `up` multiplies the gradients `d_tokens`; a
/// shared `down` is left to add_to_token_gradients().
at::Tensor add_change_backward(const ExpertLowRank& change, const at::Tensor& dy,
                               const at::Tensor& d_tokens, const SetRows& set, at::Tensor& dx) {
  if (!change.defined()) return {};
  const ExpertLowRank factors = padded(change);
  at::Tensor d_low = change.shares_up()
                         ? set.sent(at::mm(set.tokens_of(d_tokens), matrix(factors.up)))
                         : at::_grouped_mm(set.of(dy), factors.up, set.ends);
  if (!change.shares_down()) set.add(at::_grouped_mm(d_low, factors.down, set.ends), dx);
  return d_low;
}

/// Adds to dx [T,H] and returns the gradient of the `down` that experts share.
at::Tensor add_to_token_gradients(const ExpertLowRank& change, const at::Tensor& x,
                                  const at::Tensor& d_low, const SetRows& set,
                                  const at::Tensor& dx) {
  const at::Tensor by_token = set.summed(d_low);
  set.tokens_of(dx).addmm_(by_token, matrix(padded(change).down));
  return at::mm(by_token.t(), set.tokens_of(x)).narrow(0, 0, change.down.size(1)).unsqueeze(0);
}

// Gradients of factors that each expert has; x and dy are rows.
at::Tensor down_gradient(const ExpertLowRank& change, const at::Tensor& x, const at::Tensor& d_low,
                         const SetRows& set) {
  return at::_grouped_mm(d_low.t(), set.of(x), set.ends).narrow(1, 0, change.down.size(1));
}
at::Tensor up_gradient(const ExpertLowRank& change, const at::Tensor& low, const at::Tensor& dy,
                       const SetRows& set) {
  return at::_grouped_mm(set.of(dy).t(), low, set.ends).narrow(2, 0, change.up.size(2));
}
/// The gradient of an `up` that experts share; dy is by token.
at::Tensor shared_up_gradient(const ExpertLowRank& change, const at::Tensor& low,
                              const at::Tensor& dy, const SetRows& set) {
  return at::mm(set.tokens_of(dy).t(), set.summed(low))
      .narrow(1, 0, change.up.size(2))
      .unsqueeze(0);
}

/// Whether a change of some set multiplies the rows that were sent to the matrix.
bool reads_rows(const MoeExperts::Inputs& in, ExpertLowRank ExpertChanges::*of) {
  return std::ranges::any_of(in.changes, [&](const ExpertChanges& change) {
    return (change.*of).defined() && !(change.*of).shares_down();
  });
}

/// Why a width that must be a multiple of `unit` is none.
std::optional<std::string> refuse_widths(const MoeExperts::Dims& dims, std::int64_t unit) {
  for (const auto& [name, size] : {std::pair{"hidden_size", dims.hidden_size},
                                   std::pair{"intermediate_size", dims.intermediate_size}}) {
    if (size % unit != 0) return fmt::format("{} {} is no multiple of {}", name, size, unit);
  }
  return std::nullopt;
}

/// Rows must start on 16 bytes.
std::optional<std::string> refuse(const MoeExperts::Dims& dims) { return refuse_widths(dims, 8); }

std::optional<std::string> refuse_wgmma_device(const Target&) {
  if (cuda::grouped_product_available()) return std::nullopt;
  return "the products of experts by wgmma need sm_90a (H100, H200)";
}

std::optional<std::string> refuse_wgmma(const MoeExperts::Dims& dims) {
  if (auto reason = refuse_widths(dims, 64)) return reason;
  if (dims.num_experts <= cuda::kMostExperts) return std::nullopt;
  return fmt::format("{} experts, and it takes {} at most", dims.num_experts, cuda::kMostExperts);
}

/// Whether the weights are what lies beside them.
template <class Products>
bool is_in_eight_bits(const MoeExperts::Inputs& in) {
  const bool found = experts_beside(in.gate_up) != nullptr;
  TORCH_CHECK(!found || Products::kTakesEightBits,
              "kernels.moe_experts: cuda.grouped_mm multiplies no experts of "
              "kernels.frozen_experts=cuda.fp8; leave kernels.moe_experts out");
  return found;
}

template <class Products>
MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep) {
  const cuda::OnDevice on(in.x);
  TORCH_CHECK(in.weights.scalar_type() == in.x.scalar_type(), "cuda.grouped_mm: weights of ",
              in.weights.scalar_type(), " and rows of ", in.x.scalar_type());
  if (is_in_eight_bits<Products>(in)) return moe_experts_fp8::forward(in, keep);
  const std::int64_t k = in.experts.size(1);
  const DeviceMoeOrder order = order_of(in.experts, in.gate_up.size(0));
  const std::int64_t n = in.assignments.value_or(in.experts.numel());
  const at::Tensor source = order.source.narrow(0, 0, n);
  const at::Tensor& offsets = order.ends;
  const at::Tensor rows = send(in.x, source, order.place, k);
  at::Tensor gate_up = Products::outputs(rows, in.gate_up, offsets);
  const std::vector<SetRows> sets = rows_of_sets(in, source, order.place, offsets);
  Tensors lows;
  for (std::size_t s = 0; s < in.changes.size(); ++s)
    lows.push_back(add_change(in.changes[s].gate_up, rows, in.x, sets[s], gate_up));
  const at::Tensor weights = in.weights.contiguous();
  const at::Tensor hidden = rows_like(rows, rows.size(0), gate_up.size(1) / 2);
  cuda::weighted_swiglu_forward(hidden.size(0), hidden.size(1), gate_up.const_data_ptr(),
                                weights.const_data_ptr(), indices(source),
                                hidden.mutable_data_ptr(), on.stream());
  at::Tensor out = Products::outputs(hidden, in.down, offsets);
  for (std::size_t s = 0; s < in.changes.size(); ++s)
    lows.push_back(add_change(in.changes[s].down, hidden, {}, sets[s], out));
  MoeExperts::Forward result;
  result.y = sum(out, order.place, k);
  for (std::size_t s = 0; s < in.changes.size(); ++s)
    add_to_tokens(in.changes[s].down, lows[in.changes.size() + s], sets[s], result.y);
  if (!keep) return result;
  result.saved = {gate_up, source, order.place, offsets};
  result.saved.insert(result.saved.end(), lows.begin(), lows.end());
  return result;
}

template <class Products>
MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients,
                               const at::Tensor& grad_branch) {
  const cuda::OnDevice on(in.x);
  if (is_in_eight_bits<Products>(in))
    return moe_experts_fp8::backward(in, saved, grad_y, grad_branch);
  const at::Tensor &gate_up = saved.saved[0], &source = saved.saved[1], &place = saved.saved[2],
                   &offsets = saved.saved[3];
  const std::size_t count = in.changes.size();
  const auto low_1 = saved.saved.begin() + 4, low_2 = low_1 + static_cast<std::ptrdiff_t>(count);
  const std::vector<SetRows> sets = rows_of_sets(in, source, place, offsets);
  const std::int64_t k = in.experts.size(1), n = source.size(0);
  const at::Tensor dy = send(grad_y, source, place, k);
  at::Tensor d_hidden = Products::input_gradients(dy, in.down, offsets);
  Tensors d_low_1, d_low_2;
  for (std::size_t s = 0; s < count; ++s)
    d_low_2.push_back(add_change_backward(in.changes[s].down, dy, grad_y, sets[s], d_hidden));

  const at::Tensor weights = in.weights.contiguous();
  const at::Tensor d_gate_up = rows_like(gate_up, n, gate_up.size(1));
  const bool want_hidden = want_weight_gradients || reads_rows(in, &ExpertChanges::down);
  const at::Tensor hidden = want_hidden ? rows_like(gate_up, n, gate_up.size(1) / 2) : at::Tensor();
  MoeExperts::Gradients result;
  result.weights = n == weights.numel() ? at::empty(weights.sizes(), weights.options())
                                        : at::zeros(weights.sizes(), weights.options());
  cuda::weighted_swiglu_backward(n, gate_up.size(1) / 2, gate_up.const_data_ptr(),
                                 d_hidden.const_data_ptr(), weights.const_data_ptr(),
                                 indices(source), d_gate_up.mutable_data_ptr(),
                                 want_hidden ? hidden.mutable_data_ptr() : nullptr,
                                 result.weights.mutable_data_ptr(), on.stream());
  if (want_weight_gradients) result.down = Products::weight_gradients(dy, hidden, offsets);
  for (std::size_t s = 0; s < count; ++s) {
    const ExpertLowRank& change = in.changes[s].down;
    result.changes.push_back({{}, {}, in.changes[s].tokens});
    if (!change.defined()) continue;
    result.changes[s].down = {down_gradient(change, hidden, d_low_2[s], sets[s]),
                              change.shares_up()
                                  ? shared_up_gradient(change, low_2[s], grad_y, sets[s])
                                  : up_gradient(change, low_2[s], dy, sets[s])};
  }

  at::Tensor dx = Products::input_gradients(d_gate_up, in.gate_up, offsets);
  for (std::size_t s = 0; s < count; ++s)
    d_low_1.push_back(add_change_backward(in.changes[s].gate_up, d_gate_up, {}, sets[s], dx));
  result.x = sum_onto(grad_branch, dx, place, k);
  const bool want_rows = want_weight_gradients || reads_rows(in, &ExpertChanges::gate_up);
  const at::Tensor rows = want_rows ? send(in.x, source, place, k) : at::Tensor();
  if (want_weight_gradients) result.gate_up = Products::weight_gradients(d_gate_up, rows, offsets);
  for (std::size_t s = 0; s < count; ++s) {
    const ExpertLowRank& change = in.changes[s].gate_up;
    if (!change.defined()) continue;
    result.changes[s].gate_up = {
        change.shares_down() ? add_to_token_gradients(change, in.x, d_low_1[s], sets[s], result.x)
                             : down_gradient(change, rows, d_low_1[s], sets[s]),
        up_gradient(change, low_1[s], d_gate_up, sets[s])};
  }
  return result;
}

at::Tensor add_shared(const at::Tensor& routed, const at::Tensor& shared, const at::Tensor& gate,
                      const at::Tensor& residual) {
  const cuda::OnDevice on(routed);
  const at::Tensor a = routed.contiguous(), b = shared.contiguous(),
                   r = residual.defined() ? residual.contiguous() : residual;
  at::Tensor y = at::empty_like(a);
  cuda::shared_expert_forward(a.size(0), a.size(1), a.const_data_ptr(), b.const_data_ptr(),
                              gate.const_data_ptr(), gate.stride(0),
                              r.defined() ? r.const_data_ptr() : nullptr, y.mutable_data_ptr(),
                              on.stream());
  return y;
}

std::pair<at::Tensor, at::Tensor> add_shared_backward(const at::Tensor& shared,
                                                      const at::Tensor& gate,
                                                      const at::Tensor& grad_y) {
  const cuda::OnDevice on(shared);
  const at::Tensor x = shared.contiguous(), dy = grad_y.contiguous();
  at::Tensor d_shared = at::empty_like(x);
  // Its rows begin on 16 bytes, so that it is a term of a sum of products.
  at::Tensor d_gate = at::empty({gate.size(0), 8}, gate.options()).narrow(1, 0, 1);
  cuda::shared_expert_backward(x.size(0), x.size(1), x.const_data_ptr(), gate.const_data_ptr(),
                               gate.stride(0), dy.const_data_ptr(), d_shared.mutable_data_ptr(),
                               d_gate.mutable_data_ptr(), d_gate.stride(0), on.stream());
  return {d_shared, d_gate};
}

std::optional<std::string> refuse_shared(const SharedExpertSum::Dims& dims) {
  if (dims.hidden_size % 8 == 0) return std::nullopt;
  return fmt::format("hidden_size {} is no multiple of 8", dims.hidden_size);
}

}  // namespace

}  // namespace heddle::ops::moe_experts_grouped_mm

namespace heddle::ops::cuda {

void add_moe_experts(Registry& registry) {
  using namespace moe_experts_grouped_mm;
  KernelInfo own = KernelInfo::cuda("cuda.sm90.grouped", {c10::ScalarType::BFloat16});
  own.refuse_device = refuse_wgmma_device;
  registry.add<MoeExperts>(own,
                           {forward<Wgmma>, backward<Wgmma>, gather, sum, /*takes_eight_bits=*/true,
                            /*takes_sets=*/true},
                           {.refuse = refuse_wgmma});
  registry.add<MoeExperts>(KernelInfo::cuda("cuda.grouped_mm", {c10::ScalarType::BFloat16}),
                           {forward<Library>, backward<Library>, gather, sum,
                            /*takes_eight_bits=*/false, /*takes_sets=*/true},
                           {.refuse = refuse});
  registry.add<SharedExpertSum>(KernelInfo::cuda("cuda.fused", {c10::ScalarType::BFloat16}),
                                {add_shared, add_shared_backward}, {.refuse = refuse_shared});
}

}  // namespace heddle::ops::cuda
