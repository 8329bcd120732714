#include "nn/parameter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "base/errors.h"
#include "ops/autograd.h"

namespace heddle::nn {

Parameter::Parameter(std::string name, std::vector<std::int64_t> global_shape, Placement placement)
    : name_(std::move(name)),
      global_shape_(std::move(global_shape)),
      placement_(std::move(placement)) {}

std::int64_t Parameter::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t size : global_shape_) count *= size;
  return count;
}

void Parameter::allocate(c10::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  value_ = at::empty(global_shape_, options);
  anchor_ = at::empty({0}, options);
  set_trainable(trainable_);
}

at::Tensor Parameter::data() const {
  if (!value_.defined()) throw_error<InternalError>("parameter {} has no storage", name_);
  return value_.detach();
}

void Parameter::set_data(at::Tensor data) {
  value_ = data.detach();
  anchor_ = at::empty({0}, data.options());
  set_trainable(trainable_);
}

void Parameter::set_trainable(bool trainable) {
  trainable_ = trainable;
  if (!value_.defined()) return;
  value_.set_requires_grad(trainable);
  anchor_.set_requires_grad(trainable);
}

bool Parameter::accumulates_in_place() const {
  return gradient_dtype_ == c10::ScalarType::Undefined || gradient_dtype_ == value_.scalar_type();
}

at::Tensor& Parameter::gradient_buffer() {
  if (!gradient_.defined()) {
    const auto dtype = accumulates_in_place() ? value_.scalar_type() : gradient_dtype_;
    gradient_ = at::zeros(value_.sizes(), value_.options().dtype(dtype).requires_grad(false));
  }
  return gradient_;
}

void Parameter::add_gradient(const at::Tensor& gradient) {
  if (gradient_.defined()) {
    gradient_.add_(gradient);
  } else {
    const auto dtype = accumulates_in_place() ? value_.scalar_type() : gradient_dtype_;
    gradient_ = gradient.to(dtype).contiguous();
  }
}

void Parameter::collect_gradient() {
  if (!value_.defined() || !value_.grad().defined()) return;
  const ops::NoGradient guard;
  add_gradient(value_.grad());
  value_.mutable_grad().reset();
}

}  // namespace heddle::nn
