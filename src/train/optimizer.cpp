#include "train/optimizer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/errors.h"
#include "base/hash.h"
#include "base/text.h"
#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/optimizer_step/adamw_now.h"
#include "ops/optimizer_step/eight_bit.h"
#include "ops/optimizer_step/eight_bit_state.h"
#include "ops/optimizer_step/muon.h"
#include "ops/optimizer_step/rounding.h"
#include "train/whole_matrices.h"

namespace heddle::train {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Key of the owned rows: their elements are rounded as in the whole parameter, if they are a run
/// of its elements; what tp divides otherwise is not.
std::uint64_t rounding_key(const nn::Parameter& parameter, std::uint64_t seed) {
  const std::uint64_t key = hash::of(parameter.name(), seed);
  const std::vector<Layout::Part> parts = parameter.layout().parts;
  if (parts.size() != 1) return key;
  const Region& owned = parts[0].global;
  const auto& shape = parameter.global_shape();
  std::int64_t row = 1;
  for (std::size_t d = 1; d < shape.size(); ++d) {
    if (owned.size[d] != shape[d]) return key;
    row *= shape[d];
  }
  return ops::rounding_key_from(key, static_cast<std::uint64_t>(owned.offset[0] * row));
}

/// Whether the parameter's moments are kept in 8 bits: matrices of whole blocks. Throws ConfigError
/// if the layout cuts blocks apart.
bool has_codes(const nn::Parameter& parameter, const config::OptimSection& options) {
  if (options.state_dtype != config::StateDtype::kInt8) return false;
  const auto& shape = parameter.global_shape();
  if (shape.size() < 2 || shape.back() % ops::eight_bit::kBlock != 0) return false;
  if (parameter.is_whole_in_blocks_of(ops::eight_bit::kBlock)) return true;
  throw_error<ConfigError>(
      "optim.state_dtype: int8 keeps the moments of '{}' in blocks of {} columns, which "
      "parallel.tp cuts apart: it has {} columns",
      parameter.name(), ops::eight_bit::kBlock, shape.back());
}

}  // namespace

Optimizer::Ranks Optimizer::Ranks::of(const comm::Mesh& mesh) {
  return {mesh.world_group(),
          mesh.group({comm::Dim::kTp, comm::Dim::kCp, comm::Dim::kFsdp, comm::Dim::kDp})};
}

Optimizer::Optimizer(std::vector<nn::Parameter*> parameters, const config::OptimSection& options,
                     std::uint64_t seed)
    : Optimizer(std::move(parameters), options, seed, Ranks{}) {}

Optimizer::Optimizer(std::vector<nn::Parameter*> parameters, const config::OptimSection& options,
                     std::uint64_t seed, Ranks ranks, const LearningRates& rates)
    : options_(options), ranks_(std::move(ranks)) {
  const ops::NoGradient guard;
  for (nn::Parameter* parameter : parameters) {
    const at::Tensor data = parameter->owned();
    Slot slot;
    slot.parameter = parameter;
    slot.owned = data;
    slot.weight_decay = options.weight_decay;
    slot.rounding_key = rounding_key(*parameter, seed);
    const bool exempt =
        data.dim() <= 1 || std::any_of(options.no_decay.begin(), options.no_decay.end(),
                                       [&](const std::string& pattern) {
                                         return text::matches_glob(pattern, parameter->name());
                                       });
    slot.decays = !exempt;
    if (exempt) slot.weight_decay = 0;
    slot.rate = place_of_rate(rates.share_of(parameter->name()));
    slot.is_muon = options.name == config::OptimName::kMuon && is_hidden_matrix(*parameter);
    if (options.name == config::OptimName::kSgd) {
      add_momentum(slot, options.momentum != 0);
    } else if (slot.is_muon) {
      add_momentum(slot, /*is_used=*/true);
    } else {
      add_moments(slot);
    }
    const bool is_narrow = data.scalar_type() == at::kBFloat16 || data.scalar_type() == at::kHalf;
    if (is_narrow && options.grad_dtype == config::Dtype::kFloat32)
      parameter->set_gradient_dtype(at::kFloat);
    slots_.push_back(std::move(slot));
  }
}

std::size_t Optimizer::place_of_rate(double share) {
  const auto known = std::find(rates_.begin(), rates_.end(), share);
  const std::size_t place = static_cast<std::size_t>(known - rates_.begin());
  if (known == rates_.end()) rates_.push_back(share);
  return place;
}

void Optimizer::add_momentum(Slot& slot, bool is_used) {
  const at::Tensor& data = slot.owned;
  const bool is_narrow = data.scalar_type() == at::kBFloat16 || data.scalar_type() == at::kHalf;
  const at::Tensor wide = is_narrow ? data.to(at::kFloat) : data;
  if (is_narrow) slot.master = wide;
  if (is_used) slot.momentum = at::zeros_like(wide);
}

void Optimizer::add_moments(Slot& slot) {
  const at::Tensor& data = slot.owned;
  const bool is_narrow = data.scalar_type() == at::kBFloat16 || data.scalar_type() == at::kHalf;
  const bool is_rounded =
      data.scalar_type() == at::kBFloat16 && options_.state_dtype == config::StateDtype::kBFloat16;
  const bool offloads = options_.offload && !data.is_cpu();
  if (offloads && !offload_) offload_.emplace(data.device());
  // On the host if it is offloaded and worth it, else beside the parameter.
  const auto placed = [&](const at::Tensor& state) {
    if (!offloads || data.numel() < StateOffload::kSmallest) return state;
    return device::host_like(state).copy_(state);
  };
  if (has_codes(*slot.parameter, options_)) {
    for (at::Tensor* codes : {&slot.exp_avg, &slot.exp_avg_sq})
      *codes = placed(ops::eight_bit::zero_codes(data));
    for (at::Tensor* scales : {&slot.exp_avg_scale, &slot.exp_avg_sq_scale})
      *scales = placed(ops::eight_bit::zero_scales(data));
    return;
  }
  if (is_narrow && !is_rounded) slot.master = placed(data.to(at::kFloat));
  const auto type = is_narrow && !is_rounded ? at::kFloat : data.scalar_type();
  for (at::Tensor* moment : {&slot.exp_avg, &slot.exp_avg_sq})
    *moment = placed(at::zeros(data.sizes(), data.options().dtype(type)));
}

std::vector<at::Tensor> Optimizer::counted_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const Slot& slot : slots_) {
    if (slot.parameter->gradient().defined() && !slot.parameter->is_copy())
      gradients.push_back(slot.parameter->gradient());
  }
  return gradients;
}

double Optimizer::gradient_norm() const {
  const std::vector<at::Tensor> gradients = counted_gradients();
  const double own = gradients.empty() ? 0 : ops::gradient_norm(gradients);
  return ranks_.owners.size() == 1 ? own : std::sqrt(ranks_.owners.all_reduce_sum(own * own));
}

std::function<std::vector<double>()> Optimizer::queued_gradient_norms(
    const std::vector<const Optimizer*>& optimizers) {
  std::vector<std::vector<at::Tensor>> gradients;
  for (const Optimizer* optimizer : optimizers) gradients.push_back(optimizer->counted_gradients());
  return [optimizers, queued = ops::queued_gradient_norms(gradients)] {
    std::vector<double> norms = queued();
    for (std::size_t i = 0; i < norms.size(); ++i) {
      const comm::Group& owners = optimizers[i]->ranks_.owners;
      if (owners.size() > 1) norms[i] = std::sqrt(owners.all_reduce_sum(norms[i] * norms[i]));
    }
    return norms;
  };
}

namespace {

at::Tensor gradient_of(const nn::Parameter& parameter, const at::Tensor& owned) {
  const at::Tensor& gradient = parameter.gradient();
  return gradient.defined() ? gradient : at::zeros_like(owned);
}

/// As the kernels of a queued step read it: contiguous, from 16 bytes on.
at::Tensor readable(const at::Tensor& gradient) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(gradient.const_data_ptr()) % 16 == 0;
  return is_aligned && gradient.is_contiguous() ? gradient
                                                : gradient.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

std::vector<std::vector<ops::AdamwTensor>> Optimizer::adamw_tensors() const {
  std::vector<std::vector<ops::AdamwTensor>> tensors(rates_.size());
  for (const Slot& slot : slots_) {
    if (slot.owned.numel() == 0 || slot.is_muon) continue;  // another rank's, or another rule's
    tensors[slot.rate].push_back({slot.owned, gradient_of(*slot.parameter, slot.owned),
                                  slot.exp_avg, slot.exp_avg_sq, slot.master, slot.weight_decay,
                                  slot.rounding_key, slot.exp_avg_scale, slot.exp_avg_sq_scale});
  }
  return tensors;
}

ops::AdamwOptions Optimizer::adamw_options() const {
  ops::AdamwOptions step;
  step.beta1 = options_.betas[0];
  step.beta2 = options_.betas[1];
  step.eps = options_.eps;
  step.step = steps_;
  return step;
}

std::vector<ops::AdamwGroup> Optimizer::adamw_groups(double lr, double gradient_multiplier) const {
  std::vector<ops::AdamwGroup> groups;
  for (std::vector<ops::AdamwTensor>& tensors : adamw_tensors()) {
    ops::AdamwOptions step = adamw_options();
    step.lr = lr * rates_[groups.size()];
    step.gradient_multiplier = gradient_multiplier;
    groups.push_back({std::move(tensors), step});
  }
  return groups;
}

void Optimizer::adamw(const ops::KernelTable& kernels, double lr, double gradient_multiplier) {
  for (auto& [tensors, step] : adamw_groups(lr, gradient_multiplier)) {
    const auto is_here = [&](const ops::AdamwTensor& tensor) {
      return !offload_ || !tensor.exp_avg.is_cpu();
    };
    const auto away = std::stable_partition(tensors.begin(), tensors.end(), is_here);
    const std::vector<ops::AdamwTensor> offloaded(away, tensors.end());
    tensors.erase(away, tensors.end());
    ops::adamw_step(kernels, tensors, step);
    if (offload_) {
      offload_->step(offloaded, [&, &step = step](const std::vector<ops::AdamwTensor>& piece) {
        ops::adamw_step(kernels, piece, step);
      });
    }
  }
}

void Optimizer::keep_largest(Slot& slot, const at::Tensor& gradient) const {
  const bool is_told = options_.name != config::OptimName::kSgd && options_.momentum != 0;
  if (is_told || !gathers_ || gradient.numel() == 0) return;
  const at::Tensor largest = at::linalg_vector_norm(gradient, kInfinity);
  slot.largest_gradient =
      slot.largest_gradient.defined() ? at::maximum(slot.largest_gradient, largest) : largest;
}

void Optimizer::sgd(double lr, double gradient_multiplier) {
  for (Slot& slot : slots_) {
    if (slot.owned.numel() == 0) continue;
    const at::Tensor gradient = gradient_of(*slot.parameter, slot.owned);
    keep_largest(slot, gradient);
    ops::sgd_step({{slot.owned, gradient, slot.momentum, slot.master, slot.weight_decay}},
                  lr * rates_[slot.rate], options_.momentum, steps_ == 1, gradient_multiplier);
  }
}

void Optimizer::muon(double lr, double gradient_multiplier) {
  std::vector<DividedMatrix> updates;
  std::vector<const Slot*> slots;
  std::vector<ops::MuonTensor> tensors;
  for (Slot& slot : slots_) {
    if (!slot.is_muon || !slot.parameter->is_held()) continue;
    slots.push_back(&slot);
    tensors.push_back({slot.owned, gradient_of(*slot.parameter, slot.owned), slot.momentum,
                       slot.master, slot.weight_decay});
    keep_largest(slot, tensors.back().gradient);
    updates.push_back({slot.parameter, ops::muon_direction(tensors.back(), options_.momentum,
                                                           gradient_multiplier)});
  }
  apply_to_whole(updates, ranks_.stage, ops::orthogonalized);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto& shape = slots[i]->parameter->global_shape();
    ops::muon_apply(tensors[i], updates[i].part, lr * rates_[slots[i]->rate],
                    ops::muon_scale(shape[shape.size() - 2], shape.back()));
  }
}

void Optimizer::step(const ops::KernelTable& kernels, double lr, double gradient_multiplier) {
  const ops::NoGradient guard;
  begin_step();
  if (options_.name == config::OptimName::kSgd) {
    sgd(lr, gradient_multiplier);
  } else {
    adamw(kernels, lr, gradient_multiplier);
    if (options_.name == config::OptimName::kMuon) muon(lr, gradient_multiplier);
  }
  clear_gradients();
}

void Optimizer::step_together(const ops::KernelTable& kernels, std::span<const Update> updates,
                              const ops::LateMultipliers& multipliers) {
  const ops::NoGradient guard;
  std::vector<ops::AdamwGroup> groups;
  std::vector<std::size_t> owners;  // of the groups
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const auto& [optimizer, lr] = updates[i];
    if (!optimizer->is_plain_adamw()) continue;
    optimizer->begin_step();
    for (ops::AdamwGroup& group : optimizer->adamw_groups(lr, 1)) {
      groups.push_back(std::move(group));
      owners.push_back(i);
    }
    optimizer->clear_gradients();  // which the groups hold
  }
  std::vector<double> found;
  ops::adamw_steps(kernels, groups, [&] {
    found = multipliers();
    std::vector<double> by_group;
    for (const std::size_t owner : owners) by_group.push_back(found.at(owner));
    return by_group;
  });
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const auto& [optimizer, lr] = updates[i];
    if (std::isnan(found.at(i))) {
      optimizer->clear_gradients();
      if (optimizer->is_plain_adamw()) optimizer->take_back_step();
    } else if (!optimizer->is_plain_adamw()) {
      optimizer->step(kernels, lr, found[i]);
    }
  }
}

void Optimizer::take_back_step() {
  --steps_;
  --updates_;
}

void Optimizer::begin_step() {
  ++steps_;
  ++updates_;
}

void Optimizer::clear_gradients() {
  for (Slot& slot : slots_) slot.parameter->clear_gradient();
}

void Optimizer::skip_step() {
  ++steps_;
  clear_gradients();
}

void Optimizer::set_adamw(double beta1, double beta2, double eps, double weight_decay) {
  options_.betas = {beta1, beta2};
  options_.eps = eps;
  options_.weight_decay = weight_decay;
  for (Slot& slot : slots_) slot.weight_decay = slot.decays ? weight_decay : 0;
}

bool Optimizer::can_queue(const ops::KernelTable& kernels) const {
  const auto is_read = [](const Slot& slot) {
    const c10::ScalarType type = slot.owned.scalar_type();
    return slot.owned.is_cuda() && (type == at::kBFloat16 || type == at::kFloat);
  };
  return options_.name == config::OptimName::kAdamW && !offload_ && !slots_.empty() &&
         std::all_of(slots_.begin(), slots_.end(), is_read) &&
         kernels.get<ops::AdamwStep>().reads_device_numbers;
}

void Optimizer::upload_numbers(double lr) {
  const ops::NoGradient guard;
  ++steps_;
  std::vector<double> rows;
  for (const double rate : rates_) {
    const ops::AdamwNow now = ops::adamw_now(lr * rate, options_.betas[0], options_.betas[1],
                                             steps_, /*gradient_multiplier=*/1);
    rows.insert(rows.end(), {now.lr, now.step_size, now.inverse_root_correction2,
                             now.gradient_multiplier, now.step});
  }
  const at::Tensor host =
      at::tensor(rows, at::kDouble).view({static_cast<std::int64_t>(rates_.size()), -1});
  const at::Tensor numbers = device::upload(host, slots_.at(0).owned.device());
  if (!numbers_.defined()) numbers_ = numbers.clone();
  numbers_.copy_(numbers);
}

at::Tensor Optimizer::queue_step(const ops::KernelTable& kernels, double clip_norm,
                                 const at::Tensor& loss, const Objection& objection) {
  const ops::NoGradient guard;
  std::vector<std::vector<ops::AdamwTensor>> by_rate = adamw_tensors();
  std::vector<at::Tensor> gradients;
  std::vector<std::size_t> seen(by_rate.size());
  for (const Slot& slot : slots_) {
    if (slot.owned.numel() == 0) continue;  // as adamw_tensors() does
    ops::AdamwTensor& tensor = by_rate[slot.rate][seen[slot.rate]++];
    tensor.gradient = readable(tensor.gradient);
    if (!slot.parameter->is_copy()) gradients.push_back(tensor.gradient);
  }
  at::Tensor norm =
      gradients.empty() ? at::zeros({}, numbers_.options()) : ops::queued_square_sum(gradients);
  ranks_.owners.all_reduce_sum(norm);
  norm.sqrt_();
  at::Tensor multiplier = at::ones_like(norm);
  if (clip_norm > 0) multiplier.mul_(clip_norm).div_(norm.add(1e-6)).clamp_max_(1);
  // NaN unless both are finite, else 0.
  multiplier.add_(norm.mul(0)).add_(loss.to(at::kDouble).mul(0));
  if (objection) multiplier.add_(objection(norm));
  numbers_.narrow(1, 3, 1).copy_(multiplier.expand({numbers_.size(0), 1}));
  ++updates_;
  for (std::size_t rate = 0; rate < by_rate.size(); ++rate) {
    ops::AdamwOptions step = adamw_options();
    step.on_device = numbers_.select(0, static_cast<std::int64_t>(rate));
    ops::adamw_step(kernels, by_rate[rate], step);
  }
  clear_gradients();
  return norm;
}

std::vector<std::string> Optimizer::undecayed() const {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    if (slot.weight_decay == 0) names.push_back(slot.parameter->name());
  }
  return names;
}

std::vector<ckpt::TensorPart> Optimizer::state(bool with_copies) const {
  std::vector<ckpt::TensorPart> parts;
  for (const Slot& slot : slots_) {
    const nn::Parameter& parameter = *slot.parameter;
    if (parameter.is_copy() && !with_copies) continue;
    const auto add = [&](const std::string& kind, const at::Tensor& tensor, std::int64_t unit = 1) {
      if (!tensor.defined()) return;
      std::vector<std::int64_t> shape = parameter.global_shape();
      if (unit > 1) shape.back() /= unit;
      for (nn::Box& box : parameter.boxes(tensor, unit))
        parts.push_back({kind + parameter.name(), box.tensor, std::move(box.global.offset), shape});
    };
    add("weights/", parameter.owned());
    add("master/", slot.master);
    add("exp_avg/", slot.exp_avg);
    add("exp_avg_sq/", slot.exp_avg_sq);
    add("exp_avg_scale/", slot.exp_avg_scale, ops::eight_bit::kBlock);
    add("exp_avg_sq_scale/", slot.exp_avg_sq_scale, ops::eight_bit::kBlock);
    add("momentum/", slot.momentum);
  }
  return parts;
}

std::int64_t Optimizer::state_bytes() const {
  std::int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const at::Tensor* tensor : {&slot.master, &slot.exp_avg, &slot.exp_avg_sq,
                                     &slot.exp_avg_scale, &slot.exp_avg_sq_scale, &slot.momentum}) {
      if (tensor->defined()) bytes += static_cast<std::int64_t>(tensor->nbytes());
    }
  }
  return bytes;
}

}  // namespace heddle::train
