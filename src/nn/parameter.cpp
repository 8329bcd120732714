#include "nn/parameter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "ops/autograd.h"

namespace heddle::nn {

Parameter::Parameter(std::string name, std::vector<std::int64_t> global_shape, Placement placement)
    : name_(std::move(name)),
      global_shape_(std::move(global_shape)),
      local_shape_(global_shape_),
      placement_(std::move(placement)) {
  for (const std::int64_t size : global_shape_) segments_.push_back({{0, 0, size}});
  is_expert_ = std::any_of(placement_.begin(), placement_.end(),
                           [](const Shard& shard) { return shard.mesh_dim == comm::Dim::kEp; });
}

void Parameter::place(const comm::Mesh& mesh) {
  bool has_own_part = is_expert_ || is_row_table_;
  for (const Shard& shard : placement_) {
    const std::int64_t ranks = mesh.size(shard.mesh_dim), place = mesh.coordinate(shard.mesh_dim);
    if (ranks == 1) continue;
    has_own_part = has_own_part || shard.mesh_dim == comm::Dim::kTp;
    const auto dim = static_cast<std::size_t>(shard.tensor_dim);
    const std::vector<std::int64_t> blocks =
        shard.blocks.empty() ? std::vector<std::int64_t>{global_shape_[dim]} : shard.blocks;
    segments_[dim].clear();
    const bool has_copies = shard.parts > 0 && ranks > shard.parts;
    const std::int64_t parts = has_copies ? shard.parts : ranks;
    if (has_copies) copies_ = ranks / parts;
    std::int64_t local = 0, global = 0;
    for (const std::int64_t block : blocks) {
      if (block % parts != 0 || ranks % parts != 0) {
        throw_error<ModelError>("{}: {} of dimension {} do not divide by the {} ranks along {}",
                                name_, block, dim, ranks, comm::name(shard.mesh_dim));
      }
      const std::int64_t part = block / parts;
      segments_[dim].push_back({local, global + place / copies_ * part, part});
      local += part;
      global += block;
    }
    local_shape_[dim] = local;
  }
  const std::int64_t along_tp = mesh.coordinate(comm::Dim::kTp);
  is_copy_ = has_own_part ? along_tp % copies_ > 0 : along_tp > 0;
  if (copies_ > 1) set_partial_gradient();
}

std::int64_t Parameter::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t size : global_shape_) count *= size;
  return count;
}

std::vector<std::int64_t> Parameter::global_indices(std::int64_t dim) const {
  std::vector<std::int64_t> indices;
  for (const Segment& segment : segments_[static_cast<std::size_t>(dim)]) {
    for (std::int64_t i = 0; i < segment.size; ++i) indices.push_back(segment.global + i);
  }
  return indices;
}

void Parameter::allocate(c10::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  value_ = at::empty(local_shape_, options);
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
  value_.unsafeGetTensorImpl()->set_sizes_contiguous(local_shape_);
  anchor_ = at::empty({0}, options);
  set_trainable(trainable_);
}

void Parameter::allocate_elsewhere(c10::ScalarType dtype, c10::Device device) {
  allocate_released(dtype, device);
  std::vector<std::int64_t> no_rows = local_shape_;
  no_rows[0] = 0;
  set_owned(at::empty(no_rows, at::TensorOptions().dtype(dtype).device(device)), 0);
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

void Parameter::exchange_memory(const at::Tensor& other) {
  TORCH_CHECK(has_memory() && other.sizes() == value_.sizes() && other.is_contiguous() &&
                  value_.is_contiguous() && other.storage_offset() == 0 &&
                  value_.storage_offset() == 0 && other.scalar_type() == value_.scalar_type(),
              name_, ": memory of shape ", other.sizes(), " for a value of shape ", value_.sizes());
  c10::StorageImpl* theirs = other.storage().unsafeGetStorageImpl();
  c10::StorageImpl* own = value_.storage().unsafeGetStorageImpl();
  const std::size_t own_bytes = own->nbytes();
  c10::DataPtr taken = own->set_data_ptr(theirs->set_data_ptr({nullptr, theirs->device()}));
  own->set_nbytes(theirs->nbytes());
  theirs->set_data_ptr_noswap(std::move(taken));
  theirs->set_nbytes(own_bytes);
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

bool Parameter::is_whole_in_blocks_of(std::int64_t columns) const {
  if (global_shape_.size() < 2) return false;
  return std::all_of(segments_.back().begin(), segments_.back().end(), [&](const Segment& s) {
    return s.local % columns == 0 && s.global % columns == 0 && s.size % columns == 0;
  });
}

Layout Parameter::layout_of(Sizes sizes, std::int64_t columns) const {
  Layout layout{global_shape_, std::move(sizes), {{}}};
  if (columns > 1) layout.global_shape.back() /= columns;
  for (std::size_t d = 0; d < global_shape_.size(); ++d) {
    const std::int64_t first = d == 0 ? first_owned_row_ : 0;
    const std::int64_t unit = d + 1 == global_shape_.size() ? columns : 1;
    std::vector<Layout::Part> cut;
    for (const Layout::Part& part : layout.parts) {
      for (const Segment& whole : segments_[d]) {
        const Segment segment{whole.local / unit, whole.global / unit, whole.size / unit};
        const std::int64_t begin = std::max(first, segment.local);
        const std::int64_t end =
            std::min(first + layout.local_shape[d], segment.local + segment.size);
        if (begin >= end) continue;
        Layout::Part next = part;
        next.global.offset.push_back(segment.global + begin - segment.local);
        next.global.size.push_back(end - begin);
        next.local.push_back(begin - first);
        cut.push_back(std::move(next));
      }
    }
    layout.parts = std::move(cut);
  }
  return layout;
}

Layout Parameter::layout() const {
  return layout_of(owned_.defined() ? owned_.sizes().vec() : local_shape_, 1);
}

std::vector<Box> Parameter::boxes(const at::Tensor& like_owned, std::int64_t columns) const {
  std::vector<Box> boxes;
  for (const Layout::Part& part : layout_of(like_owned.sizes().vec(), columns).parts) {
    Box box{part.global, like_owned};
    for (std::size_t d = 0; d < part.local.size(); ++d) {
      box.tensor =
          box.tensor.narrow(static_cast<std::int64_t>(d), part.local[d], part.global.size[d]);
    }
    boxes.push_back(std::move(box));
  }
  return boxes;
}

void Parameter::write_owned(const at::Tensor& whole) {
  const ops::NoGradient guard;
  for (const Box& box : boxes(owned())) {
    at::Tensor part = whole;
    for (std::size_t d = 0; d < box.global.size.size(); ++d) {
      part = part.narrow(static_cast<std::int64_t>(d), box.global.offset[d], box.global.size[d]);
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

void Parameter::clear_gradient() {
  gradient_.reset();
  if (value_.defined() && value_.grad().defined()) value_.mutable_grad().reset();
}

}  // namespace heddle::nn
