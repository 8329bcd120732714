// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {

Step step_wide() { return nullptr; }

Step step_rounded() { return nullptr; }

}  // namespace heddle::ops::adamw_cuda
