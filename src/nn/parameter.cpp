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
  if (!has_memory()) throw_error<InternalError>("parameter {} is released", name_);
  return value_.detach();
}

void Parameter::allocate_released(c10::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  value_ = at::empty({0}, options);
  value_.unsafeGetTensorImpl()->set_sizes_contiguous(global_shape_);
  anchor_ = at::empty({0}, options);
  set_trainable(trainable_);
}

bool Parameter::has_memory() const {
  return value_.defined() && value_.storage().nbytes() >= value_.nbytes();
}

void Parameter::take_memory(at::Tensor full) {
  TORCH_CHECK(full.sizes() == value_.sizes() && full.is_contiguous() &&
                  full.storage_offset() == 0 && full.scalar_type() == value_.scalar_type(),
              name_, ": memory of shape ", full.sizes(), " for a value of shape ", value_.sizes());
  c10::StorageImpl* from = full.storage().unsafeGetStorageImpl();
  c10::StorageImpl* to = value_.storage().unsafeGetStorageImpl();
  const std::size_t bytes = from->nbytes();
  to->set_data_ptr_noswap(from->set_data_ptr({nullptr, from->device()}));
  to->set_nbytes(bytes);
  from->set_nbytes(0);
}

void Parameter::release_memory() {
  c10::StorageImpl* storage = value_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap({nullptr, storage->device()});
  storage->set_nbytes(0);
}

void Parameter::set_owned(at::Tensor rows, std::int64_t first_row) {
  owned_ = std::move(rows);
  first_owned_row_ = first_row;
}

at::Tensor Parameter::owned() const { return owned_.defined() ? owned_ : data(); }

std::vector<Box> Parameter::boxes(const at::Tensor& like_owned) const {
  if (like_owned.numel() == 0) return {};
  std::vector<std::int64_t> offset(global_shape_.size(), 0);
  if (!offset.empty()) offset[0] = first_owned_row_;
  return {{std::move(offset), like_owned}};
}

void Parameter::write_owned(const at::Tensor& whole) {
  const ops::NoGradient guard;
  for (const Box& box : boxes(owned())) {
    at::Tensor part = whole;
    for (std::size_t d = 0; d < box.offset.size(); ++d) {
      const auto dim = static_cast<std::int64_t>(d);
      part = part.narrow(dim, box.offset[d], box.tensor.size(dim));
    }
    at::Tensor(box.tensor).copy_(part);
  }
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
    gradient_ =
        at::zeros(value_.sizes(), value_.options().dtype(gradient_dtype()).requires_grad(false));
  }
  return gradient_;
}

void Parameter::add_gradient(const at::Tensor& gradient) {
  if (gradient_.defined()) {
    gradient_.add_(gradient);
  } else {
    gradient_ = gradient.to(gradient_dtype()).contiguous();
  }
}

void Parameter::collect_gradient() {
  if (!value_.defined() || !value_.grad().defined()) return;
  const ops::NoGradient guard;
  add_gradient(value_.grad());
  value_.mutable_grad().reset();
}

}  // namespace heddle::nn
