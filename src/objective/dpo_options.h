#pragma once

#include "base/named_enum.h"

namespace heddle::objective {

enum class DpoLoss { kSigmoid, kIpo, kHinge };
constexpr auto names_of(DpoLoss) { return spelled("sigmoid", "ipo", "hinge"); }

struct DpoOptions {
  DpoLoss loss = DpoLoss::kSigmoid;
  double beta = 0.1;
  double label_smoothing = 0;  ///< kSigmoid: probability that a pair's labels are swapped.
  double sft_weight = 0;       ///< Weight of the cross-entropy of the chosen answer.
};

}  // namespace heddle::objective
