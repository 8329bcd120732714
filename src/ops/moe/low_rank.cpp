#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/moe/kernels.h"

namespace heddle::ops {
namespace {

ExpertLowRank zeros_like(const ExpertLowRank& change) {
  if (!change.defined()) return {};
  return {at::zeros(change.down.sizes(), change.down.options()),
          at::zeros(change.up.sizes(), change.up.options())};
}

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
}

bool ChangedExperts::has(Matrix matrix) const {
  return std::ranges::any_of(
      changes_, [&](const ExpertChanges& change) { return (change.*matrix).defined(); });
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
    at::mm_out(low, x.narrow(0, begin, count), change.down.select(0, e).t());
    y.narrow(0, begin, count).addmm_(low, change.up.select(0, e).t());
  }
}

void ChangedExperts::add_backward(Matrix matrix, std::int64_t e, const at::Tensor& x,
                                  const Tensors& lows, const at::Tensor& dy, const at::Tensor& dx,
                                  std::vector<ExpertChanges>& gradients) const {
  for (const auto& [set, begin, count, first] : parts_[static_cast<std::size_t>(e)]) {
    const ExpertLowRank& change = changes_[set].*matrix;
    if (!change.defined()) continue;
    const at::Tensor own_dy = dy.narrow(0, begin, count);
    const at::Tensor d_low = at::mm(own_dy, change.up.select(0, e));
    dx.narrow(0, begin, count).addmm_(d_low, change.down.select(0, e));
    const ExpertLowRank& into = gradients[set].*matrix;
    at::Tensor d_up = into.up.select(0, e), d_down = into.down.select(0, e);
    at::mm_out(d_up, own_dy.t(), lows[set].narrow(0, first, count));
    at::mm_out(d_down, d_low.t(), x.narrow(0, begin, count));
  }
}

std::vector<ExpertChanges> ChangedExperts::zeros() const {
  std::vector<ExpertChanges> all;
  for (const ExpertChanges& change : changes_)
    all.push_back({zeros_like(change.gate_up), zeros_like(change.down), change.tokens});
  return all;
}

}  // namespace heddle::ops
