#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::parallel {

/// How one parameter's rows are divided into `ranks` runs.
struct Run {
  std::int64_t rows = 0;        ///< of a run; the last ones may be shorter or empty
  std::int64_t row_numel = 1;   ///< elements of one row
  std::int64_t whole_rows = 0;  ///< of the parameter
  std::int64_t offset = 0;      ///< in the buffer of a rank, elements

  std::int64_t numel() const { return rows * row_numel; }
  /// Buffers [ranks, size] of this run alone are the parameter's rows in order.
  bool is_all_of(std::int64_t ranks, std::int64_t size) const {
    return numel() == size && rows * ranks == whole_rows;
  }
};

/// Run of a parameter of the shape of `value`; `offset` is where it starts in the buffer of a rank.
Run run_of(const at::Tensor& value, std::int64_t ranks, std::int64_t offset);

/// The shape of `rows` rows of a value.
std::vector<std::int64_t> shape_of_rows(const at::Tensor& value, std::int64_t rows);

/// Copies all rows of a value into the buffers [ranks, size] of all ranks; what lies beyond the
/// last row stays.
void scatter_rows(const at::Tensor& value, const Run& run, at::Tensor buffers);

/// The reverse: the value's rows out of the buffers [ranks, size], or those buffers themselves
/// where they hold nothing else.
at::Tensor collect_rows(const at::Tensor& buffers, const Run& run, const at::Tensor& like);

}  // namespace heddle::parallel
