// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops {

namespace gated_delta_rule_cuda {
void add(Registry&) {}
void add_decode(Registry&) {}
}  // namespace gated_delta_rule_cuda

namespace gdn_gates_cuda {
void add(Registry&) {}
}  // namespace gdn_gates_cuda

namespace gated_rms_norm_cuda {
void add(Registry&) {}
}  // namespace gated_rms_norm_cuda

}  // namespace heddle::ops
