#include "serve/metrics/training_metrics.h"

#include <vector>

namespace heddle::serve {
namespace {

constexpr std::size_t kMostTenants = 100;  ///< Series cost memory here and in Prometheus.
const std::vector<double> kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                      0.5,   1,      2.5,   5,    10,    25,   50,  100};

}  // namespace

TrainingMetrics::TrainingMetrics(Registry& registry) : registry_(registry) {
  registry.declare_histogram("heddle_turn_seconds", "Turns of runs on the model, by request.",
                             kSeconds);
  registry.declare_counter("heddle_train_tokens_total", "Tokens trained on, by tenant.");
  registry.declare_counter("heddle_optimizer_steps_total", "Optimizer steps, by tenant.");
  registry.declare_gauge("heddle_futures", "Promises that have no outcome yet.");
  registry.declare_gauge("heddle_run_requests_waiting", "Requests of runs that wait for a turn.");
  registry.declare_gauge("heddle_runs", "Training runs in memory.");
  now({});
}

Labels TrainingMetrics::labels_of(const std::string& tenant) {
  const std::lock_guard lock(mutex_);
  if (tenants_.size() < kMostTenants) tenants_.insert(tenant);
  return {{"tenant", tenants_.contains(tenant) ? tenant : "others"}};
}

void TrainingMetrics::turn(const std::string& kind, double seconds) {
  registry_.observe("heddle_turn_seconds", {{"kind", kind}}, seconds);
}

void TrainingMetrics::trained(const std::string& tenant, std::int64_t tokens) {
  registry_.add("heddle_train_tokens_total", labels_of(tenant), static_cast<double>(tokens));
}

void TrainingMetrics::stepped(const std::string& tenant) {
  registry_.add("heddle_optimizer_steps_total", labels_of(tenant));
}

void TrainingMetrics::now(const Now& now) {
  registry_.set("heddle_futures", {{"state", "pending"}}, static_cast<double>(now.promises));
  registry_.set("heddle_run_requests_waiting", {}, static_cast<double>(now.waiting));
  registry_.set("heddle_runs", {}, static_cast<double>(now.runs));
}

}  // namespace heddle::serve
