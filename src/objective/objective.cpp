#include "objective/objective.h"

#include "assembly/model_units.h"
#include "ops/autograd.h"

namespace heddle::objective {

double Objective::divisor(const data::Step& step) const {
  return static_cast<double>(step.sequences);
}

Evaluation Objective::evaluate(const std::shared_ptr<const data::Dataset>& rows,
                               const data::EvaluationLoader::Options& loader_options) {
  return evaluate_and(rows, loader_options, [](const HeadResult&, const LocalBatch&) {});
}

Evaluation Objective::evaluate_and(const std::shared_ptr<const data::Dataset>& rows,
                                   const data::EvaluationLoader::Options& loader_options,
                                   const UseResult& use) {
  const ops::NoGradient guard;
  data::EvaluationLoader loader(rows, loader_options);
  const parallel::Acquired ends = assembly::acquire_ends(placed_.sharding.get(), model());
  const std::vector<const Metric*> names = metrics();
  double loss = 0, weight = 0;
  std::vector<double> sums;
  while (const auto whole = loader.next()) {
    const std::vector<HeadFunction> functions =
        heads({&*whole, 1}, {.wants_gradients = false, .is_held_out = true});
    const LocalBatch batch(model(), *whole, placed_.adapters.get());
    const at::Tensor hidden = evaluate_hidden(model(), *placed_.pipeline, batch);
    if (!hidden.defined()) continue;
    const HeadResult result = functions[0](hidden, batch);
    use(result, batch);
    loss += result.loss_sum.item<double>();
    sums.resize(result.metric_sums.size());
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += result.metric_sums[i].item<double>();
    weight += this->weight(batch.host);
  }
  const comm::Group group = placed_.context.mesh.loss_group();
  loss = group.all_reduce_sum(loss);
  weight = group.all_reduce_sum(weight);
  Evaluation evaluation{loss / weight, {}};
  // A rank without the last stage has no sums.
  if (!group.any(!sums.empty())) return evaluation;
  sums.resize(names.size());
  for (std::size_t i = 0; i < sums.size(); ++i)
    evaluation.metrics.set(*names[i], group.all_reduce_sum(sums[i]) / weight);
  return evaluation;
}

}  // namespace heddle::objective
