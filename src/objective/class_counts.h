#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace heddle::objective {

/// Predictions of a classifier, counted by class.
class ClassCounts {
 public:
  explicit ClassCounts(std::int64_t classes);
  void add(std::int64_t prediction, std::int64_t truth);
  /// fp64 [3, classes] on the host: predicted, true, and rightly predicted rows; a sum over ranks
  /// is that of all rows.
  at::Tensor& table() { return table_; }
  double accuracy() const;
  /// Mean over the classes that are predicted or true of the harmonic mean of precision and recall.
  double macro_f1() const;

 private:
  at::Tensor table_;
};

}  // namespace heddle::objective
