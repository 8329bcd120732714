#include "objective/last_token.h"

#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include "device/upload.h"
#include "ops/collectives.h"

namespace heddle::objective {

at::Tensor rows_of_tokens(const Model& model, const at::Tensor& hidden, const data::Batch& batch,
                          const std::vector<std::int64_t>& tokens) {
  const auto select = [&](const std::vector<std::int64_t>& rows) {
    return hidden.index_select(0, device::upload(rows, hidden.device()));
  };
  const comm::Group& group = model.tensor_group();
  if (group.size() == 1 || tokens.empty()) return select(tokens);
  const ops::Rows own = ops::own_rows(batch.size(), group);
  std::vector<std::int64_t> rows, places;
  for (std::size_t s = 0; s < tokens.size(); ++s) {
    const std::int64_t row = tokens[s] - own.first;
    if (row < 0 || row >= own.count) continue;
    rows.push_back(row);
    places.push_back(static_cast<std::int64_t>(s));
  }
  // One rank has each row: the sum over the ranks fills the others in.
  const auto count = static_cast<std::int64_t>(tokens.size());
  const at::Tensor none = at::zeros({count, hidden.size(1)}, hidden.options().requires_grad(false));
  const at::Tensor mine = none.index_copy(0, device::upload(places, hidden.device()), select(rows));
  return ops::reduce_from_group(mine, group);
}

at::Tensor last_token_rows(const Model& model, const at::Tensor& hidden, const data::Batch& batch) {
  return rows_of_tokens(model, hidden, batch, batch.last_tokens);
}

}  // namespace heddle::objective
