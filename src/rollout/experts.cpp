#include "rollout/experts.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

namespace heddle::rollout {

std::int64_t expert_width(const models::Config& config) {
  if (!config.is_moe()) return 0;
  const std::vector<bool> sparse = config.sparse_layers();
  return std::count(sparse.begin(), sparse.end(), true) * config.moe()->num_experts_per_tok;
}

at::Tensor expert_table(const assembly::ModelOnRanks& placed,
                        const std::vector<at::Tensor>& experts,
                        const std::vector<std::int64_t>& rows) {
  const models::Config& config = placed.model->config();
  const std::vector<bool> sparse = config.sparse_layers();
  const std::int64_t k = config.moe()->num_experts_per_tok;
  // Numbers of experts are exact in float, which every collective sums.
  at::Tensor table =
      at::zeros({std::accumulate(rows.begin(), rows.end(), std::int64_t{0}), expert_width(config)},
                at::kFloat);
  // One copy from the device for all layers.
  std::vector<at::Tensor> defined;
  std::copy_if(experts.begin(), experts.end(), std::back_inserter(defined),
               [](const at::Tensor& chosen) { return chosen.defined(); });
  const auto own = rows.begin() + placed.context.mesh.data_rank();
  const std::int64_t before = std::accumulate(rows.begin(), own, std::int64_t{0});
  if (!defined.empty()) {
    const at::Tensor host = at::stack(defined, 1).cpu().to(at::kFloat);  // [T/tp, layers, k]
    const std::int64_t first = host.size(0) * placed.model->tensor_group().rank(),
                       count = std::clamp<std::int64_t>(*own - first, 0, host.size(0));
    std::int64_t column = 0, layer = 0;
    for (std::size_t i = 0; i < sparse.size(); ++i) {
      if (!sparse[i]) continue;
      if (experts[i].defined() && count > 0) {
        table.narrow(0, before + first, count)
            .narrow(1, column, k)
            .copy_(host.narrow(0, 0, count).select(1, layer));
      }
      layer += experts[i].defined() ? 1 : 0;
      column += k;
    }
  }
  placed.context.mesh.world_group().all_reduce_sum(table);
  return table;
}

}  // namespace heddle::rollout
