#include "tenants/joint_passes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "assembly/model_units.h"
#include "data/context_share.h"
#include "data/joined_batch.h"
#include "ops/autograd.h"
#include "ops/linear/dropout.h"
#include "train/micro_batch.h"

namespace heddle::tenants {
namespace {

using objective::HeadResult;
using objective::LocalBatch;

/// The pieces of one pass end to end.
class JointPass {
 public:
  JointPass(const assembly::Model& model, std::span<const Piece> pieces, std::size_t number,
            const JointOptions& options)
      : pieces_(pieces),
        number_(number),
        pass_head_(options.pass_head),
        joint_(joint_batch(model, pieces)) {
    const auto wide =
        at::TensorOptions().dtype(model.context().wide_dtype()).device(model.context().device);
    sums_.assign(pieces.size(), std::vector<at::Tensor>(1 + options.metrics, at::zeros({}, wide)));
  }

  const LocalBatch& batch() const { return joint_; }

  /// Every piece's head; the sum of their gradients, which do not overlap.
  HeadResult apply_heads(const at::Tensor& hidden, const LocalBatch& batch) {
    HeadResult result{at::zeros({}, sums_[0][0].options()), {}, {}};
    if (pass_head_) {
      const PassHeadResult all = pass_head_(number_, hidden, batch);
      for (std::size_t i = 0; i < pieces_.size(); ++i) sums_[i][0] = all.losses[i];
      result.grad_hidden = all.grad_hidden;
      return result;
    }
    std::int64_t first = 0;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      LocalBatch own = batch;
      own.host.labels = at::full_like(batch.host.labels, data::kIgnoredLabel);
      const std::int64_t rows = joint_.adapters[i].rows;
      own.host.labels.narrow(0, first, rows).copy_(batch.host.labels.narrow(0, first, rows));
      first += rows;
      HeadResult piece = pieces_[i].head(hidden, own);
      sums_[i][0] = piece.loss_sum;
      std::copy(piece.metric_sums.begin(), piece.metric_sums.end(), sums_[i].begin() + 1);
      if (!piece.grad_hidden.defined()) continue;
      result.grad_hidden = result.grad_hidden.defined() ? result.grad_hidden.add_(piece.grad_hidden)
                                                        : piece.grad_hidden;
    }
    return result;
  }

  /// Loss and metrics by piece, 0-d each; 0 on a rank without the heads.
  const std::vector<std::vector<at::Tensor>>& sums() const { return sums_; }

 private:
  std::span<const Piece> pieces_;
  std::size_t number_;  ///< The pass's place.
  PassHead pass_head_;
  LocalBatch joint_;
  std::vector<std::vector<at::Tensor>> sums_;
};

/// The factors of all sets of the passes, each set once.
std::vector<nn::Parameter*> factors_of(std::span<const std::vector<Piece>> passes) {
  std::vector<const adapters::LoraSet*> sets;
  std::vector<nn::Parameter*> factors;
  for (const std::vector<Piece>& pieces : passes) {
    for (const Piece& piece : pieces) {
      if (std::find(sets.begin(), sets.end(), piece.set) != sets.end()) continue;
      sets.push_back(piece.set);
      piece.set->visit_parameters([&](nn::Parameter& factor) {
        if (factor.is_held()) factors.push_back(&factor);
      });
    }
  }
  return factors;
}

/// Forward and backward.
void differentiate(assembly::ModelOnRanks& base, std::span<const std::vector<Piece>> passes,
                   std::vector<JointPass>& joint) {
  std::vector<data::Batch> batches;
  std::vector<LocalBatch> uploaded;
  std::vector<objective::HeadFunction> heads;
  for (JointPass& pass : joint) {
    batches.push_back(pass.batch().host);
    uploaded.push_back(pass.batch());
    heads.emplace_back([&pass](const at::Tensor& hidden, const LocalBatch& batch) {
      return pass.apply_heads(hidden, batch);
    });
  }
  train::run_micro_batches(
      *base.model, nullptr, *base.pipeline, factors_of(passes), batches, heads,
      {.neftune = {}, .metrics = 0, .uploaded = uploaded, .sharding = base.sharding.get()});
  if (base.sharding) base.sharding->finish_reduction();
}

void evaluate(assembly::ModelOnRanks& base, std::vector<JointPass>& joint) {
  const ops::NoGradient guard;
  const parallel::Acquired ends = assembly::acquire_ends(base.sharding.get(), *base.model);
  for (JointPass& pass : joint) {
    const at::Tensor hidden = objective::evaluate_hidden(*base.model, *base.pipeline, pass.batch());
    if (hidden.defined()) pass.apply_heads(hidden, pass.batch());
  }
}

/// The numbers of all passes over all ranks, by one sum.
std::vector<std::vector<PieceSums>> sums_over_ranks(const assembly::ModelOnRanks& base,
                                                    const std::vector<JointPass>& joint) {
  std::vector<at::Tensor> numbers;
  for (const JointPass& pass : joint) {
    for (const auto& piece : pass.sums()) numbers.insert(numbers.end(), piece.begin(), piece.end());
  }
  at::Tensor totals = at::stack(numbers);
  base.context.mesh.loss_group().all_reduce_sum(totals);
  const at::Tensor host = totals.to(at::kCPU, at::kDouble);
  const double* next = host.const_data_ptr<double>();
  std::vector<std::vector<PieceSums>> sums;
  for (const JointPass& pass : joint) {
    sums.emplace_back();
    for (const auto& piece : pass.sums()) {
      const double loss = *next++;
      sums.back().push_back({loss, {next, next + piece.size() - 1}});
      next += piece.size() - 1;
    }
  }
  return sums;
}

}  // namespace

objective::LocalBatch joint_batch(const assembly::Model& model, std::span<const Piece> pieces) {
  std::vector<data::Batch> batches;
  std::vector<nn::AdaptedRows> adapters;
  for (const Piece& piece : pieces) {
    batches.push_back(data::with_dummy_tail(piece.batch, model.padded_tokens(piece.batch.size())));
    data::Batch& batch = batches.back();
    batch.number_tokens();
    adapters.push_back({piece.set, batch.size(), {}});
    if (piece.dropout_step > 0 && piece.set->options().dropout > 0) {
      adapters.back().draws =
          ops::dropout_draws(batch.token_numbers.to(model.context().device), piece.dropout_step);
    }
  }
  LocalBatch joint(model, data::joined(batches));
  joint.adapters = std::move(adapters);
  return joint;
}

std::vector<std::vector<PieceSums>> run_joint_passes(assembly::ModelOnRanks& base,
                                                     std::span<const std::vector<Piece>> passes,
                                                     const JointOptions& options) {
  if (passes.empty()) return {};
  std::vector<JointPass> joint;
  joint.reserve(passes.size());
  for (std::size_t p = 0; p < passes.size(); ++p)
    joint.emplace_back(*base.model, passes[p], p, options);
  if (options.wants_gradients) {
    differentiate(base, passes, joint);
  } else {
    evaluate(base, joint);
  }
  return sums_over_ranks(base, joint);
}

}  // namespace heddle::tenants
