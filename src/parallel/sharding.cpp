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
struct Sharding::RunBuffer {
  const Division* over = nullptr;
  std::vector<nn::Parameter*> parameters;
  std::vector<Run> runs;
  std::int64_t size = 0;  ///< elements of one rank's runs
  at::Tensor owned;       ///< [size]
  at::Tensor shard;       ///< [replicas * size]: the runs of this rank's replicas, if gathered
  at::Tensor gathered;    ///< of a gather under way, [shard ranks, replicas * size]
  at::Tensor published;   ///< of owned rows on their way to the replicas: their copy, if gathered,
                          ///< else all replicas' rows, [replicas * size]
  bool is_frozen = false;
};

struct Sharding::Unit {
  std::vector<RunBuffer> buffers;
  std::vector<comm::Pending> gathering;   ///< fill `gathered` of the buffers
  std::vector<comm::Pending> publishing;  ///< fill `published` of the buffers, or `shard`
  bool is_acquired = false, is_held = false;
};

/// Gradients that share a buffer.
struct Sharding::Sum {
  std::vector<nn::Parameter*> parameters;
  std::vector<Run> runs;
  at::Tensor all;      ///< [ranks, size], input of the first sum
  at::Tensor partial;  ///< [replicas, size], summed over the shard ranks
  at::Tensor own;      ///< [size], summed over the replicas too
};

/// Gradients on their way: of the parameters of one unit, division and gradient dtype.
struct Sharding::Reduction {
  const Division* over = nullptr;
  std::vector<Sum> sums;
  comm::Pending pending;  ///< fills `partial` of the sums, then `own`
};

Sharding::Sharding(const comm::Mesh& mesh, Summing summing)
    : tensor_group_(mesh.group({Dim::kTp})),
      end_stages_(mesh.end_stages()),
      dense_{mesh.group({Dim::kCp, Dim::kFsdp}), mesh.group({Dim::kDp})},
      experts_{mesh.group({Dim::kEfsdp}), mesh.group({Dim::kEdp})},
      row_tables_{mesh.group({Dim::kTp, Dim::kCp, Dim::kFsdp}), dense_.replica},
      summing_(summing) {}

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
  // 0 is the buffer that small ones share.
  std::map<std::tuple<Kind, c10::ScalarType, std::size_t>, RunBuffer> by_kind;
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
    RunBuffer& buffer = by_kind[{kind, member.dtype, alone}];
    buffer.over = &over;
    buffer.parameters.push_back(&parameter);
    buffer.runs.push_back(run_of(parameter.value(), buffer.over->ranks(), buffer.size));
    buffer.size += buffer.runs.back().numel();
  }
  for (auto& [kind, buffer] : by_kind) {
    make_owned(buffer, at::TensorOptions().dtype(std::get<1>(kind)).device(device));
    units_[unit].buffers.push_back(std::move(buffer));
  }
}

void Sharding::make_owned(RunBuffer& buffer, const at::TensorOptions& options) {
  if (buffer.over->ranks() == 1) return;  // values are owned whole
  const comm::Group& replica = buffer.over->replica;
  // The ends of uneven runs are never written; they are summed and gathered all the same.
  if (buffer.over->is_gathered()) {
    buffer.shard = at::zeros({replica.size() * buffer.size}, options);
    buffer.owned = buffer.shard.narrow(0, replica.rank() * buffer.size, buffer.size);
  } else {
    buffer.owned = at::zeros({buffer.size}, options);
  }
  for (std::size_t i = 0; i < buffer.parameters.size(); ++i) {
    const Run& run = buffer.runs[i];
    const std::int64_t first = std::min(buffer.over->place() * run.rows, run.whole_rows);
    const std::int64_t rows = std::min(run.rows, run.whole_rows - first);
    buffer.parameters[i]->set_owned(buffer.owned.narrow(0, run.offset, rows * run.row_numel)
                                        .view(shape_of_rows(buffer.parameters[i]->value(), rows)),
                                    first);
  }
}

void Sharding::gather_into_values(RunBuffer& buffer, const at::Tensor& runs) {
  const at::Tensor by_rank = runs.view({-1, buffer.size});
  for (std::size_t i = 0; i < buffer.parameters.size(); ++i) {
    nn::Parameter& parameter = *buffer.parameters[i];
    parameter.take_memory(collect_rows(by_rank, buffer.runs[i], parameter.value()));
  }
}

void Sharding::start_publishing(Unit& unit, bool with_frozen) {
  struct Gather {
    std::vector<at::Tensor> outputs, inputs;
  };
  std::map<std::pair<Kind, c10::ScalarType>, Gather> by_kind;
  for (RunBuffer& buffer : unit.buffers) {
    if (buffer.gathered.defined())
      throw InternalError("owned rows were written while a gather of the old ones was under way");
    const std::int64_t replicas = buffer.over->replica.size();
    if (replicas == 1 || !buffer.owned.defined() || (buffer.is_frozen && !with_frozen)) continue;
    Gather& gather = by_kind[{kind_of(*buffer.parameters.front()), buffer.owned.scalar_type()}];
    if (buffer.over->is_gathered()) {
      buffer.published = buffer.owned.clone();
      gather.outputs.push_back(buffer.shard);
      gather.inputs.push_back(buffer.published);
    } else {
      buffer.published = at::empty({replicas * buffer.size}, buffer.owned.options());
      gather.outputs.push_back(buffer.published);
      gather.inputs.push_back(buffer.owned);
    }
  }
  for (const auto& [kind, gather] : by_kind) {
    unit.publishing.push_back(
        division_of(kind.first).replica.all_gather_async(gather.outputs, gather.inputs));
  }
}

void Sharding::finish_publishing(Unit& unit) {
  for (comm::Pending& publishing : unit.publishing) publishing.wait();
  unit.publishing.clear();
  for (RunBuffer& buffer : unit.buffers) {
    const at::Tensor published = std::exchange(buffer.published, {});
    if (published.defined() && !buffer.over->is_gathered()) gather_into_values(buffer, published);
  }
}

void Sharding::publish(bool with_frozen) {
  const ops::NoGradient guard;
  // The rows of one unit travel while those of the one before are put in their places.
  for (std::size_t i = 0; i < units_.size(); ++i) {
    start_publishing(units_[i], with_frozen);
    if (i > 0) finish_publishing(units_[i - 1]);
  }
  if (!units_.empty()) finish_publishing(units_.back());
}

void Sharding::freeze_untrained() {
  for (Unit& unit : units_) {
    for (RunBuffer& buffer : unit.buffers) {
      buffer.is_frozen =
          std::none_of(buffer.parameters.begin(), buffer.parameters.end(),
                       [](const nn::Parameter* parameter) { return parameter->trainable(); });
      if (!buffer.is_frozen || buffer.over->is_gathered()) continue;
      for (nn::Parameter* parameter : buffer.parameters) parameter->set_owned({}, 0);
      buffer.owned.reset();
    }
  }
}

void Sharding::prefetch(std::size_t unit) {
  if (unit >= units_.size() || units_[unit].is_acquired || !units_[unit].gathering.empty()) return;
  struct Gather {
    std::vector<at::Tensor> outputs, inputs;
  };
  std::map<std::pair<Kind, c10::ScalarType>, Gather> by_kind;
  for (RunBuffer& buffer : units_[unit].buffers) {
    if (!buffer.over->is_gathered()) continue;
    buffer.gathered =
        at::empty({buffer.over->shard.size() * buffer.shard.numel()}, buffer.shard.options());
    Gather& gather = by_kind[{kind_of(*buffer.parameters.front()), buffer.shard.scalar_type()}];
    gather.outputs.push_back(buffer.gathered);
    gather.inputs.push_back(buffer.shard);
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
  for (RunBuffer& buffer : units_[unit].buffers) {
    if (!buffer.over->is_gathered()) continue;
    gather_into_values(buffer, buffer.gathered);
    buffer.gathered.reset();
  }
  units_[unit].is_acquired = true;
}

bool Sharding::is_acquired(std::size_t unit) const { return units_[unit].is_acquired; }

void Sharding::hold(std::size_t unit, bool holds) { units_[unit].is_held = holds; }

void Sharding::release(std::size_t unit) {
  if (!units_[unit].is_acquired || units_[unit].is_held) return;
  for (const RunBuffer& buffer : units_[unit].buffers) {
    if (!buffer.over->is_gathered()) continue;
    for (nn::Parameter* parameter : buffer.parameters) parameter->release_memory();
  }
  units_[unit].is_acquired = false;
}

/// Index of this rank's part of a parameter, and the number of parts, where ranks along tp share
/// parts; else 0 of 1.
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

void Sharding::reduce(std::size_t unit, bool is_last) {
  if (!is_last && summing_ == Summing::kStep) return;
  const ops::NoGradient guard;
  std::map<std::pair<Kind, c10::ScalarType>, std::vector<nn::Parameter*>> by_kind;
  for (const RunBuffer& buffer : units_[unit].buffers) {
    for (nn::Parameter* parameter : buffer.parameters) {
      if (!parameter->trainable()) continue;
      // The factors of sets that a pass names are not among the parameters of its blocks.
      parameter->collect_gradient();
      by_kind[{kind_of(*parameter), parameter->gradient_dtype()}].push_back(parameter);
    }
  }
  UnderWay started;
  for (auto& [kind, parameters] : by_kind) {
    Reduction reduction;
    reduction.over = &division_of(kind.first);
    // A gradient that no rank shares stays, and adds up, where it is.
    if (reduction.over->ranks() == 1 && !is_last) continue;
    sum_partial_gradients(parameters);
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
    } else {
      sum_over_replicas(reduction);
    }
    started.push_back(std::move(reduction));
  }
  // Each sum has had the backward of a unit to end in before anything waits for it.
  if (!reductions_.empty()) {
    for (Reduction& reduction : reductions_.back()) sum_over_replicas(reduction);
  }
  reductions_.push_back(std::move(started));
  while (reductions_.size() > kUnitsUnderWay) {
    for (Reduction& reduction : reductions_.front()) take_sums(reduction);
    reductions_.pop_front();
  }
}

/// Starts it where there are several; nothing to do a second time.
void Sharding::sum_over_replicas(Reduction& reduction) {
  const comm::Group& replica = reduction.over->replica;
  if (reduction.sums.front().own.defined()) return;
  if (replica.size() == 1) {
    for (Sum& sum : reduction.sums) sum.own = sum.partial.view({-1});
    return;
  }
  reduction.pending.wait();
  std::vector<at::Tensor> outputs, inputs;
  for (Sum& sum : reduction.sums) {
    sum.all.reset();
    sum.own = at::empty({sum.partial.size(1)}, sum.partial.options());
    outputs.push_back(sum.own);
    inputs.push_back(sum.partial.view({-1}));
  }
  reduction.pending = replica.reduce_scatter_sum_async(outputs, inputs);
}

/// Adds them to those of the step, when they are there, and lets go of what was summed.
void Sharding::take_sums(Reduction& reduction) {
  sum_over_replicas(reduction);
  reduction.pending.wait();
  for (const Sum& sum : reduction.sums) {
    for (std::size_t i = 0; i < sum.parameters.size(); ++i) {
      nn::Parameter* const parameter = sum.parameters[i];
      const at::Tensor rows = parameter->owned();
      const at::Tensor own = sum.own.narrow(0, sum.runs[i].offset, rows.numel()).view(rows.sizes());
      const auto [place, is_new] = place_in_sums_.try_emplace(parameter, sums_.size());
      if (is_new) {
        sums_.emplace_back(parameter, own);
      } else {
        sums_[place->second].second.add_(own);
      }
    }
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
  for (UnderWay& unit : reductions_) {
    for (Reduction& reduction : unit) take_sums(reduction);
  }
  reductions_.clear();
  for (auto& [parameter, sum] : sums_) parameter->set_reduced_gradient(std::move(sum));
  sums_.clear();
  place_in_sums_.clear();
  if (tied_ == nullptr || !tied_->trainable()) return;
  // One end may have none where the other has: a step without loss reaches the embedding alone.
  at::Tensor sum = tied_->gradient_buffer().contiguous();
  end_stages_.all_reduce_sum(sum);
  tied_->set_reduced_gradient(sum);
}

void Sharding::tie_over_stages(nn::Parameter& parameter) {
  if (end_stages_.size() > 1 && parameter.is_held()) tied_ = &parameter;
}

}  // namespace heddle::parallel
