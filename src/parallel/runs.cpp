#include "parallel/runs.h"

#include <ATen/ops/empty.h>

namespace heddle::parallel {

Run run_of(const at::Tensor& value, std::int64_t ranks, std::int64_t offset) {
  Run run;
  run.whole_rows = value.dim() == 0 ? 1 : value.size(0);
  run.row_numel = run.whole_rows == 0 ? 0 : value.numel() / run.whole_rows;
  run.rows = (run.whole_rows + ranks - 1) / ranks;
  run.offset = offset;
  return run;
}

std::vector<std::int64_t> shape_of_rows(const at::Tensor& value, std::int64_t rows) {
  std::vector<std::int64_t> shape = value.sizes().vec();
  if (!shape.empty()) shape[0] = rows;
  return shape;
}

void scatter_rows(const at::Tensor& value, const Run& run, at::Tensor buffers) {
  const std::int64_t full = run.rows == 0 ? 0 : run.whole_rows / run.rows;
  const at::Tensor runs = buffers.narrow(1, run.offset, run.numel());
  const at::Tensor rows = value.reshape({run.whole_rows, run.row_numel});
  if (full > 0)
    runs.narrow(0, 0, full).copy_(rows.narrow(0, 0, full * run.rows).view({full, run.numel()}));
  const std::int64_t rest = run.whole_rows - full * run.rows;
  if (rest > 0) {
    runs[full]
        .narrow(0, 0, rest * run.row_numel)
        .copy_(rows.narrow(0, full * run.rows, rest).reshape({rest * run.row_numel}));
  }
}

at::Tensor collect_rows(const at::Tensor& buffers, const Run& run, const at::Tensor& like) {
  if (run.numel() == buffers.size(1))
    return buffers.view({-1}).narrow(0, 0, like.numel()).view(like.sizes());
  at::Tensor whole = at::empty(like.sizes(), buffers.options());
  const std::int64_t full = run.rows == 0 ? 0 : run.whole_rows / run.rows;
  const at::Tensor runs = buffers.narrow(1, run.offset, run.numel());
  at::Tensor rows = whole.view({run.whole_rows, run.row_numel});
  if (full > 0)
    rows.narrow(0, 0, full * run.rows).view({full, run.numel()}).copy_(runs.narrow(0, 0, full));
  const std::int64_t rest = run.whole_rows - full * run.rows;
  if (rest > 0) {
    rows.narrow(0, full * run.rows, rest)
        .copy_(runs[full].narrow(0, 0, rest * run.row_numel).view({rest, run.row_numel}));
  }
  return whole;
}

}  // namespace heddle::parallel
