#include "objective/class_counts.h"

#include <ATen/ops/zeros.h>

namespace heddle::objective {

ClassCounts::ClassCounts(std::int64_t classes) : table_(at::zeros({3, classes}, at::kDouble)) {}

void ClassCounts::add(std::int64_t prediction, std::int64_t truth) {
  const std::int64_t classes = table_.size(1);
  double* const counts = table_.mutable_data_ptr<double>();
  ++counts[prediction];
  ++counts[classes + truth];
  if (prediction == truth) ++counts[2 * classes + truth];
}

double ClassCounts::accuracy() const {
  const std::int64_t classes = table_.size(1);
  const double* const counts = table_.const_data_ptr<double>();
  double rows = 0, right = 0;
  for (std::int64_t c = 0; c < classes; ++c) {
    rows += counts[classes + c];
    right += counts[2 * classes + c];
  }
  return rows > 0 ? right / rows : 0;
}

double ClassCounts::macro_f1() const {
  const std::int64_t classes = table_.size(1);
  const double* const counts = table_.const_data_ptr<double>();
  double sum = 0, occurring = 0;
  for (std::int64_t c = 0; c < classes; ++c) {
    // 2 p r / (p + r) with p = right / predicted and r = right / true.
    const double both = counts[c] + counts[classes + c];
    if (both == 0) continue;
    ++occurring;
    sum += 2 * counts[2 * classes + c] / both;
  }
  return occurring > 0 ? sum / occurring : 0;
}

}  // namespace heddle::objective
