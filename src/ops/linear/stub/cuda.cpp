// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/linear/kernels.h"

namespace heddle::ops::linear_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::linear_cuda

namespace heddle::ops::linear_fp8 {

void add(Registry&) {}

}  // namespace heddle::ops::linear_fp8
