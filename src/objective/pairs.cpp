#include "objective/pairs.h"

#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "base/errors.h"

namespace heddle::objective {

double PairObjective::weight(const data::Batch& local) const {
  return static_cast<double>(std::count(local.text_of_row.begin(), local.text_of_row.end(), 0));
}

at::Tensor PairObjective::reported(const at::Tensor& of_pairs) const {
  const at::Tensor sum = of_pairs.sum().to(placed_.context.wide_dtype());
  return placed_.context.mesh.coordinate(comm::Dim::kCp) == 0 ? sum : at::zeros_like(sum);
}

std::size_t count_pairs(const data::Batch& whole) {
  for (std::size_t s = 0; s < whole.text_of_row.size(); ++s) {
    if (whole.text_of_row[s] != static_cast<std::int64_t>(s % 2))
      throw_error<InternalError>("sequence {} of a batch of pairs is text {} of its row", s,
                                 whole.text_of_row[s]);
  }
  return whole.text_of_row.size() / 2;
}

}  // namespace heddle::objective
