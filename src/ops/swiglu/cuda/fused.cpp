// Joins the CUDA kernels of SwiGLU with ATen.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <optional>
#include <vector>

#include "ops/cuda/eight_bit.h"
#include "ops/cuda/gated_product.h"
#include "ops/cuda/gated_product_fp8.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops::swiglu_cuda {
namespace {

cuda::GatedProductShape shape_of(const at::Tensor& gate) {
  return {cuda::GateActivation::kSilu, cuda::element_of(gate), gate.size(0), 1, gate.size(1)};
}

/// Whether gate and up are the two halves of one [T,2F] tensor: then their gradients are too, and
/// joining them needs no copy.
bool halves_of_one(const at::Tensor& gate, const at::Tensor& up) {
  return gate.numel() > 0 && gate.is_alias_of(up) && gate.stride(0) == 2 * gate.size(1) &&
         gate.strides() == up.strides() && gate.stride(1) == 1 &&
         up.storage_offset() == gate.storage_offset() + gate.size(1);
}

/// Room for the results in 8 bits; none unless the kernel that writes them takes these.
std::vector<cuda::EightBitRows> eight_bit_results(const std::vector<at::Tensor>& results,
                                                  const std::vector<at::Tensor>& tensors) {
  std::vector<cuda::EightBitRows> rooms;
  for (const at::Tensor& x : tensors) {
    if (x.defined() &&
        (!cuda::has_rows_of_16_bytes(x) || x.size(1) > cuda::kGatedProductLongestFp8Row))
      return {};
  }
  for (const at::Tensor& result : results) {
    std::optional<cuda::EightBitRows> room = cuda::eight_bit_for(result);
    if (!room) return {};
    rooms.push_back(*std::move(room));
  }
  return rooms;
}

template <bool kEight>
at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  const cuda::OnDevice on(gate);
  const at::Tensor g = cuda::with_unit_stride(gate), u = cuda::with_unit_stride(up);
  at::Tensor y = at::empty(gate.sizes(), gate.options());
  if constexpr (kEight) {
    const std::vector<cuda::EightBitRows> rooms = eight_bit_results({y}, {g, u});
    if (!rooms.empty()) {
      cuda::swiglu_forward_fp8(gate.size(0), gate.size(1), cuda::input_rows(u), cuda::input_rows(g),
                               cuda::output_rows(y), cuda::places_in(rooms[0]), on.stream());
      cuda::lay_beside(y, rooms[0]);
      return y;
    }
  }
  cuda::gated_product_forward(shape_of(gate), cuda::input_rows(u), cuda::input_rows(g),
                              cuda::output_rows(y), on.stream());
  return y;
}

/// `y`, unless undefined, takes the output.
template <bool kEight>
std::pair<at::Tensor, at::Tensor> gradients(const at::Tensor& gate, const at::Tensor& up,
                                            const at::Tensor& grad_y, const at::Tensor& y) {
  const cuda::OnDevice on(gate);
  const at::Tensor g = cuda::with_unit_stride(gate), u = cuda::with_unit_stride(up),
                   dy = cuda::with_unit_stride(grad_y);
  at::Tensor d_gate, d_up;
  if (halves_of_one(gate, up)) {
    const std::int64_t width = gate.size(1);
    const at::Tensor both = at::empty({gate.size(0), 2 * width}, gate.options());
    d_gate = both.narrow(1, 0, width);
    d_up = both.narrow(1, width, width);
  } else {
    d_gate = at::empty(gate.sizes(), gate.options());
    d_up = at::empty(up.sizes(), up.options());
  }
  if constexpr (kEight) {
    const std::vector<cuda::EightBitRows> rooms =
        eight_bit_results({d_up, d_gate}, {g, u, dy, d_gate, d_up});
    if (!rooms.empty()) {
      cuda::swiglu_backward_fp8(gate.size(0), gate.size(1), cuda::input_rows(u),
                                cuda::input_rows(g), cuda::input_rows(dy), cuda::output_rows(d_up),
                                cuda::output_rows(d_gate), cuda::output_rows(y),
                                cuda::places_in(rooms[0]), cuda::places_in(rooms[1]), on.stream());
      cuda::lay_beside(d_up, rooms[0]);
      cuda::lay_beside(d_gate, rooms[1]);
      return {d_gate, d_up};
    }
  }
  cuda::gated_product_backward(shape_of(gate), cuda::input_rows(u), cuda::input_rows(g),
                               cuda::input_rows(dy), cuda::output_rows(d_up),
                               cuda::output_rows(d_gate), cuda::output_rows(y), on.stream());
  return {d_gate, d_up};
}

template <bool kEight>
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gate, const at::Tensor& up,
                                           const at::Tensor& grad_y) {
  return gradients<kEight>(gate, up, grad_y, {});
}

template <bool kEight>
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_again(const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              const at::Tensor& grad_y) {
  const at::Tensor y = at::empty(gate.sizes(), gate.options());
  auto [d_gate, d_up] = gradients<kEight>(gate, up, grad_y, y);
  return {d_gate, d_up, y};
}

}  // namespace

}  // namespace heddle::ops::swiglu_cuda

namespace heddle::ops::cuda {

void add_swiglu(Registry& registry) {
  using namespace swiglu_cuda;
  KernelInfo info = KernelInfo::cuda("cuda.fused");
  info.falls_back = "linear's cuda.sm90_or_cublas for up to 64 rows without gradient";
  registry.add<Swiglu>(info, {forward<false>, backward<false>, backward_again<false>});
  KernelInfo fp8 = KernelInfo::cuda("cuda.fused_fp8", {c10::ScalarType::BFloat16});
  fp8.only_by_name = true;
  fp8.falls_back = fmt::format(
      "cuda.fused for fewer than {} rows, rows narrower than {}, longer than {}, not a multiple "
      "of 16 or not starting on 16 bytes",
      kFewestEightBitRows, kNarrowestEightBit, kGatedProductLongestFp8Row);
  registry.add<Swiglu>(fp8, {forward<true>, backward<true>, backward_again<true>});
}

}  // namespace heddle::ops::cuda
