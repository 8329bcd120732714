// The numbers of a step, as the CUDA kernels of AdamW take them. Plain C++ header.
#pragma once

#include "ops/optimizer_step/adamw_now.h"

namespace heddle::ops::cuda {

struct AdamwScalars {
  float beta1, beta2, eps;
  AdamwNow now;
  const AdamwNow* on_device;  ///< Replaces `now` unless null.
};

}  // namespace heddle::ops::cuda
