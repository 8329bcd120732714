#include "ops/moe/frozen_experts.h"

#include <utility>

#include "ops/builtin.h"

namespace heddle::ops {
namespace {

/// libtorch's place for what a back end adds to a tensor.
struct Beside : c10::BackendMeta {
  EightBitExperts experts;
};

}  // namespace

void lay_experts_beside(const at::Tensor& weight, EightBitExperts experts) {
  auto meta = c10::make_intrusive<Beside>();
  meta->experts = std::move(experts);
  weight.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

const EightBitExperts* experts_beside(const at::Tensor& weight) {
  auto* const found = dynamic_cast<Beside*>(weight.unsafeGetTensorImpl()->get_backend_meta());
  return found == nullptr ? nullptr : &found->experts;
}

std::int64_t bytes_beside(const at::Tensor& weight) {
  const EightBitExperts* const experts = experts_beside(weight);
  if (experts == nullptr) return 0;
  return static_cast<std::int64_t>(experts->values.nbytes() + experts->scales.nbytes());
}

void register_frozen_experts(Registry& registry) {
  KernelInfo info;
  info.name = "as_loaded";
  info.dtypes = KernelInfo::reference().dtypes;
  registry.add<FrozenExperts>(info, {nullptr});
}

}  // namespace heddle::ops
