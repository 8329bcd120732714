#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "device/upload.h"
#include "ops/causal_conv1d/kernels.h"
#include "ops/compute_type.h"

namespace heddle::ops::causal_conv1d_reference {
namespace {

/// The packed tokens with W-1 rows of history before each sequence: [T + S*(W-1), C].
struct Padded {
  at::Tensor x;        // in the compute type
  at::Tensor token;    // [T] row of each token
  at::Tensor history;  // [S*(W-1)] rows before each sequence
  at::Tensor tail;     // [S*(W-1)] last W-1 rows of each sequence, history included

  Padded(const CausalConv1d::Inputs& in) {
    const std::int64_t S = in.sequences.count(), C = in.x.size(1), H = in.weight.size(1) - 1;
    std::vector<std::int64_t> tokens, before, last;
    for (std::int64_t s = 0; s < S; ++s) {
      const std::int64_t begin = in.sequences.cu_seqlens_host[s],
                         end = in.sequences.cu_seqlens_host[s + 1];
      for (std::int64_t i = 0; i < H; ++i) {
        before.push_back(begin + s * H + i);
        last.push_back(end + s * H + i);
      }
      for (std::int64_t t = begin; t < end; ++t) tokens.push_back(t + (s + 1) * H);
    }
    token = device::upload(tokens, in.x.device());
    history = device::upload(before, in.x.device());
    tail = device::upload(last, in.x.device());
    const c10::ScalarType type = compute_type(in.x);
    x = at::zeros({in.x.size(0) + S * H, C}, in.x.options().dtype(type));
    x.index_copy_(0, token, in.x.to(type));
    if (in.initial_state.defined()) {
      x.index_copy_(0, history, rows(in.initial_state).to(type));
    }
  }
  /// [S,C,W-1] to [S*(W-1), C] and back.
  static at::Tensor rows(const at::Tensor& state) {
    return state.transpose(1, 2).reshape({-1, state.size(1)});
  }
  static at::Tensor state(const at::Tensor& rows, std::int64_t S, std::int64_t H) {
    return rows.view({S, H, rows.size(1)}).transpose(1, 2).contiguous();
  }
};

at::Tensor convolve(const Padded& padded, const at::Tensor& weight) {
  const std::int64_t W = weight.size(1);
  at::Tensor c;
  for (std::int64_t w = 0; w < W; ++w) {
    const at::Tensor term =
        padded.x.index_select(0, padded.token - (W - 1 - w)) * weight.select(1, w);
    c = c.defined() ? c + term : term;
  }
  return c;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> forward(const CausalConv1d::Inputs& in) {
  const Padded padded(in);
  const at::Tensor c = convolve(padded, in.weight.to(padded.x.scalar_type()));
  at::Tensor final_state;
  if (in.want_final_state) {
    final_state = Padded::state(padded.x.index_select(0, padded.tail), in.sequences.count(),
                                in.weight.size(1) - 1)
                      .to(in.x.scalar_type());
  }
  return {(c * at::sigmoid(c)).to(in.x.scalar_type()), final_state};
}

CausalConv1d::Gradients backward(const CausalConv1d::Inputs& in, const at::Tensor& grad_y,
                                 const at::Tensor& grad_final_state) {
  const Padded padded(in);
  const c10::ScalarType type = padded.x.scalar_type();
  const std::int64_t W = in.weight.size(1), S = in.sequences.count();
  const at::Tensor weight = in.weight.to(type);
  at::Tensor dx = at::zeros_like(padded.x), dw = at::zeros_like(weight);
  if (grad_y.defined()) {
    const at::Tensor c = convolve(padded, weight), sigmoid = at::sigmoid(c);
    const at::Tensor dc = grad_y.to(type) * sigmoid * (1 + c * (1 - sigmoid));
    for (std::int64_t w = 0; w < W; ++w) {
      const at::Tensor row = padded.token - (W - 1 - w);
      // Rows of one shift are distinct: adding to them has one order.
      dx.index_copy_(0, row, dx.index_select(0, row) + dc * weight.select(1, w));
      dw.select(1, w).copy_(at::sum(dc * padded.x.index_select(0, row), {0}));
    }
  }
  if (grad_final_state.defined()) {
    dx.index_copy_(0, padded.tail,
                   dx.index_select(0, padded.tail) + Padded::rows(grad_final_state.to(type)));
  }
  CausalConv1d::Gradients grads;
  grads.x = dx.index_select(0, padded.token).to(in.x.scalar_type());
  grads.weight = dw.to(in.weight.scalar_type());
  if (in.initial_state.defined()) {
    grads.initial_state = Padded::state(dx.index_select(0, padded.history), S, W - 1)
                              .to(in.initial_state.scalar_type());
  }
  return grads;
}

at::Tensor decode(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& states,
                  const CacheRows& rows) {
  const c10::ScalarType type = compute_type(x);
  const at::Tensor window = at::cat({states.index_select(0, rows.slots), x.unsqueeze(-1)}, -1);
  states.index_copy_(0, rows.slots, window.narrow(2, 1, states.size(2)));
  const at::Tensor c = at::sum(window.to(type) * weight.to(type), {-1});
  return (c * at::sigmoid(c)).to(x.scalar_type());
}

}  // namespace heddle::ops::causal_conv1d_reference
