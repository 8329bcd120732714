// Joins the CUDA kernel of AdamW with fp32 state to tensors.
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "ops/cuda/tensor.h"
#include "ops/optimizer_step/cuda/adamw.h"
#include "ops/optimizer_step/cuda/kernel_arguments.h"
#include "ops/optimizer_step/cuda/stored_tables.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {
namespace {

/// Whether the kernel takes it: fp32 moments, an fp32 weight or a bf16 one with a master, a
/// gradient in either.
bool fits(const AdamwTensor& t) {
  const c10::ScalarType weight = t.parameter.scalar_type(), gradient = t.gradient.scalar_type();
  return t.exp_avg.scalar_type() == at::kFloat &&
         (t.master.defined() ? weight == at::kBFloat16 : weight == at::kFloat) &&
         (gradient == at::kFloat || gradient == at::kBFloat16) && t.gradient.is_contiguous();
}

cuda::AdamwEntry entry_of(const AdamwTensor& t) {
  const at::Tensor& weight = t.master.defined() ? t.master : t.parameter;
  cuda::AdamwEntry entry;
  entry.weight = weight.mutable_data_ptr<float>();
  entry.rounded = t.master.defined() ? t.parameter.mutable_data_ptr() : nullptr;
  entry.gradient = t.gradient.const_data_ptr();
  entry.exp_avg = t.exp_avg.mutable_data_ptr<float>();
  entry.exp_avg_sq = t.exp_avg_sq.mutable_data_ptr<float>();
  entry.count = weight.numel();
  entry.weight_decay = t.weight_decay;
  entry.gradient_type = cuda::element_of(t.gradient);
  return entry;
}

void run_wide(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  const cuda::AdamwScalars scalars = scalars_of(options);
  std::vector<cuda::AdamwEntry> entries;
  std::vector<AdamwTensor> others;
  for (const AdamwTensor& tensor : tensors) {
    if (tensor.parameter.numel() == 0) continue;
    if (!tensor.parameter.is_cuda() || !fits(tensor)) {
      others.push_back(tensor);
    } else {
      entries.push_back(entry_of(tensor));
    }
  }
  TORCH_CHECK(others.empty() || !options.on_device.defined(), "cuda.fused: a ",
              others.front().gradient.scalar_type(), " gradient of ",
              others.front().gradient.sizes(), " cannot take its numbers from the device");
  if (!others.empty()) step_by_libtorch(others, options);
  if (entries.empty()) return;
  const cuda::OnDevice on(tensors.front().parameter);
  cuda::adamw(entries, scalars, on.stream());
}

}  // namespace

Step step_wide() { return run_wide; }

void step_groups(std::vector<AdamwGroup> groups, const LateMultipliers& multipliers) {
  cuda::AdamwGroups tables;
  std::vector<std::vector<AdamwTensor>> others_of;
  const at::Tensor* first = nullptr;
  for (const AdamwGroup& group : groups) {
    std::vector<AdamwTensor>& others = others_of.emplace_back();
    for (const AdamwTensor& tensor : group.tensors) {
      if (tensor.parameter.numel() == 0) continue;
      if (!tensor.parameter.is_cuda() || !fits(tensor) ||
          (first != nullptr && first->device() != tensor.parameter.device())) {
        others.push_back(tensor);
        continue;
      }
      if (first == nullptr) first = &tensor.parameter;
      cuda::AdamwEntry entry = entry_of(tensor);
      entry.group = static_cast<int>(others_of.size() - 1);
      tables.add(entry);
    }
  }
  std::optional<cuda::OnDevice> on;
  std::optional<cuda::StoredTables> stored;
  if (first != nullptr) {
    on.emplace(*first);
    stored.emplace(first->device(),
                   std::vector{cuda::bytes_of(tables.entries), cuda::bytes_of(tables.first_block),
                               cuda::bytes_of(tables.tensor_of_block)});
  }
  // The tables are on the device when the norms come.
  if (multipliers) {
    const std::vector<double> found = multipliers();
    for (std::size_t i = 0; i < groups.size(); ++i)
      groups[i].options.gradient_multiplier = found.at(i);
    const auto stays = [](const AdamwGroup& group) {
      return std::isnan(group.options.gradient_multiplier);
    };
    if (std::erase_if(groups, stays) > 0) return step_groups(std::move(groups), {});
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    tables.scalars.push_back(scalars_of(groups[i].options));
    if (!others_of[i].empty()) run_wide(others_of[i], groups[i].options);
  }
  if (first == nullptr) return;
  const cuda::StoredTables scalars(first->device(), {cuda::bytes_of(tables.scalars)});
  cuda::adamw(
      {scalars.at<cuda::AdamwScalars>(0), stored->at<cuda::AdamwEntry>(0), stored->at<int>(1),
       stored->at<int>(2), static_cast<int>(tables.tensor_of_block.size())},
      on->stream());
}

}  // namespace heddle::ops::adamw_cuda
