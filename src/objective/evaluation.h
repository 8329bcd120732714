#pragma once

#include <map>
#include <string>

namespace heddle::objective {

/// One pass over held-out rows.
struct Evaluation {
  double loss = 0;
  std::map<std::string, double> metrics;  ///< Beside the loss: "accuracy_at_1", "mrr_at_10", ...
};

}  // namespace heddle::objective
