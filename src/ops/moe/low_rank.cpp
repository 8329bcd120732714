#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "device/upload.h"
#include "ops/moe/kernels.h"

namespace heddle::ops {
namespace {

ExpertLowRank zeros_like(const ExpertLowRank& change) {
  if (!change.defined()) return {};
  return {at::zeros(change.down.sizes(), change.down.options()),
          at::zeros(change.up.sizes(), change.up.options())};
}

bool shares(const ExpertLowRank& change) { return change.shares_down() || change.shares_up(); }

}  // namespace

ChangedExperts::ChangedExperts(const MoeOrder& order, const std::vector<ExpertChanges>& changes)
    : changes_(changes), parts_(order.starts.size() - 1), rows_(changes.size()) {
  if (changes.empty()) return;
  // One set has all rows.
  const at::Tensor tokens = changes.size() > 1 ? order.token.cpu().contiguous() : at::Tensor();
  const std::int64_t* const token =
      tokens.defined() ? tokens.const_data_ptr<std::int64_t>() : nullptr;
  for (std::size_t e = 0; e < parts_.size(); ++e) {
    std::int64_t begin = order.starts[e], last_token = 0;
    for (std::size_t s = 0; s < changes.size(); ++s) {
      last_token += changes[s].tokens;
      const bool is_last = s + 1 == changes.size();
      const std::int64_t end =
          is_last
              ? order.starts[e + 1]
              : std::lower_bound(token + begin, token + order.starts[e + 1], last_token) - token;
      if (end > begin) parts_[e].push_back({s, begin, end - begin, rows_[s]});
      rows_[s] += end - begin;
      begin = end;
    }
  }
  if (std::ranges::any_of(changes, [](const ExpertChanges& change) {
        return shares(change.gate_up) || shares(change.down);
      }))
    find_own_orders(order);
}

void ChangedExperts::find_own_orders(const MoeOrder& order) {
  const std::int64_t k = order.top_k;
  own_orders_.resize(changes_.size());
  if (changes_.size() == 1) {
    own_orders_[0] = {0, order.place.size(0) / k, order};
    return;
  }
  const at::Tensor sources = order.source.cpu().contiguous();
  const auto* const source = sources.const_data_ptr<std::int64_t>();
  std::vector<at::Tensor> lists;
  std::int64_t first = 0;
  for (std::size_t s = 0; s < changes_.size(); ++s) {
    own_orders_[s].first = first;
    own_orders_[s].tokens = changes_[s].tokens;
    first += changes_[s].tokens;
    // Several sets have no assignment to no expert: their rows are as many as their places.
    lists.push_back(at::empty({3, rows_[s]}, at::kLong));
  }
  for (const std::vector<Part>& parts : parts_) {
    for (const auto& [set, begin, count, low] : parts) {
      auto* const own = lists[set].mutable_data_ptr<std::int64_t>();
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t assignment = source[begin + i] - own_orders_[set].first * k;
        own[low + i] = assignment;
        own[rows_[set] + assignment] = low + i;
        own[2 * rows_[set] + low + i] = assignment / k;
      }
    }
  }
  for (std::size_t s = 0; s < changes_.size(); ++s) {
    const at::Tensor on_device = device::upload(lists[s], order.place.device());
    MoeOrder& own = own_orders_[s].order;
    own.source = on_device.select(0, 0);
    own.place = on_device.select(0, 1);
    own.token = on_device.select(0, 2);
    own.top_k = k;
  }
}

bool ChangedExperts::reads_rows(Matrix matrix) const {
  return std::ranges::any_of(changes_, [&](const ExpertChanges& change) {
    return (change.*matrix).defined() && !(change.*matrix).shares_down();
  });
}

Tensors ChangedExperts::lows(Matrix matrix) const {
  Tensors lows(changes_.size());
  for (std::size_t s = 0; s < lows.size(); ++s) {
    const at::Tensor& down = (changes_[s].*matrix).down;
    if (down.defined()) lows[s] = at::empty({rows_[s], down.size(1)}, down.options());
  }
  return lows;
}

void ChangedExperts::add(Matrix matrix, std::int64_t e, const at::Tensor& x, const Tensors& lows,
                         const at::Tensor& y) const {
  for (const auto& [set, begin, count, first] : parts_[static_cast<std::size_t>(e)]) {
    const ExpertLowRank& change = changes_[set].*matrix;
    if (!change.defined()) continue;
    at::Tensor low = lows[set].narrow(0, first, count);
    if (!change.shares_down())
      at::mm_out(low, x.narrow(0, begin, count), change.down.select(0, e).t());
    if (!change.shares_up()) y.narrow(0, begin, count).addmm_(low, change.up.select(0, e).t());
  }
}

void ChangedExperts::add_backward(Matrix matrix, std::int64_t e, const at::Tensor& x,
                                  const Tensors& lows, const at::Tensor& dy, const at::Tensor& dx,
                                  const Tensors& d_lows,
                                  std::vector<ExpertChanges>& gradients) const {
  for (const auto& [set, begin, count, first] : parts_[static_cast<std::size_t>(e)]) {
    const ExpertLowRank& change = changes_[set].*matrix;
    if (!change.defined()) continue;
    const ExpertLowRank& into = gradients[set].*matrix;
    at::Tensor d_low = d_lows[set].narrow(0, first, count);
    if (!change.shares_up()) {
      const at::Tensor own_dy = dy.narrow(0, begin, count);
      at::mm_out(d_low, own_dy, change.up.select(0, e));
      at::Tensor d_up = into.up.select(0, e);
      at::mm_out(d_up, own_dy.t(), lows[set].narrow(0, first, count));
    }
    if (!change.shares_down()) {
      dx.narrow(0, begin, count).addmm_(d_low, change.down.select(0, e));
      at::Tensor d_down = into.down.select(0, e);
      at::mm_out(d_down, d_low.t(), x.narrow(0, begin, count));
    }
  }
}

void ChangedExperts::send_lows(const at::Tensor& x, const Tensors& lows) const {
  for (std::size_t s = 0; s < own_orders_.size(); ++s) {
    const ExpertLowRank& change = changes_[s].gate_up;
    if (!change.shares_down()) continue;
    const OwnOrder& own = own_orders_[s];
    at::Tensor rows = lows[s];
    at::index_select_out(rows, at::mm(own.of(x), change.down.select(0, 0).t()), 0, own.order.token);
  }
}

void ChangedExperts::send_lows_backward(const at::Tensor& x, const Tensors& d_lows,
                                        const at::Tensor& dx,
                                        std::vector<ExpertChanges>& gradients) const {
  for (std::size_t s = 0; s < own_orders_.size(); ++s) {
    const ExpertLowRank& change = changes_[s].gate_up;
    if (!change.shares_down()) continue;
    const OwnOrder& own = own_orders_[s];
    const at::Tensor d_low = sum_rows(d_lows[s], own.order.place, own.order.top_k);
    own.of(dx).addmm_(d_low, change.down.select(0, 0));
    at::Tensor d_down = gradients[s].gate_up.down.select(0, 0);
    at::mm_out(d_down, d_low.t(), own.of(x));
  }
}

void ChangedExperts::sum_lows(const Tensors& lows, const at::Tensor& weights,
                              const at::Tensor& y) const {
  for (std::size_t s = 0; s < own_orders_.size(); ++s) {
    const ExpertLowRank& change = changes_[s].down;
    if (!change.shares_up()) continue;
    const OwnOrder& own = own_orders_[s];
    own.of(y).addmm_(combine_rows(lows[s], own.of(weights), own.order.place, own.order.top_k),
                     change.up.select(0, 0).t());
  }
}

void ChangedExperts::sum_lows_backward(const Tensors& lows, const at::Tensor& weights,
                                       const at::Tensor& dy, const Tensors& d_lows,
                                       const at::Tensor& d_weights,
                                       std::vector<ExpertChanges>& gradients) const {
  for (std::size_t s = 0; s < own_orders_.size(); ++s) {
    const ExpertLowRank& change = changes_[s].down;
    if (!change.shares_up()) continue;
    const OwnOrder& own = own_orders_[s];
    const at::Tensor own_dy = own.of(dy), own_weights = own.of(weights);
    const CombineGradients rows = combine_rows_backward(lows[s], own_weights, own.order,
                                                        at::mm(own_dy, change.up.select(0, 0)));
    at::Tensor d_rows = d_lows[s], d_up = gradients[s].down.up.select(0, 0);
    d_rows.copy_(rows.rows);
    own.of(d_weights).add_(rows.weights);
    at::mm_out(d_up, own_dy.t(),
               combine_rows(lows[s], own_weights, own.order.place, own.order.top_k));
  }
}

std::vector<ExpertChanges> ChangedExperts::zeros() const {
  std::vector<ExpertChanges> all;
  for (const ExpertChanges& change : changes_)
    all.push_back({zeros_like(change.gate_up), zeros_like(change.down), change.tokens});
  return all;
}

}  // namespace heddle::ops
