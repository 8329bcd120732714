// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/rotary/kernels.h"

namespace heddle::ops::qk_norm_rope_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::qk_norm_rope_cuda
