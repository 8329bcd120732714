// A block updates kBlockElements neighbours of one tensor, four a thread and step; nothing but the
// state itself goes through memory: the gradient is scaled, and the bf16 weight rounded, on the
// way.
#include "ops/optimizer_step/cuda/adamw.h"

#include "ops/cuda/vector.cuh"
#include "ops/optimizer_step/cuda/adamw_scalars.cuh"
#include "ops/optimizer_step/cuda/tensor_table.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWidth = 4, kSteps = 4;
constexpr int kBlockElements = kThreads * kWidth * kSteps;
using Table = TensorTable<AdamwEntry, kBlockElements>;
using StoredTable = StoredTensorTable<AdamwEntry, kBlockElements>;

/// Numbers of all tensors.
struct OneGroup {
  AdamwScalars scalars;
  __device__ __forceinline__ const AdamwScalars& of(const AdamwEntry&) const { return scalars; }
};

/// Numbers by group.
struct ManyGroups {
  const AdamwScalars* scalars;
  __device__ __forceinline__ const AdamwScalars& of(const AdamwEntry& t) const {
    return scalars[t.group];
  }
};

__device__ __forceinline__ void update(float& p, float& m, float& v, float g, float decay,
                                       const AdamwFloats& s) {
  g *= s.gradient_multiplier;
  p *= decay;
  m += (1.f - s.beta1) * (g - m);
  v = v * s.beta2 + (1.f - s.beta2) * g * g;
  p -= s.step_size * m / (sqrtf(v) * s.inverse_root_correction2 + s.eps);
}

template <int N>
__device__ __forceinline__ void update_at(const AdamwEntry& t, int64_t i, float decay,
                                          const AdamwFloats& s) {
  float p[N], m[N], v[N], g[N];
  read(t.weight + i, p);
  read(t.exp_avg + i, m);
  read(t.exp_avg_sq + i, v);
  read_weight(t.gradient, t.gradient_type, i, g);
#pragma unroll
  for (int j = 0; j < N; ++j) update(p[j], m[j], v[j], g[j], decay, s);
  write(t.weight + i, p);
  write(t.exp_avg + i, m);
  write(t.exp_avg_sq + i, v);
  if (t.rounded != nullptr) write(static_cast<bf16*>(t.rounded) + i, p);
}

template <class SomeTable, class Groups>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ SomeTable table, const __grid_constant__ Groups groups) {
  const auto [tensor, begin] = table.place();
  const AdamwEntry& t = table.entries[tensor];
  const AdamwFloats s(groups.of(t));
  if (s.changes_nothing) return;
  const float decay = s.decay(t.weight_decay);
  const bool is_wide = start_on_16_bytes(t.weight, t.rounded, t.gradient, t.exp_avg, t.exp_avg_sq);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = begin + (k * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
    if (is_wide && i + kWidth <= t.count) {
      update_at<kWidth>(t, i, decay, s);
    } else {
      const int64_t end = min(i + kWidth, t.count);
      for (int64_t j = i; j < end; ++j) update_at<1>(t, j, decay, s);
    }
  }
}

}  // namespace

void adamw(const std::vector<AdamwEntry>& entries, const AdamwScalars& scalars,
           cudaStream_t stream) {
  Table::for_each(entries, [&](const Table& table, int blocks) {
    adamw_kernel<<<blocks, kThreads, 0, stream>>>(table, OneGroup{scalars});
  });
  check_launch("adamw");
}

void AdamwGroups::add(const AdamwEntry& entry) {
  const int tensor = static_cast<int>(entries.size());
  entries.push_back(entry);
  first_block.push_back(static_cast<int>(tensor_of_block.size()));
  tensor_of_block.resize(tensor_of_block.size() + static_cast<std::size_t>(Table::blocks_of(entry)),
                         tensor);
}

void adamw(const AdamwGroupsOnDevice& groups, cudaStream_t stream) {
  if (groups.blocks == 0) return;
  adamw_kernel<<<groups.blocks, kThreads, 0, stream>>>(
      StoredTable{groups.entries, groups.tensor_of_block, groups.first_block},
      ManyGroups{groups.scalars});
  check_launch("adamw");
}

}  // namespace heddle::ops::cuda
