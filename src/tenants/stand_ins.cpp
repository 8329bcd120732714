#include "tenants/stand_ins.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

#include "ops/autograd.h"
#include "tenants/trained_set.h"

namespace heddle::tenants {
namespace {

using adapters::LoraSet;
using Factors = std::vector<nn::Parameter*>;

/// Elements of a factor's place, rounded up to where the next may begin: 256 bytes of bf16.
std::int64_t room_of(const nn::Parameter& factor) {
  return (factor.value().numel() + 127) / 128 * 128;
}

/// Moves the values of the factors into one allocation, which goes with the last of them.
at::Tensor gathered(const Factors& factors) {
  const ops::NoGradient guard;
  std::int64_t room = 0;
  for (const nn::Parameter* factor : factors) room += room_of(*factor);
  const at::Tensor all = at::empty({room}, factors.at(0)->data().options());
  room = 0;
  for (nn::Parameter* factor : factors) {
    const at::Tensor value = factor->data();
    const at::Tensor part = all.narrow(0, room, value.numel()).view(value.sizes());
    room += room_of(*factor);
    part.copy_(value);
    factor->take_memory(at::from_blob(
        part.mutable_data_ptr(), value.sizes(), [all](void*) {}, value.options()));
  }
  return all;
}

/// The borrower's own copies of the gradients that it still holds.
void reclaim(const StandIns::Place& place, const Factors& factors) {
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const at::Tensor& gradient = factors[i]->gradient();
    if (gradient.defined() && gradient.is_same(place.gradients[i]))
      factors[i]->set_reduced_gradient(gradient.clone());
  }
}

}  // namespace

StandIns::Known& StandIns::known(const LoraSet& set) {
  const auto found = sets_.find(&set);
  if (found != sets_.end()) return found->second;
  Structure structure;
  for (const auto& lora : set.adapters())
    structure.emplace_back(lora->module(), lora->rank(), lora->scaling(),
                           nn::ExpertFactors::kPairs);
  for (const auto& lora : set.expert_adapters())
    structure.emplace_back(lora->parameter(), lora->rank(), lora->scaling(), lora->factors());
  Known known;
  known.structure =
      structures_.try_emplace(std::move(structure), std::ssize(structures_)).first->second;
  set.visit_parameters([&](nn::Parameter& factor) { known.factors.push_back(&factor); });
  known.values = gathered(known.factors);
  return sets_.emplace(&set, std::move(known)).first->second;
}

std::vector<StandIns::Place> StandIns::places_for(const std::vector<const LoraSet*>& sets) {
  std::map<std::int64_t, std::size_t> taken;
  std::vector<Place> places;
  for (const LoraSet* set : sets) {
    const std::int64_t structure = structure_of(*set);
    auto& made = made_[structure];
    const std::size_t next = taken[structure]++;
    if (next == made.size()) {
      made.push_back(copy_of(base_, *set));
      const Factors &from = known(*set).factors, &to = known(*made.back()).factors;
      for (std::size_t i = 0; i < to.size(); ++i) {
        to[i]->set_trainable(true);
        to[i]->set_gradient_dtype(from[i]->gradient_dtype());
      }
    }
    places.push_back({made[next], {}, nullptr});
  }
  return places;
}

void StandIns::drop_unused() {
  for (auto& [structure, made] : made_) {
    std::erase_if(made, [&](const std::shared_ptr<const LoraSet>& set) {
      if (set.use_count() > 1) return false;
      forget(*set);
      return true;
    });
  }
}

void StandIns::bring(std::vector<Place>& places, const std::vector<const LoraSet*>& sets) {
  const ops::NoGradient guard;
  for (std::size_t p = 0; p < places.size(); ++p) {
    if (const LoraSet* const borrower = std::exchange(places[p].borrower, nullptr))
      reclaim(places[p], known(*borrower).factors);
    known(*places[p].set).values.copy_(known(*sets[p]).values);
  }
}

void StandIns::lend(std::vector<Place>& places, const std::vector<const LoraSet*>& sets) {
  const ops::NoGradient guard;
  std::vector<at::Tensor> sums, added;
  for (std::size_t p = 0; p < places.size(); ++p) {
    const Factors& factors = known(*sets[p]).factors;
    for (std::size_t i = 0; i < factors.size(); ++i) {
      const at::Tensor& gradient = places[p].gradients[i];
      if (!gradient.defined()) continue;
      if (factors[i]->gradient().defined()) {
        sums.push_back(factors[i]->gradient());
        added.push_back(gradient);
      } else {
        factors[i]->set_reduced_gradient(gradient);
      }
    }
    places[p].borrower = sets[p];
  }
  if (!sums.empty()) at::_foreach_add_(sums, added);
}

}  // namespace heddle::tenants
