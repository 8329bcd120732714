// The convolution of one new token in each of many sequences: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

struct ConvDecodeArguments {
  Element type, weight_type;  ///< `type`: of x, states and y.
  int batch = 0, channels = 0, width = 0;
  InputRows x;
  const void* weight = nullptr;    ///< [channels,width]
  void* states = nullptr;          ///< [slots,channels,width-1], shifted in place.
  const int64_t* slots = nullptr;  ///< [batch]
  void* y = nullptr;               ///< [batch,channels]
};

void conv_decode(const ConvDecodeArguments& a, cudaStream_t stream);

}  // namespace heddle::ops::cuda
