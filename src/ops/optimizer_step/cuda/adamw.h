// AdamW over many tensors with fp32 weights and moments. Plain C++ header.
#pragma once

#include <vector>

#include "ops/cuda/element.h"
#include "ops/optimizer_step/cuda/adamw_scalars.h"

namespace heddle::ops::cuda {

/// One parameter: `count` contiguous elements. Pointers that are not all on 16 bytes, as those of a
/// rank's part of a short parameter, make it slower.
struct AdamwEntry {
  float* weight = nullptr;  ///< fp32: the parameter, or its master copy.
  void* rounded = nullptr;  ///< bf16 parameter that gets the rounded master; null without.
  const void* gradient = nullptr;
  float *exp_avg = nullptr, *exp_avg_sq = nullptr;
  int64_t count = 0;
  double weight_decay = 0;
  Element gradient_type = Element::kFloat32;
  int group = 0;  ///< Its numbers, where groups have numbers of their own.
};

/// Enqueues the update of all parameters. Bytes per element: 24, the gradient's, 2 where rounded.
void adamw(const std::vector<AdamwEntry>& entries, const AdamwScalars& scalars,
           cudaStream_t stream);

/// The tables of a launch over groups, as they lie on the host and, copied, on the device.
struct AdamwGroups {
  std::vector<AdamwScalars> scalars;  ///< By group.
  std::vector<AdamwEntry> entries;
  std::vector<int> first_block, tensor_of_block;

  void add(const AdamwEntry& entry);
};
/// Places of such tables on the device.
struct AdamwGroupsOnDevice {
  const AdamwScalars* scalars;
  const AdamwEntry* entries;
  const int *first_block, *tensor_of_block;
  int blocks;
};
/// Enqueues the update of all groups' parameters by one launch, with the bits of adamw().
void adamw(const AdamwGroupsOnDevice& groups, cudaStream_t stream);

}  // namespace heddle::ops::cuda
