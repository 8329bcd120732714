// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/linear/few_row_lows.h"
#include "ops/linear/kernels.h"

namespace heddle::ops {

Tensors few_row_lows(const Linear::Functions&, const at::Tensor&, const Tensors&,
                     const std::vector<double>&) {
  return {};
}

}  // namespace heddle::ops

namespace heddle::ops::linear_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::linear_cuda

namespace heddle::ops::linear_fp8 {

void add(Registry&) {}

}  // namespace heddle::ops::linear_fp8
