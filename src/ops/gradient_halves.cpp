#include "ops/gradient_halves.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "ops/autograd.h"

namespace heddle::ops {

at::Tensor GradientHalves::half(std::int64_t index, const at::Tensor& like) {
  const std::int64_t width = like.size(2);
  if (!whole_.defined()) {
    whole_ =
        at::empty({like.size(0), like.size(1), 2 * width}, like.options().requires_grad(false));
  }
  return whole_.narrow(2, index * width, width);
}

at::Tensor GradientHalves::joined(const at::Tensor& first, const at::Tensor& second) {
  const at::Tensor whole = std::exchange(whole_, at::Tensor());
  const auto is_half = [&](const at::Tensor& gradient, std::int64_t index) {
    const at::Tensor half = whole.narrow(2, index * gradient.size(2), gradient.size(2));
    return gradient.strides() == half.strides() &&
           gradient.const_data_ptr() == half.const_data_ptr();
  };
  if (whole.defined() && is_half(first, 0) && is_half(second, 1)) return whole;
  return at::cat({first, second}, 2);
}

Halves split_halves(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 3 && x.size(2) % 2 == 0 && x.stride(2) == 1, "split_halves: x ", x.sizes(),
              " must be [T,n,2D] with unit stride over the last");
  const std::int64_t width = x.size(2) / 2;
  const auto half = [&](std::int64_t index) {
    // Not a view of autograd's kind: the two share one backward.
    return at::empty({0}, x.options())
        .set_(x.storage(), x.storage_offset() + index * width, {x.size(0), x.size(1), width},
              x.strides());
  };
  const Tensors parts = run_without_gradient([&]() -> Tensors { return {half(0), half(1)}; });
  auto gradients = std::make_shared<GradientHalves>();
  const Tensors out =
      with_gradient("split_halves", {x}, parts,
                    [gradients, like = detached(parts[0])](const Tensors& grads) -> Tensors {
                      if (!grads[0].defined() && !grads[1].defined()) return {{}};
                      const auto own = [&](std::size_t i) {
                        return grads[i].defined() ? grads[i] : at::zeros_like(like);
                      };
                      return {gradients->joined(own(0), own(1))};
                    });
  return {out[0], out[1], std::move(gradients)};
}

}  // namespace heddle::ops
