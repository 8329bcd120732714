#include "ops/cuda/eight_bit.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace heddle::ops::cuda {
namespace {

/// libtorch's place for what a back end adds to a tensor; copies of the tensor share it.
struct Beside : c10::BackendMeta {
  EightBitRows rows;
  const void* data = nullptr;
  std::int64_t version = 0;
};

/// The form that was laid beside x, unless x is another tensor now.
Beside* beside(const at::Tensor& x) {
  auto* const found = dynamic_cast<Beside*>(x.unsafeGetTensorImpl()->get_backend_meta());
  if (found == nullptr || !found->rows.values.defined() || x.is_inference() ||
      found->version != x._version() || found->data != x.const_data_ptr() ||
      found->rows.values.sizes() != x.sizes() || !x.is_contiguous())
    return nullptr;
  return found;
}

}  // namespace

std::optional<EightBitRows> eight_bit_for(const at::Tensor& x) {
  if (x.scalar_type() != at::kBFloat16 || x.dim() != 2 || !x.is_contiguous() || x.is_inference() ||
      x.size(0) < kFewestEightBitRows || x.size(1) < kNarrowestEightBit || x.size(1) % 16 != 0)
    return std::nullopt;
  return EightBitRows{at::empty(x.sizes(), x.options().dtype(at::kFloat8_e4m3fn)),
                      at::empty({x.size(0), 1}, x.options().dtype(at::kFloat))};
}

Fp8Rows places_in(const EightBitRows& rows) {
  return {rows.values.mutable_data_ptr(), rows.scales.mutable_data_ptr<float>()};
}

void lay_beside(const at::Tensor& x, EightBitRows rows) {
  auto meta = c10::make_intrusive<Beside>();
  meta->rows = std::move(rows);
  meta->data = x.const_data_ptr();
  meta->version = x._version();
  x.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

bool has_beside(const at::Tensor& x) { return beside(x) != nullptr; }

std::optional<EightBitRows> look_beside(const at::Tensor& x) {
  const Beside* const found = beside(x);
  if (found == nullptr) return std::nullopt;
  return found->rows;
}

std::optional<EightBitRows> take_beside(const at::Tensor& x) {
  Beside* const found = beside(x);
  if (found == nullptr) return std::nullopt;
  return std::exchange(found->rows, {});
}

}  // namespace heddle::ops::cuda
