#pragma once

#include <string>
#include <vector>

#include "plan/hardware.h"

namespace heddle::plan {

/// A run that was measured, beside what is predicted for it.
struct Comparison {
  std::string name;
  double measured_s = 0, predicted_s = 0;
  double measured_bytes = 0, predicted_bytes = 0;  ///< Peak of a rank; measured 0: not known.

  double time_error() const { return predicted_s / measured_s - 1; }
  double memory_error() const {
    return measured_bytes > 0 ? predicted_bytes / measured_bytes - 1 : 0;
  }
};

/// Predicts the runs of a YAML file (bench/plan/measured.yaml shows the keys). `hardware` replaces
/// the file's own unless it is empty. Throws ConfigError with file and line; FileError if it cannot
/// be read.
std::vector<Comparison> compare_with_measured(const std::string& file,
                                              const std::string& hardware = {});

}  // namespace heddle::plan
