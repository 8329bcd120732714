#include "ops/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace heddle::ops::cuda {

CUtensorMap tensor_map(const void* data, int64_t rows, int64_t width, int64_t stride,
                       int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                     &found);
    return reinterpret_cast<Encode>(f);
  }();
  if (encode == nullptr)
    throw std::runtime_error("tensor_map (cuda): the driver lacks cuTensorMapEncodeTiled");
  CUtensorMap map;
  const cuuint64_t size[] = {cuuint64_t(width), cuuint64_t(rows)},
                   pitch[] = {cuuint64_t(stride) * 2};
  const cuuint32_t box[] = {64, cuuint32_t(box_rows)}, step[] = {1, 1};
  const CUresult r =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), size, pitch, box,
             step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS)
    throw std::runtime_error("tensor_map (cuda): cuTensorMapEncodeTiled failed with " +
                             std::to_string(int(r)));
  return map;
}

}  // namespace heddle::ops::cuda
