#include "ckpt/checked_tensor.h"

#include <ATen/ops/isfinite.h>

#include <cstdint>
#include <span>

#include "base/errors.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt {
namespace {

/// Whether no number has all bits of its exponent, as infinity and NaN have.
template <class Bits>
bool are_finite(std::span<const Bits> numbers, Bits exponent) {
  bool is_found = false;
  for (const Bits bits : numbers) is_found |= (bits & exponent) == exponent;
  return !is_found;
}

/// One pass over the bits: libtorch makes several, which the hundreds of small tensors of an
/// adapter would wait for.
bool is_finite(const at::Tensor& tensor) {
  const auto size = static_cast<std::size_t>(tensor.numel());
  const auto numbers = [&]<class Bits>(Bits exponent) {
    return are_finite<Bits>({static_cast<const Bits*>(tensor.const_data_ptr()), size}, exponent);
  };
  if (tensor.is_contiguous() && tensor.device().is_cpu()) {
    switch (tensor.scalar_type()) {
      case at::kFloat:
        return numbers(std::uint32_t{0x7f800000});
      case at::kBFloat16:
        return numbers(std::uint16_t{0x7f80});
      case at::kHalf:
        return numbers(std::uint16_t{0x7c00});
      default:
        break;
    }
  }
  return at::isfinite(tensor).all().item<bool>();
}

}  // namespace

at::Tensor read_finite_tensor(const StoredTensor& source, std::optional<at::ScalarType> dtype) {
  at::Tensor tensor = dtype ? read_tensor(source, *dtype) : read_tensor(source);
  if (is_finite(tensor)) return tensor;
  throw_error<ModelError>(
      "{} holds NaN or infinity: the file is damaged, or the training that wrote it had diverged",
      source.where());
}

void require_unchanged(const std::vector<StoredTensor>& tensors) {
  const files::MappedFile* last = nullptr;  // tensors of a file stand together
  for (const StoredTensor& tensor : tensors) {
    if (tensor.map.get() != last && tensor.map) tensor.map->require_unchanged();
    last = tensor.map.get();
  }
}

}  // namespace heddle::ckpt
