// Sums of products of a few rows: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace heddle::ops::cuda {

constexpr int kMostFewRows = 16, kMostFewRowSums = 6, kMostFewRowTerms = 2;

/// a [rows,depth] and b [columns,depth], bf16; rows begin on 16 bytes and depth is a multiple of 8.
struct FewRowTerm {
  const void *a = nullptr, *b = nullptr;
  int64_t a_stride = 0, b_stride = 0;
  int depth = 0;
};

/// y [rows,columns] = start + scale times the sum of a b^T over the terms, bf16, summed in fp32.
struct FewRowSum {
  FewRowTerm terms[kMostFewRowTerms];
  int term_count = 0, columns = 0;
  float scale = 1;  ///< Of the sum over the terms.
  void* y = nullptr;
  const void* start = nullptr;  ///< May be null: zero.
  int64_t y_stride = 0, start_stride = 0;
};

/// All sums in one launch: 1 to kMostFewRows rows, 1 to kMostFewRowSums sums.
void few_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream);

}  // namespace heddle::ops::cuda
