// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/swiglu/kernels.h"

namespace heddle::ops::swiglu_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::swiglu_cuda
