#include "rollout/experts.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

namespace heddle::rollout {

std::int64_t expert_width(const models::Config& config) {
  if (!config.is_moe()) return 0;
  const std::vector<bool> sparse = config.sparse_layers();
  return std::count(sparse.begin(), sparse.end(), true) * config.moe()->num_experts_per_tok;
}

OwnExperts OwnExperts::of(const models::Config& config, const std::vector<at::Tensor>& experts) {
  const std::vector<bool> sparse = config.sparse_layers();
  OwnExperts own;
  std::vector<at::Tensor> defined;
  std::int64_t layer = 0;
  for (std::size_t i = 0; i < sparse.size(); ++i) {
    if (!sparse[i]) continue;
    if (experts[i].defined()) {
      defined.push_back(experts[i]);
      own.layers.push_back(layer);
    }
    ++layer;
  }
  if (!defined.empty()) own.chosen = at::stack(defined, 1);
  return own;
}

at::Tensor expert_table(const assembly::ModelOnRanks& placed, const OwnExperts& own,
                        const std::vector<std::int64_t>& rows) {
  const models::Config& config = placed.model->config();
  const comm::Mesh& mesh = placed.context.mesh;
  const std::int64_t k = config.moe()->num_experts_per_tok, width = expert_width(config),
                     all = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  // Numbers of experts are exact in float, which every collective sums.
  at::Tensor table = at::zeros({all, width / k, k}, at::kFloat);
  const auto here = rows.begin() + mesh.data_rank();
  const std::int64_t before = std::accumulate(rows.begin(), here, std::int64_t{0});
  if (own.chosen.defined()) {
    const at::Tensor host = own.chosen.cpu().to(at::kFloat);
    const std::int64_t first = host.size(0) * placed.model->tensor_group().rank();
    std::vector<std::int64_t> from, to;
    for (std::int64_t row = 0; row < host.size(0); ++row) {
      const std::int64_t place =
          own.places.empty() ? first + row : own.places.at(static_cast<std::size_t>(row));
      // A rank whose share of the rows is padding has none.
      if (place >= *here) continue;
      from.push_back(row);
      to.push_back(before + place);
    }
    const at::Tensor rows_here = host.index_select(0, at::tensor(from, at::kLong)),
                     places = at::tensor(to, at::kLong);
    for (std::size_t layer = 0; layer < own.layers.size(); ++layer) {
      table.select(1, own.layers[layer])
          .index_copy_(0, places, rows_here.select(1, static_cast<std::int64_t>(layer)));
    }
  }
  table = table.view({all, width});
  mesh.world_group().all_reduce_sum(table);
  return table;
}

}  // namespace heddle::rollout
