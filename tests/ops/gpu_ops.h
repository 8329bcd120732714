// Shared by tests of the kernels through CUDA operators of libtorch.
#pragma once

#include <ATen/Context.h>

#include <string>

#include "ops/operator_support.h"

namespace heddle::ops::testing {

inline const c10::Device kGpu(c10::DeviceType::CUDA, 0);

inline KernelTable gpu_table(const OpRequest& request, const std::string& name,
                             c10::ScalarType dtype) {
  return table_of(request, name, dtype, {Platform::kCuda});
}

inline Tensors to_gpu(const Tensors& tensors, c10::ScalarType dtype) {
  Tensors moved;
  for (const at::Tensor& x : tensors) moved.push_back(x.to(kGpu, dtype));
  return moved;
}

class GpuOps : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
  }
};

}  // namespace heddle::ops::testing
