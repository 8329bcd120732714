#include "fixtures.h"

#include <ATen/ops/empty.h>

#include "ckpt/model_writer.h"

namespace heddle::ckpt::testing {

at::Tensor random_tensor(const std::string& name, std::vector<std::int64_t> shape,
                         at::ScalarType dtype) {
  at::Tensor tensor = at::empty(shape, at::TensorOptions(at::kDouble));
  const CounterRng rng(7, name);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.mutable_data_ptr<double>()[i] = rng.normal(static_cast<std::uint64_t>(i));
  }
  return tensor.to(dtype);
}

bool is_identical(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor left = a.contiguous(), right = b.contiguous();
  return left.numel() == 0 || std::memcmp(left.data_ptr(), right.data_ptr(), left.nbytes()) == 0;
}

void write_model(const Path& path, const std::vector<NamedTensor>& tensors,
                 std::uint64_t shard_bytes) {
  ModelWriter writer(path, {.max_shard_bytes = shard_bytes});
  for (const NamedTensor& tensor : tensors) writer.add(tensor);
  writer.set_config({{"model_type", "test"}});
  writer.commit();
}

}  // namespace heddle::ckpt::testing
