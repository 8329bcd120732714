#include "train/best_evaluation.h"

#include <vector>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::train {

double number_of(const objective::Evaluation& evaluation, const std::string& metric) {
  if (metric == "loss") return evaluation.loss;
  if (const double* found = evaluation.metrics.find(metric)) return *found;
  std::vector<std::string> names = {"loss"};
  for (const Metrics::Entry& entry : evaluation.metrics) names.push_back(entry.name);
  throw_error<ConfigError>("eval.metric is '{}': the evaluations of this run have {}", metric,
                           text::join(names, ", "));
}

bool is_better(const std::string& metric, double a, double b) {
  return cost_of(metric, a) < cost_of(metric, b);
}

double cost_of(const std::string& metric, double value) {
  return metric == "loss" || metric == "perplexity" ? value : -value;
}

}  // namespace heddle::train
