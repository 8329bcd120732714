// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/sampling/kernels.h"

namespace heddle::ops::sample_tokens_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::sample_tokens_cuda
