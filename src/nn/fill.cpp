#include "nn/fill.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/threads.h"
#include "ops/autograd.h"

namespace heddle::nn {
namespace {

/// A row of a box is its elements along the last dimension. Returns which element of the whole
/// parameter the row begins at.
std::int64_t first_of_row(const Box& box, const std::vector<std::int64_t>& shape,
                          std::int64_t row) {
  std::int64_t first = box.global.offset.back(), stride = shape.back();
  for (std::size_t d = shape.size() - 1; d-- > 0;) {
    const std::int64_t size = box.global.size[d];
    first += (box.global.offset[d] + row % size) * stride;
    row /= size;
    stride *= shape[d];
  }
  return first;
}

}  // namespace

void fill_owned(Parameter& parameter, const std::function<double(std::uint64_t)>& value) {
  const ops::NoGradient guard;
  // Elements of one piece of work.
  constexpr std::int64_t kPiece = 1 << 16;
  for (const Box& box : parameter.boxes(parameter.owned())) {
    const at::Tensor host = at::empty(box.tensor.sizes(), at::kDouble);
    double* const out = host.mutable_data_ptr<double>();
    const std::int64_t columns = host.size(-1), rows = host.numel() / columns;
    const std::int64_t rows_at_once = std::max<std::int64_t>(1, kPiece / columns);
    const std::int64_t pieces = (rows + rows_at_once - 1) / rows_at_once;
    parallel_items(pieces, available_cores(), [&](std::int64_t piece) {
      const std::int64_t end = std::min(rows, (piece + 1) * rows_at_once);
      for (std::int64_t row = piece * rows_at_once; row < end; ++row) {
        const std::int64_t first = first_of_row(box, parameter.global_shape(), row);
        for (std::int64_t i = 0; i < columns; ++i)
          out[row * columns + i] = value(static_cast<std::uint64_t>(first + i));
      }
    });
    at::Tensor(box.tensor).copy_(host);
  }
}

}  // namespace heddle::nn
