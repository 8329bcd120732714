// A build without the CUDA back end (cmake --preset cuda has it) offers no kernel of it.
#include "ops/attention/kernels.h"

namespace heddle::ops::output_gate_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::output_gate_cuda

namespace heddle::ops::attention_cudnn {

void add(Registry&) {}

}  // namespace heddle::ops::attention_cudnn

namespace heddle::ops::attention_decode_cuda {

void add(Registry&) {}

}  // namespace heddle::ops::attention_decode_cuda
