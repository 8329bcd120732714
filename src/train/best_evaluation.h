#pragma once

#include <string>

#include "objective/evaluation.h"

namespace heddle::train {

/// The number of an evaluation that eval.metric names: the loss, or one of the metrics. Throws
/// ConfigError that lists what there is.
double number_of(const objective::Evaluation& evaluation, const std::string& metric);

/// Whether `a` is a better value of the metric than `b`: a lower loss or perplexity, a higher
/// anything else.
bool is_better(const std::string& metric, double a, double b);
/// The value such that lower is better.
double cost_of(const std::string& metric, double value);

}  // namespace heddle::train
