#include "parallel/sharding.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/errors.h"
#include "ops/autograd.h"
#include "parallel/runs.h"

namespace heddle::parallel {

using comm::Dim;

namespace {

// Elements from which a gradient is not copied beside others to be summed with them along tp.
constexpr std::int64_t kSummedAlone = 1 << 20;
// Elements from which a parameter has a buffer of its own: what a gather brings there, or a
// gradient that a sum takes from there, is copied nowhere else.
constexpr std::int64_t kAlone = 1 << 16;

}  // namespace

/// Parameters of one unit, division and dtype that share a buffer, with this rank's runs.
struct Sharding::Shelf {
  const Division* over = nullptr;
  std::vector<nn::Parameter*> parameters;
  std::vector<Run> runs;
  std::int64_t size = 0;  ///< elements of one rank's runs
  at::Tensor owned;       ///< [size]
  at::Tensor shard;       ///< [replicas * size]: the runs of this rank's replicas, if gathered
  at::Tensor gathered;    ///< of a gather under way, [shard ranks, replicas * size]
};

struct Sharding::Unit {
  std::vector<Shelf> shelves;
  std::vector<comm::Pending> gathering;  ///< fill `gathered` of the shelves
  bool is_acquired = false;
};

/// Gradients that share a buffer.
struct Sharding::Sum {
  std::vector<nn::Parameter*> parameters;
  std::vector<Run> runs;
  at::Tensor all;      ///< [ranks, size], input of the first sum
  at::Tensor partial;  ///< [replicas, size], summed over the shard ranks
};

/// Gradients on their way: of the parameters of one unit, division and gradient dtype.
struct Sharding::Reduction {
  const Division* over = nullptr;
  std::vector<Sum> sums;
  comm::Pending pending;  ///< fills `partial` of the sums
};

Sharding::Sharding(const comm::Mesh& mesh)
    : tensor_group_(mesh.group({Dim::kTp})),
      end_stages_(mesh.end_stages()),
      dense_{mesh.group({Dim::kCp, Dim::kFsdp}), mesh.group({Dim::kDp})},
      experts_{mesh.group({Dim::kEfsdp}), mesh.group({Dim::kEdp})},
      row_tables_{mesh.group({Dim::kTp, Dim::kCp, Dim::kFsdp}), dense_.replica} {}

Sharding::~Sharding() = default;

Sharding::Kind Sharding::kind_of(const nn::Parameter& parameter) const {
  if (parameter.is_expert()) return Kind::kExpert;
  // Without tp they lie in the buffers of the others.
  return parameter.is_row_table() && tensor_group_.size() > 1 ? Kind::kRowTable : Kind::kDense;
}

const Sharding::Division& Sharding::division_of(Kind kind) const {
  return kind == Kind::kExpert ? experts_ : kind == Kind::kRowTable ? row_tables_ : dense_;
}

void Sharding::add(std::size_t unit, const std::vector<Member>& members, c10::Device device) {
  if (units_.size() <= unit) units_.resize(unit + 1);
  // 0 is the shelf that small ones share.
  std::map<std::tuple<Kind, c10::ScalarType, std::size_t>, Shelf> by_kind;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    nn::Parameter& parameter = *member.parameter;
    if (!parameter.is_held()) {
      parameter.allocate_elsewhere(member.dtype, device);
      continue;
    }
    const Kind kind = kind_of(parameter);
    const Division& over = division_of(kind);
    if (over.is_gathered()) {
      parameter.allocate_released(member.dtype, device);
    } else {
      parameter.allocate(member.dtype, device);
    }
    const std::size_t alone = parameter.value().numel() >= kAlone ? i + 1 : 0;
    Shelf& shelf = by_kind[{kind, member.dtype, alone}];
    shelf.over = &over;
    shelf.parameters.push_back(&parameter);
    shelf.runs.push_back(run_of(parameter.value(), shelf.over->ranks(), shelf.size));
    shelf.size += shelf.runs.back().numel();
  }
  for (auto& [kind, shelf] : by_kind) {
    make_owned(shelf, at::TensorOptions().dtype(std::get<1>(kind)).device(device));
    units_[unit].shelves.push_back(std::move(shelf));
  }
}

void Sharding::make_owned(Shelf& shelf, const at::TensorOptions& options) {
  if (shelf.over->ranks() == 1) return;  // values are owned whole
  const comm::Group& replica = shelf.over->replica;
  // The ends of uneven runs are never written; they are summed and gathered all the same.
  if (shelf.over->is_gathered()) {
    shelf.shard = at::zeros({replica.size() * shelf.size}, options);
    shelf.owned = shelf.shard.narrow(0, replica.rank() * shelf.size, shelf.size);
  } else {
    shelf.owned = at::zeros({shelf.size}, options);
  }
  for (std::size_t i = 0; i < shelf.parameters.size(); ++i) {
    const Run& run = shelf.runs[i];
    const std::int64_t first = std::min(shelf.over->place() * run.rows, run.whole_rows);
    const std::int64_t rows = std::min(run.rows, run.whole_rows - first);
    shelf.parameters[i]->set_owned(shelf.owned.narrow(0, run.offset, rows * run.row_numel)
                                       .view(shape_of_rows(shelf.parameters[i]->value(), rows)),
                                   first);
  }
}

void Sharding::gather_into_values(Shelf& shelf, const at::Tensor& runs) {
  const at::Tensor buffers = runs.view({-1, shelf.size});
  for (std::size_t i = 0; i < shelf.parameters.size(); ++i) {
    nn::Parameter& parameter = *shelf.parameters[i];
    parameter.take_memory(collect_rows(buffers, shelf.runs[i], parameter.value()));
  }
}

void Sharding::publish() {
  const ops::NoGradient guard;
  for (Unit& unit : units_) {
    for (Shelf& shelf : unit.shelves) {
      if (shelf.gathered.defined())
        throw InternalError("owned rows were written while a gather of the old ones was under way");
      if (!shelf.owned.defined()) continue;
      const comm::Group& replica = shelf.over->replica;
      if (shelf.over->is_gathered()) {
        if (replica.size() == 1) continue;
        const at::Tensor own = shelf.owned.clone();
        replica.all_gather(shelf.shard, own);
        continue;
      }
      at::Tensor all = at::empty({replica.size() * shelf.size}, shelf.owned.options());
      replica.all_gather(all, shelf.owned);
      gather_into_values(shelf, all);
    }
  }
}

void Sharding::drop_frozen_copies() {
  for (Unit& unit : units_) {
    for (Shelf& shelf : unit.shelves) {
      const bool is_trained =
          std::any_of(shelf.parameters.begin(), shelf.parameters.end(),
                      [](const nn::Parameter* parameter) { return parameter->trainable(); });
      if (is_trained || shelf.over->is_gathered()) continue;
      for (nn::Parameter* parameter : shelf.parameters) parameter->set_owned({}, 0);
      shelf.owned.reset();
    }
  }
}

void Sharding::prefetch(std::size_t unit) {
  if (unit >= units_.size() || units_[unit].is_acquired || !units_[unit].gathering.empty()) return;
  struct Gather {
    std::vector<at::Tensor> outputs, inputs;
  };
  std::map<std::pair<Kind, c10::ScalarType>, Gather> by_kind;
  for (Shelf& shelf : units_[unit].shelves) {
    if (!shelf.over->is_gathered()) continue;
    shelf.gathered =
        at::empty({shelf.over->shard.size() * shelf.shard.numel()}, shelf.shard.options());
    Gather& gather = by_kind[{kind_of(*shelf.parameters.front()), shelf.shard.scalar_type()}];
    gather.outputs.push_back(shelf.gathered);
    gather.inputs.push_back(shelf.shard);
  }
  for (const auto& [kind, gather] : by_kind) {
    units_[unit].gathering.push_back(
        division_of(kind.first).shard.all_gather_async(gather.outputs, gather.inputs));
  }
}

void Sharding::acquire(std::size_t unit) {
  if (units_[unit].is_acquired) return;
  const ops::NoGradient guard;
  prefetch(unit);
  for (comm::Pending& gathering : units_[unit].gathering) gathering.wait();
  units_[unit].gathering.clear();
  for (Shelf& shelf : units_[unit].shelves) {
    if (!shelf.over->is_gathered()) continue;
    gather_into_values(shelf, shelf.gathered);
    shelf.gathered.reset();
  }
  units_[unit].is_acquired = true;
}

void Sharding::release(std::size_t unit) {
  if (!units_[unit].is_acquired) return;
  for (const Shelf& shelf : units_[unit].shelves) {
    if (!shelf.over->is_gathered()) continue;
    for (nn::Parameter* parameter : shelf.parameters) parameter->release_memory();
  }
  units_[unit].is_acquired = false;
}

/// Which part of a parameter this rank has, and how many differ, where ranks along tp share parts;
/// else 0 of 1.
std::pair<std::int64_t, std::int64_t> Sharding::part_of(const nn::Parameter& parameter) const {
  if (parameter.copies() == 1) return {0, 1};
  return {tensor_group_.rank() / parameter.copies(), tensor_group_.size() / parameter.copies()};
}

/// The gradient at its place among all parts, so that one sum over all ranks adds up each part's.
at::Tensor Sharding::among_parts(const at::Tensor& gradient, const nn::Parameter& parameter) const {
  const auto [part, parts] = part_of(parameter);
  if (parts == 1) return gradient;
  at::Tensor all = at::zeros({parts * gradient.numel()}, gradient.options());
  all.narrow(0, part * gradient.numel(), gradient.numel()).copy_(gradient);
  return all;
}

void Sharding::sum_partial_gradients(const std::vector<nn::Parameter*>& parameters) const {
  if (tensor_group_.size() == 1) return;
  std::vector<nn::Parameter*> small;
  std::vector<at::Tensor> gradients;
  for (nn::Parameter* parameter : parameters) {
    if (!parameter->has_partial_gradient()) continue;
    at::Tensor& gradient = parameter->gradient_buffer();
    if (parameter->copies() == 1 && gradient.numel() >= kSummedAlone && gradient.is_contiguous()) {
      tensor_group_.all_reduce_sum(gradient);
      continue;
    }
    small.push_back(parameter);
    gradients.push_back(among_parts(gradient.reshape({-1}), *parameter));
  }
  if (small.empty()) return;
  at::Tensor sum = at::cat(gradients);
  tensor_group_.all_reduce_sum(sum);
  std::int64_t offset = 0;
  for (nn::Parameter* parameter : small) {
    at::Tensor& gradient = parameter->gradient_buffer();
    const auto [part, parts] = part_of(*parameter);
    gradient.copy_(
        sum.narrow(0, offset + part * gradient.numel(), gradient.numel()).view(gradient.sizes()));
    offset += parts * gradient.numel();
  }
}

void Sharding::reduce(std::size_t unit) {
  const ops::NoGradient guard;
  std::map<std::pair<Kind, c10::ScalarType>, std::vector<nn::Parameter*>> by_kind;
  for (const Shelf& shelf : units_[unit].shelves) {
    for (nn::Parameter* parameter : shelf.parameters) {
      if (parameter->trainable())
        by_kind[{kind_of(*parameter), parameter->gradient_dtype()}].push_back(parameter);
    }
  }
  for (auto& [kind, parameters] : by_kind) {
    sum_partial_gradients(parameters);
    Reduction reduction;
    reduction.over = &division_of(kind.first);
    if (reduction.over->ranks() == 1) continue;
    std::vector<nn::Parameter*> small;
    for (nn::Parameter* parameter : parameters) {
      if (parameter->value().numel() < kAlone) {
        small.push_back(parameter);
      } else {
        reduction.sums.push_back(sum_of(*reduction.over, {parameter}));
      }
    }
    if (!small.empty()) reduction.sums.push_back(sum_of(*reduction.over, std::move(small)));
    if (reduction.over->is_gathered()) {
      std::vector<at::Tensor> outputs, inputs;
      for (Sum& sum : reduction.sums) {
        sum.partial =
            at::empty({reduction.over->replica.size(), sum.all.size(1)}, sum.all.options());
        outputs.push_back(sum.partial);
        inputs.push_back(sum.all);
      }
      reduction.pending = reduction.over->shard.reduce_scatter_sum_async(outputs, inputs);
    }
    reductions_.push_back(std::move(reduction));
  }
}

Sharding::Sum Sharding::sum_of(const Division& over, std::vector<nn::Parameter*> parameters) {
  Sum sum;
  const std::int64_t ranks = over.ranks();
  std::int64_t size = 0;
  for (const nn::Parameter* parameter : parameters) {
    sum.runs.push_back(run_of(parameter->value(), ranks, size));
    size += sum.runs.back().numel();
  }
  const auto options = at::TensorOptions()
                           .dtype(parameters.front()->gradient_dtype())
                           .device(parameters.front()->value().device());
  const at::Tensor& first = parameters.front()->gradient();
  const bool is_buffer =
      first.defined() && first.is_contiguous() && sum.runs.front().is_all_of(ranks, size);
  sum.all = is_buffer ? first.view({ranks, size}) : at::zeros({ranks, size}, options);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    // A rank may have none: no row of its data reached the parameter.
    if (!is_buffer && parameters[i]->gradient().defined())
      scatter_rows(parameters[i]->gradient(), sum.runs[i], sum.all);
    parameters[i]->clear_gradient();
  }
  sum.parameters = std::move(parameters);
  sum.partial = sum.all;
  return sum;
}

void Sharding::finish_reduction() {
  const ops::NoGradient guard;
  for (Reduction& reduction : reductions_) {
    reduction.pending.wait();
    const comm::Group& replica = reduction.over->replica;
    std::vector<at::Tensor> partial, own;
    for (const Sum& sum : reduction.sums) {
      partial.push_back(sum.partial.view({-1}));
      own.push_back(replica.size() == 1 ? partial.back()
                                        : at::empty({sum.partial.size(1)}, sum.partial.options()));
    }
    if (replica.size() > 1) replica.reduce_scatter_sum_async(own, partial).wait();
    for (std::size_t s = 0; s < own.size(); ++s) {
      const Sum& sum = reduction.sums[s];
      for (std::size_t i = 0; i < sum.parameters.size(); ++i) {
        const at::Tensor rows = sum.parameters[i]->owned();
        sum.parameters[i]->set_reduced_gradient(
            own[s].narrow(0, sum.runs[i].offset, rows.numel()).view(rows.sizes()));
      }
    }
  }
  reductions_.clear();
  if (tied_ == nullptr || !tied_->trainable() || !tied_->gradient().defined()) return;
  at::Tensor sum = tied_->gradient().contiguous();
  end_stages_.all_reduce_sum(sum);
  tied_->set_reduced_gradient(sum);
}

void Sharding::tie_over_stages(nn::Parameter& parameter) {
  if (end_stages_.size() > 1 && parameter.is_held()) tied_ = &parameter;
}

}  // namespace heddle::parallel
