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
  embedding_cuda::add(registry);
  registry.add<Embedding>({.op = "",
                           .name = "reference",
                           .device = {},
                           .dtypes = reference_dtypes(),
                           .is_reference = true,
                           .refuse = {},
                           .on_chip_bytes = {}},
                          {reference});
}

}  // namespace heddle::ops
