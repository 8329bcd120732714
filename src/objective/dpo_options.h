#pragma once

#include "base/named_enum.h"

namespace heddle::objective {

enum class DpoLoss { kSigmoid, kIpo, kHinge, kOrpo, kSimpo };
constexpr auto names_of(DpoLoss) { return spelled("sigmoid", "ipo", "hinge", "orpo", "simpo"); }

/// Whether a loss compares the policy with a reference: kOrpo and kSimpo have none.
constexpr bool compares_with_reference(DpoLoss loss) {
  return loss != DpoLoss::kOrpo && loss != DpoLoss::kSimpo;
}

struct DpoOptions {
  DpoLoss loss = DpoLoss::kSigmoid;
  double beta = 0.1;  ///< config::load() makes it 2 for kSimpo if the user gave none.
  /// kSigmoid and kSimpo: probability that a pair's labels are swapped.
  double label_smoothing = 0;
  /// Weight of the cross-entropy of the chosen answer; config::load() makes it 1 for kOrpo if the
  /// user gave none.
  double sft_weight = 0;
  double simpo_gamma = 0.5;  ///< kSimpo: margin that the chosen answer is to be ahead by.
};

}  // namespace heddle::objective
