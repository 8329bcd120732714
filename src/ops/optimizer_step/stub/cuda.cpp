// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {

Step step_wide() { return nullptr; }

Step step_rounded() { return nullptr; }

Step step_eight_bit() { return nullptr; }

}  // namespace heddle::ops::adamw_cuda

namespace heddle::ops::optimizer_step_cuda {

bool square_sum_fits(const at::Tensor&) { return false; }

at::Tensor square_sum(const std::vector<at::Tensor>&) { return {}; }

}  // namespace heddle::ops::optimizer_step_cuda
