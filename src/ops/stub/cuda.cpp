// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/builtin.h"
#include "ops/grouped_low_rank/in_products.h"
#include "ops/linear/few_row_layers.h"
#include "ops/linear/few_row_lows.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops {

void register_cuda(Registry&) {}

Tensors few_row_layers(const KernelTable&, const FewRowLayers&) { return {}; }

Tensors few_row_lows(const Linear::Functions&, const at::Tensor&, const Tensors&,
                     const std::vector<double>&) {
  return {};
}

Tensors outputs_with_lows(const Linear::Functions&, const std::vector<Products>&, const at::Tensor&,
                          const at::Tensor&, const LowRankGroups&) {
  return {};
}

at::Tensor input_gradient_with_lows(const Linear::Functions&, const Products&, const at::Tensor&,
                                    const LowRankGroups&) {
  return {};
}

namespace optimizer_step_cuda {

bool square_sum_fits(const at::Tensor&) { return false; }

at::Tensor square_sum(const std::vector<at::Tensor>&) { return {}; }

at::Tensor square_sums(const std::vector<std::vector<at::Tensor>>&) { return {}; }

}  // namespace optimizer_step_cuda

}  // namespace heddle::ops
