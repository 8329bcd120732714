#include "rollout/merged_adapter.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "assembly/merged_adapter.h"
#include "base/errors.h"
#include "ckpt/hf_adapter.h"
#include "nn/low_rank.h"
#include "ops/autograd.h"

namespace heddle::rollout {
namespace {

/// sum = weight + scaling b a, for [out,in], [out,rank] and [rank,in].
void write_sum(const at::Tensor& sum, const at::Tensor& weight, const at::Tensor& b,
               const at::Tensor& a, double scaling) {
  const auto wide = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  sum.copy_(at::addmm(weight.to(wide), b.to(wide), a.to(wide), 1, scaling));
}

}  // namespace

MergedAdapter::MergedAdapter(assembly::ModelOnRanks& placed) {
  if (placed.adapters == nullptr) throw ConfigError("merge_adapter: the model has no adapter");
  const adapters::LoraSet& set = *placed.adapters;
  assembly::require_whole(assembly::merged_parameters(*placed.model, set), placed.context.mesh);
  const adapters::Adaptable parts = ckpt::adaptable(*placed.model);
  parts.visit_linears([&](nn::Linear& layer) {
    nn::LowRank* const change = set.of(layer);
    if (change == nullptr) return;
    if (!layer.owns_weight()) {
      throw_error<ConfigError>(
          "merge_adapter: {} has an adapter and the embedding's weight, which the sum would change "
          "too; leave rollout.merge_adapter out",
          layer.module());
    }
    nn::Parameter& weight = layer.weight();
    add(weight, [change, &weight](const at::Tensor& sum) {
      write_sum(sum, weight.data(), change->b().data(), change->a().data(), change->scaling());
    });
  });
  parts.visit_expert_weights([&](nn::ExpertWeights& experts) {
    nn::LowRankExperts* const change = set.of(experts);
    if (change == nullptr) return;
    nn::Parameter& weight = experts.weight();
    add(weight, [change, &weight](const at::Tensor& sum) {
      const at::Tensor w = weight.data();
      // One after the other, so that a wide copy of one matrix is all that stands beside the sums.
      for (std::int64_t e = 0; e < w.size(0); ++e)
        write_sum(sum.select(0, e), w.select(0, e), change->b_of(e), change->a_of(e),
                  change->scaling());
    });
  });
}

void MergedAdapter::add(nn::Parameter& weight, std::function<void(const at::Tensor& sum)> add) {
  if (!weight.is_held()) return;
  // The rule on the mesh is to have refused it.
  if (!weight.has_memory())
    throw_error<InternalError>("merge_adapter: {} is not whole on this rank", weight.name());
  matrices_.push_back({&weight, std::move(add), at::empty_like(weight.data())});
}

void MergedAdapter::put_in() {
  if (is_in_ && is_current_) return;
  take_out();
  if (!is_current_) {
    const ops::NoGradient guard;
    for (const Matrix& matrix : matrices_) matrix.add(matrix.other);
    is_current_ = true;
  }
  exchange();
}

void MergedAdapter::take_out() {
  if (is_in_) exchange();
}

void MergedAdapter::exchange() {
  for (Matrix& matrix : matrices_) matrix.weight->exchange_memory(matrix.other);
  is_in_ = !is_in_;
}

}  // namespace heddle::rollout
