// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/embedding/kernels.h"

namespace heddle::ops::embedding_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::embedding_cuda
