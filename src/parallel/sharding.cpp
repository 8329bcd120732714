#include "parallel/sharding.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <utility>

#include "ops/autograd.h"

namespace heddle::parallel {
namespace {

using comm::Dim;

/// How one parameter's rows are divided into `ranks` runs.
struct Run {
  std::int64_t rows = 0;        ///< of a run; the last ones may be shorter or empty
  std::int64_t row_numel = 1;   ///< elements of one row
  std::int64_t whole_rows = 0;  ///< of the parameter
  std::int64_t offset = 0;      ///< in the buffer of a rank, elements

  std::int64_t numel() const { return rows * row_numel; }
};

Run run_of(const at::Tensor& value, std::int64_t ranks, std::int64_t offset) {
  Run run;
  run.whole_rows = value.dim() == 0 ? 1 : value.size(0);
  run.row_numel = run.whole_rows == 0 ? 0 : value.numel() / run.whole_rows;
  run.rows = (run.whole_rows + ranks - 1) / ranks;
  run.offset = offset;
  return run;
}

/// The shape of `rows` rows of a value.
std::vector<std::int64_t> shape_of_rows(const at::Tensor& value, std::int64_t rows) {
  std::vector<std::int64_t> shape = value.sizes().vec();
  if (!shape.empty()) shape[0] = rows;
  return shape;
}

/// Copies all rows of a value into the buffers [ranks, size] of all ranks; what lies beyond the
/// last row stays.
void scatter_rows(const at::Tensor& value, const Run& run, at::Tensor buffers) {
  const std::int64_t full = run.rows == 0 ? 0 : run.whole_rows / run.rows;
  const at::Tensor runs = buffers.narrow(1, run.offset, run.numel());
  const at::Tensor rows = value.reshape({run.whole_rows, run.row_numel});
  if (full > 0)
    runs.narrow(0, 0, full).copy_(rows.narrow(0, 0, full * run.rows).view({full, run.numel()}));
  const std::int64_t rest = run.whole_rows - full * run.rows;
  if (rest > 0) {
    runs[full]
        .narrow(0, 0, rest * run.row_numel)
        .copy_(rows.narrow(0, full * run.rows, rest).reshape({rest * run.row_numel}));
  }
}

/// The reverse: the value's rows out of the buffers [ranks, size].
at::Tensor collect_rows(const at::Tensor& buffers, const Run& run, const at::Tensor& like) {
  at::Tensor whole = at::empty(like.sizes(), buffers.options());
  const std::int64_t full = run.rows == 0 ? 0 : run.whole_rows / run.rows;
  const at::Tensor runs = buffers.narrow(1, run.offset, run.numel());
  at::Tensor rows = whole.view({run.whole_rows, run.row_numel});
  if (full > 0)
    rows.narrow(0, 0, full * run.rows).view({full, run.numel()}).copy_(runs.narrow(0, 0, full));
  const std::int64_t rest = run.whole_rows - full * run.rows;
  if (rest > 0) {
    rows.narrow(0, full * run.rows, rest)
        .copy_(runs[full].narrow(0, 0, rest * run.row_numel).view({rest, run.row_numel}));
  }
  return whole;
}

}  // namespace

/// Parameters of one unit and dtype, with this rank's runs.
struct Sharding::Shelf {
  std::vector<nn::Parameter*> parameters;
  std::vector<Run> runs;
  std::int64_t size = 0;    ///< elements of one rank's runs
  at::Tensor owned;         ///< [size]
  at::Tensor shard;         ///< [dp * size]: the runs of this rank's replicas; owned if dp is 1
  at::Tensor gathered;      ///< of a gather under way, [fsdp * cp, dp * size]
  comm::Pending gathering;  ///< fills it
};

struct Sharding::Unit {
  std::vector<Shelf> shelves;
  bool is_acquired = false;
};

/// Gradients on their way: of the parameters of one unit and gradient dtype.
struct Sharding::Reduction {
  std::vector<nn::Parameter*> parameters;
  std::vector<Run> runs;
  at::Tensor all;      ///< [fsdp * cp * dp, size], input of the first sum
  at::Tensor partial;  ///< [dp, size], summed over fsdp x cp
  comm::Pending pending;
};

Sharding::Sharding(const comm::Mesh& mesh)
    : tensor_group_(mesh.group({Dim::kTp})),
      shard_group_(mesh.group({Dim::kCp, Dim::kFsdp})),
      replica_group_(mesh.group({Dim::kDp})) {}

Sharding::~Sharding() = default;

void Sharding::add(std::size_t unit, const std::vector<Member>& members, c10::Device device) {
  if (units_.size() <= unit) units_.resize(unit + 1);
  const std::int64_t replicas = replica_group_.size();
  const std::int64_t ranks = shard_group_.size() * replicas;
  const std::int64_t place = shard_group_.rank() * replicas + replica_group_.rank();
  std::map<c10::ScalarType, Shelf> by_dtype;
  for (const Member& member : members) {
    nn::Parameter& parameter = *member.parameter;
    if (shard_group_.size() > 1) {
      parameter.allocate_released(member.dtype, device);
    } else {
      parameter.allocate(member.dtype, device);
    }
    Shelf& shelf = by_dtype[member.dtype];
    shelf.parameters.push_back(&parameter);
    shelf.runs.push_back(run_of(parameter.value(), ranks, shelf.size));
    shelf.size += shelf.runs.back().numel();
  }
  for (auto& [dtype, shelf] : by_dtype) {
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    // The ends of uneven runs are never written; they are summed and gathered all the same.
    shelf.shard = shard_group_.size() > 1 ? at::zeros({replicas * shelf.size}, options)
                                          : at::zeros({shelf.size}, options);
    shelf.owned = shard_group_.size() > 1
                      ? shelf.shard.narrow(0, replica_group_.rank() * shelf.size, shelf.size)
                      : shelf.shard;
    for (std::size_t i = 0; i < shelf.parameters.size(); ++i) {
      const Run& run = shelf.runs[i];
      const std::int64_t first = std::min(place * run.rows, run.whole_rows);
      const std::int64_t rows = std::min(run.rows, run.whole_rows - first);
      shelf.parameters[i]->set_owned(shelf.owned.narrow(0, run.offset, rows * run.row_numel)
                                         .view(shape_of_rows(shelf.parameters[i]->value(), rows)),
                                     first);
    }
    units_[unit].shelves.push_back(std::move(shelf));
  }
}

void Sharding::gather_into_values(Shelf& shelf, const at::Tensor& runs) const {
  const at::Tensor buffers = runs.view({-1, shelf.size});
  for (std::size_t i = 0; i < shelf.parameters.size(); ++i) {
    nn::Parameter& parameter = *shelf.parameters[i];
    parameter.take_memory(collect_rows(buffers, shelf.runs[i], parameter.value()));
  }
}

void Sharding::publish() {
  const ops::NoGradient guard;
  const std::int64_t replicas = replica_group_.size();
  for (Unit& unit : units_) {
    for (Shelf& shelf : unit.shelves) {
      if (!shelf.owned.defined()) continue;
      if (shard_group_.size() > 1) {
        if (replicas == 1) continue;
        const at::Tensor own = shelf.owned.clone();
        replica_group_.all_gather(shelf.shard, own);
        continue;
      }
      at::Tensor all = at::empty({replicas * shelf.size}, shelf.owned.options());
      replica_group_.all_gather(all, shelf.owned);
      gather_into_values(shelf, all);
    }
  }
}

void Sharding::drop_frozen_copies() {
  if (shard_group_.size() > 1) return;
  for (Unit& unit : units_) {
    for (Shelf& shelf : unit.shelves) {
      const bool is_trained =
          std::any_of(shelf.parameters.begin(), shelf.parameters.end(),
                      [](const nn::Parameter* parameter) { return parameter->trainable(); });
      if (is_trained) continue;
      for (nn::Parameter* parameter : shelf.parameters) parameter->set_owned({}, 0);
      shelf.owned.reset();
      shelf.shard.reset();
    }
  }
}

void Sharding::prefetch(std::size_t unit) {
  if (shard_group_.size() == 1 || unit >= units_.size() || units_[unit].is_acquired) return;
  for (Shelf& shelf : units_[unit].shelves) {
    if (shelf.gathered.defined()) continue;
    shelf.gathered = at::empty({shard_group_.size() * shelf.shard.numel()}, shelf.shard.options());
    shelf.gathering = shard_group_.all_gather_async(shelf.gathered, shelf.shard);
  }
}

void Sharding::acquire(std::size_t unit) {
  if (shard_group_.size() == 1 || units_[unit].is_acquired) return;
  const ops::NoGradient guard;
  prefetch(unit);
  for (Shelf& shelf : units_[unit].shelves) {
    shelf.gathering.wait();
    gather_into_values(shelf, shelf.gathered);
    shelf.gathered.reset();
  }
  units_[unit].is_acquired = true;
}

void Sharding::release(std::size_t unit) {
  if (!units_[unit].is_acquired) return;
  for (const Shelf& shelf : units_[unit].shelves) {
    for (nn::Parameter* parameter : shelf.parameters) parameter->release_memory();
  }
  units_[unit].is_acquired = false;
}

void Sharding::sum_partial_gradients(const std::vector<nn::Parameter*>& parameters) const {
  if (tensor_group_.size() == 1) return;
  std::vector<nn::Parameter*> partial;
  std::vector<at::Tensor> gradients;
  for (nn::Parameter* parameter : parameters) {
    if (!parameter->has_partial_gradient()) continue;
    partial.push_back(parameter);
    gradients.push_back(parameter->gradient_buffer().view({-1}));
  }
  if (partial.empty()) return;
  at::Tensor sum = at::cat(gradients);
  tensor_group_.all_reduce_sum(sum);
  std::int64_t offset = 0;
  for (nn::Parameter* parameter : partial) {
    at::Tensor& gradient = parameter->gradient_buffer();
    gradient.copy_(sum.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
    offset += gradient.numel();
  }
}

void Sharding::reduce(std::size_t unit) {
  const ops::NoGradient guard;
  const std::int64_t ranks = shard_group_.size() * replica_group_.size();
  std::map<c10::ScalarType, std::vector<nn::Parameter*>> by_dtype;
  for (const Shelf& shelf : units_[unit].shelves) {
    for (nn::Parameter* parameter : shelf.parameters) {
      if (parameter->trainable()) by_dtype[parameter->gradient_dtype()].push_back(parameter);
    }
  }
  for (auto& [dtype, parameters] : by_dtype) {
    sum_partial_gradients(parameters);
    Reduction reduction;
    std::int64_t size = 0;
    for (const nn::Parameter* parameter : parameters) {
      reduction.runs.push_back(run_of(parameter->value(), ranks, size));
      size += reduction.runs.back().numel();
    }
    const auto options =
        at::TensorOptions().dtype(dtype).device(parameters.front()->value().device());
    reduction.all = at::zeros({ranks, size}, options);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      // A rank may have none: no row of its data reached the parameter.
      if (parameters[i]->gradient().defined())
        scatter_rows(parameters[i]->gradient(), reduction.runs[i], reduction.all);
      parameters[i]->clear_gradient();
    }
    reduction.parameters = std::move(parameters);
    if (shard_group_.size() == 1) {
      reduction.partial = reduction.all;
    } else {
      reduction.partial = at::empty({replica_group_.size(), size}, options);
      reduction.pending = shard_group_.reduce_scatter_sum_async(reduction.partial, reduction.all);
    }
    reductions_.push_back(std::move(reduction));
  }
}

void Sharding::finish_reduction() {
  const ops::NoGradient guard;
  for (Reduction& reduction : reductions_) {
    reduction.pending.wait();
    const std::int64_t size = reduction.partial.size(1);
    at::Tensor own = at::empty({size}, reduction.partial.options());
    replica_group_.reduce_scatter_sum(own, reduction.partial.view({-1}));
    for (std::size_t i = 0; i < reduction.parameters.size(); ++i) {
      nn::Parameter& parameter = *reduction.parameters[i];
      const at::Tensor rows = parameter.owned();
      parameter.set_reduced_gradient(
          own.narrow(0, reduction.runs[i].offset, rows.numel()).view(rows.sizes()));
    }
  }
  reductions_.clear();
}

}  // namespace heddle::parallel
