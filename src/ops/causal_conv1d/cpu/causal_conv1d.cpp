#include "ops/causal_conv1d/cpu/causal_conv1d.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/causal_conv1d/cpu/conv_kernels.h"
#include "ops/compute_type.h"

namespace heddle::ops::conv_cpu {
namespace {

const ConvKernels& kernels() { return HEDDLE_CPU_SELECT(conv_kernels)(); }

/// [S,C,W-1] to [S,W-1,C] in the compute type; undefined stays undefined.
at::Tensor channels_last(const at::Tensor& state, c10::ScalarType type) {
  return state.defined() ? state.to(type).transpose(1, 2).contiguous() : state;
}
const void* data(const at::Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }

/// Inputs as the kernels want them; holds what had to be converted.
struct Call {
  at::Tensor x, weight, initial;
  std::vector<ConvUnit> units;
  long blocks = 0;
  ConvArgs args{};

  explicit Call(const CausalConv1d::Inputs& in) {
    const c10::ScalarType type = compute_type(in.x);
    x = in.x.stride(1) == 1 || in.x.size(1) == 1 ? in.x : in.x.contiguous();
    weight = in.weight.to(type).t().contiguous();
    initial = channels_last(in.initial_state, type);
    args.C = x.size(1);
    args.W = in.weight.size(1);
    args.cu_seqlens = in.sequences.cu_seqlens_host.data();
    args.x = data(x);
    args.x_stride = x.stride(0);
    args.weight = data(weight);
    args.initial = data(initial);
    for (long s = 0; s < in.sequences.count(); ++s) {
      const long end = args.cu_seqlens[s + 1];
      for (long t = args.cu_seqlens[s]; t < end; t += kBlockTokens, ++blocks) {
        for (long c = 0; c < args.C; c += kBlockChannels) {
          units.push_back({s, t, std::min(end, t + kBlockTokens), c,
                           std::min(kBlockChannels, args.C - c), blocks});
        }
      }
    }
  }

  void run(void (*work)(const ConvArgs&, const ConvUnit&, void*)) const {
    at::parallel_for(
        0, static_cast<std::int64_t>(units.size()), 1, [&](std::int64_t first, std::int64_t last) {
          const at::Tensor scratch =
              at::empty({static_cast<std::int64_t>(kernels().scratch_bytes)}, at::kByte);
          for (std::int64_t i = first; i < last; ++i) {
            work(args, units[i], scratch.mutable_data_ptr());
          }
        });
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> forward(const CausalConv1d::Inputs& in) {
  Call call(in);
  const at::Tensor y = at::empty({in.x.size(0), in.x.size(1)}, in.x.options());
  call.args.y = y.mutable_data_ptr();
  call.run(kernels().forward[cpu_element(in.x)]);
  at::Tensor final_state;
  if (in.want_final_state) {
    const std::int64_t S = in.sequences.count(), H = in.weight.size(1) - 1;
    final_state = at::zeros({S, in.x.size(1), H}, in.x.options());
    for (std::int64_t s = 0; s < S; ++s) {
      const std::int64_t begin = in.sequences.cu_seqlens_host[s],
                         end = in.sequences.cu_seqlens_host[s + 1];
      const std::int64_t own = std::min(H, end - begin);
      at::Tensor state = final_state.select(0, s);
      state.narrow(1, H - own, own).copy_(in.x.narrow(0, end - own, own).t());
      if (own < H && in.initial_state.defined()) {
        state.narrow(1, 0, H - own).copy_(in.initial_state.select(0, s).narrow(1, own, H - own));
      }
    }
  }
  return {y, final_state};
}

CausalConv1d::Gradients backward(const CausalConv1d::Inputs& in, const at::Tensor& grad_y,
                                 const at::Tensor& grad_final_state) {
  Call call(in);
  const c10::ScalarType type = compute_type(in.x);
  const at::TensorOptions wide = in.x.options().dtype(type);
  const std::int64_t S = in.sequences.count(), H = in.weight.size(1) - 1, C = in.x.size(1);
  const at::Tensor dy =
      grad_y.defined() ? grad_y.contiguous() : at::zeros({in.x.size(0), C}, in.x.options());
  const at::Tensor d_final = channels_last(grad_final_state, type);
  CausalConv1d::Gradients grads;
  grads.x = at::empty({in.x.size(0), C}, in.x.options());
  const at::Tensor dw = at::empty({call.blocks, H + 1, C}, wide);
  at::Tensor d_initial;
  if (in.initial_state.defined()) d_initial = at::zeros({S, H, C}, wide);
  call.args.dy = data(dy);
  call.args.d_final = data(d_final);
  call.args.dx = grads.x.mutable_data_ptr();
  call.args.d_initial = d_initial.defined() ? d_initial.mutable_data_ptr() : nullptr;
  call.args.dw_blocks = dw.mutable_data_ptr();
  call.run(kernels().backward[cpu_element(in.x)]);
  grads.weight = at::sum(dw, {0}).t().to(in.weight.scalar_type()).contiguous();
  if (d_initial.defined()) {
    // A sequence shorter than the history hands part of it on.
    for (std::int64_t s = 0; s < S && d_final.defined(); ++s) {
      const std::int64_t n = in.sequences.cu_seqlens_host[s + 1] - in.sequences.cu_seqlens_host[s];
      if (n < H) {
        d_initial.select(0, s).narrow(0, n, H - n).add_(d_final.select(0, s).narrow(0, 0, H - n));
      }
    }
    grads.initial_state = d_initial.transpose(1, 2).to(in.initial_state.scalar_type()).contiguous();
  }
  return grads;
}

at::Tensor decode(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& states,
                  const CacheRows& cache_rows) {
  const std::vector<std::int64_t>& slots = cache_rows.slots_host;
  const at::Tensor rows = x.contiguous();
  const at::Tensor w = weight.to(compute_type(x)).contiguous();
  const std::int64_t B = x.size(0), C = x.size(1), W = weight.size(1);
  const at::Tensor y = at::empty({B, C}, x.options());
  const auto work = kernels().step[cpu_element(x)];
  const std::int64_t element = static_cast<std::int64_t>(x.element_size());
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  char* state = static_cast<char*>(states.mutable_data_ptr());
  // A thread's share is worth waking it for from some ten thousand channels on.
  at::parallel_for(0, B, std::max<std::int64_t>(1, 16384 / C),
                   [&](std::int64_t first, std::int64_t last) {
                     for (std::int64_t i = first; i < last; ++i) {
                       work(from + i * C * element, w.const_data_ptr(),
                            state + slots[i] * C * (W - 1) * element, to + i * C * element, C, W);
                     }
                   });
  return y;
}

}  // namespace heddle::ops::conv_cpu
