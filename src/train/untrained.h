#pragma once

#include <cstdint>
#include <string>

namespace heddle::train {

class Optimizer;

/// Looks once, after the first steps of a run, whether a gradient has reached every trained tensor:
/// an optimizer takes a missing gradient for zeros and says nothing. It asks what has gathered in
/// the optimizer's state, and not single steps: the factor A of an adapter has a gradient of zero
/// while B is zero, and an expert may have no token in a step. So steps count only from a learning
/// rate above 0, and only if the whole gradient is not zero. A run whose whole gradient is zero
/// from the start is told so after as many steps, and is looked at once it has one.
class UntrainedWatch {
 public:
  /// Steps before it looks, and steps that are enough at the end of a shorter run: a new head on
  /// new adapters needs three until the gradient of A is not zero.
  static constexpr std::int64_t kSteps = 10, kLeast = 4;

  /// After each step that has updated, by all ranks that the optimizer's rows are divided over.
  /// `norm`: of the whole gradient. Returns what to tell the user, the same on all ranks; mostly
  /// nothing.
  std::string after_step(Optimizer& optimizer, double lr, double norm);
  /// After the last step, for a shorter run.
  std::string at_end(Optimizer& optimizer);

 private:
  std::string look(Optimizer& optimizer);
  static std::string told_of(Optimizer& optimizer, std::int64_t steps);

  std::int64_t updates_ = 0, with_gradient_ = 0;
  bool has_looked_ = false;
};

}  // namespace heddle::train
