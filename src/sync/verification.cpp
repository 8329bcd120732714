#include "sync/verification.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "ops/autograd.h"

namespace heddle::sync {
namespace {

/// Elements that are hashed at once: each takes some words of 64 bits on the way.
constexpr std::int64_t kAtOnce = std::int64_t{1} << 22;

/// The bits of each element as an int64.
at::Tensor bits_of(const at::Tensor& tensor) {
  const c10::ScalarType types[] = {at::kChar, at::kShort, at::kInt, at::kLong};
  const auto width =
      static_cast<std::size_t>(std::countr_zero(static_cast<std::size_t>(tensor.element_size())));
  return tensor.contiguous().view(types[width]).to(at::kLong);
}

at::Tensor shifted_into(const at::Tensor& x, int bits) {
  return x.bitwise_xor(x.bitwise_right_shift(bits));
}

/// The finalizer of splitmix64.
at::Tensor mixed(const at::Tensor& bits, const at::Tensor& places) {
  const auto constant = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  at::Tensor x = bits + (places + 1) * constant(0x9E3779B97F4A7C15);
  x = shifted_into(x, 30) * constant(0xBF58476D1CE4E5B9);
  x = shifted_into(x, 27) * constant(0x94D049BB133111EB);
  return shifted_into(x, 31);
}

/// The share of a tensor of `shape` that `tensor` holds: along each dimension, `indices` in the
/// global one.
std::int64_t hash_of(const at::Tensor& tensor, const std::vector<at::Tensor>& indices,
                     const std::vector<std::int64_t>& shape) {
  if (tensor.numel() == 0) return 0;
  const auto dims = static_cast<std::int64_t>(shape.size());
  // An NPU need not know integers of 64 bits.
  const c10::Device device =
      tensor.device().is_privateuseone() ? c10::Device(at::kCPU) : tensor.device();
  at::Tensor places = at::zeros(std::vector<std::int64_t>(shape.size(), 1), at::kLong).to(device);
  std::int64_t stride = 1;
  std::vector<at::Tensor> of_dims(shape.size());
  for (std::int64_t d = dims - 1; d >= 0; --d) {
    std::vector<std::int64_t> view(shape.size(), 1);
    view[static_cast<std::size_t>(d)] = -1;
    of_dims[static_cast<std::size_t>(d)] =
        (indices[static_cast<std::size_t>(d)] * stride).view(view).to(device);
    stride *= shape[static_cast<std::size_t>(d)];
  }
  for (std::int64_t d = 1; d < dims; ++d) places = places + of_dims[static_cast<std::size_t>(d)];
  const std::int64_t rows = tensor.size(0),
                     step = std::max<std::int64_t>(1, kAtOnce / (tensor.numel() / rows));
  at::Tensor sum = at::zeros({}, at::TensorOptions(device).dtype(at::kLong));
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t count = std::min(step, rows - first);
    sum += mixed(bits_of(tensor.narrow(0, first, count).to(device)),
                 places + of_dims[0].narrow(0, first, count))
               .sum();
  }
  return sum.item<std::int64_t>();
}

std::int64_t hash_of_box(const nn::Box& box, const std::vector<std::int64_t>& shape) {
  std::vector<at::Tensor> indices;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    indices.push_back(
        at::arange(box.global.offset[d], box.global.offset[d] + box.global.size[d], at::kLong));
  }
  return hash_of(box.tensor, indices, shape);
}

std::vector<TensorHash> named(const std::vector<std::string>& names, const at::Tensor& sums) {
  std::vector<TensorHash> hashes;
  for (std::size_t i = 0; i < names.size(); ++i)
    hashes.push_back(
        {names[i], static_cast<std::uint64_t>(sums.const_data_ptr<std::int64_t>()[i])});
  std::ranges::sort(hashes, {}, &TensorHash::name);
  return hashes;
}

}  // namespace

std::vector<TensorHash> sent_hashes(const std::vector<Part>& parts, const comm::Group& trainers) {
  const ops::NoGradient guard;
  std::vector<std::string> names;
  at::Tensor sums = at::zeros({std::ssize(parts)}, at::kLong);
  auto* sum = sums.mutable_data_ptr<std::int64_t>();
  for (const Part& part : parts) {
    std::uint64_t own = 0;
    for (const nn::Box& box : part.boxes)
      own += static_cast<std::uint64_t>(hash_of_box(box, part.info.shape));
    names.push_back(part.info.name);
    *sum++ = static_cast<std::int64_t>(own);
  }
  trainers.all_reduce_sum(sums);
  return named(names, sums);
}

std::vector<TensorHash> held_hashes(const Visit& visit, const comm::Group& tensor_group) {
  const ops::NoGradient guard;
  std::vector<std::string> names;
  std::vector<std::int64_t> whole, divided;
  visit([&](nn::Parameter& parameter) {
    const std::vector<std::int64_t>& shape = parameter.global_shape();
    std::vector<at::Tensor> indices;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      indices.push_back(
          at::tensor(parameter.global_indices(static_cast<std::int64_t>(d)), at::kLong));
    }
    const bool is_whole = parameter.local_shape() == shape;
    const std::int64_t own = hash_of(parameter.data(), indices, shape);
    // One of the ranks that have the same part of a divided value counts.
    const bool counts = !is_whole && tensor_group.rank() % parameter.copies() == 0;
    names.push_back(parameter.name());
    whole.push_back(is_whole ? own : 0);
    divided.push_back(counts ? own : 0);
  });
  at::Tensor sums = at::tensor(divided, at::kLong);
  tensor_group.all_reduce_sum(sums);
  return named(names, sums + at::tensor(whole, at::kLong));
}

std::string first_difference(const std::vector<TensorHash>& trainer,
                             const std::vector<TensorHash>& rollout) {
  for (std::size_t i = 0; i < std::max(trainer.size(), rollout.size()); ++i) {
    if (i >= trainer.size() || i >= rollout.size() || trainer[i].name != rollout[i].name) {
      return fmt::format("one side alone has {}",
                         i < trainer.size() ? trainer[i].name : rollout[i].name);
    }
    if (trainer[i].hash != rollout[i].hash) {
      return fmt::format("{} has hash {:016x} at the trainer and {:016x} here", trainer[i].name,
                         trainer[i].hash, rollout[i].hash);
    }
  }
  return "";
}

}  // namespace heddle::sync
