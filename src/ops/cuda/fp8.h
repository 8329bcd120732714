// Plain C++ header.
#pragma once

namespace heddle::ops::cuda {

/// Where a kernel writes its bf16 result [rows,width] in 8 bits as well: e4m3, contiguous, with a
/// scale for each row, as fp8_rows makes them of that result. Null: nowhere.
struct Fp8Rows {
  void* values = nullptr;
  float* scales = nullptr;
};

}  // namespace heddle::ops::cuda
