#pragma once

#include "base/metrics.h"

namespace heddle::objective {

/// One pass over held-out rows.
struct Evaluation {
  double loss = 0;
  Metrics metrics;  ///< Besides the loss.
};

}  // namespace heddle::objective
