// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/moe/kernels.h"

namespace heddle::ops::moe_experts_grouped_mm {

void add(Registry&) {}

}  // namespace heddle::ops::moe_experts_grouped_mm

namespace heddle::ops::moe_route_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::moe_route_cuda
