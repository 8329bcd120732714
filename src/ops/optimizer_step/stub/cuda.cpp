// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {

StepRounded step_rounded() { return nullptr; }

}  // namespace heddle::ops::adamw_cuda
