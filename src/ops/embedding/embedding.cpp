#include "ops/embedding/embedding.h"

#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/embedding/kernels.h"

namespace heddle::ops {
namespace {

void reference(const at::Tensor& tokens, const at::Tensor& grad_y, at::Tensor& table_gradient) {
  table_gradient.index_add_(0, tokens, grad_y.to(table_gradient.scalar_type()));
}

}  // namespace

void register_embedding(Registry& registry) {
  registry.add<Embedding>(KernelInfo::reference(), {reference});
}

}  // namespace heddle::ops
