// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/causal_conv1d/kernels.h"

namespace heddle::ops::causal_conv1d_cuda {

void add(Registry&) {}
void add_decode(Registry&) {}

}  // namespace heddle::ops::causal_conv1d_cuda
