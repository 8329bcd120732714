// Shared by the interfaces of the CUDA kernels: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace heddle::ops::cuda {

/// The element type of a tensor. Arithmetic is fp32 for both.
enum class Element { kFloat32, kBFloat16 };

inline int64_t bytes_of(Element type) { return type == Element::kBFloat16 ? 2 : 4; }

/// The rows of a tensor [outer, inner, width] whose width is contiguous: row r begins at
/// (r / inner) * outer_stride + (r % inner) * inner_stride. A matrix has inner = 1. Strides count
/// elements.
template <class Pointer>
struct Rows {
  Pointer data = nullptr;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
};

using InputRows = Rows<const void*>;
using OutputRows = Rows<void*>;

/// Throws std::runtime_error naming `what` when the last launch failed.
void check_launch(const char* what);

/// Multiprocessors of the current device.
int multiprocessors();

/// Whether this build has code for sm_90a and the current device runs it.
bool has_sm90a();

/// Version of the current device, 10 x major + minor; 0 if there is none.
int compute_capability();

}  // namespace heddle::ops::cuda
