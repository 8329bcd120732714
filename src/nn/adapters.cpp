#include "nn/adapters.h"

#include <algorithm>

#include "nn/low_rank.h"
#include "nn/pass.h"
#include "ops/collectives.h"

namespace heddle::nn {
namespace {

/// The entry of `layer`; null if there is none.
template <class Layer, class Change>
Change* find(const std::unordered_map<const Layer*, Change*>& changes, const Layer& layer) {
  const auto it = changes.find(&layer);
  return it == changes.end() ? nullptr : it->second;
}

template <class Change>
void visit_both(Change* change, const std::function<void(Parameter&)>& visit) {
  if (change == nullptr) return;
  visit(change->a());
  visit(change->b());
}

}  // namespace

LowRank* AdapterSet::of(const Linear& layer) const { return find(linears_, layer); }
LowRankExperts* AdapterSet::of(const ExpertWeights& weights) const {
  return find(experts_, weights);
}

void AdapterSet::visit_factors(const Linear& layer,
                               const std::function<void(Parameter&)>& visit) const {
  visit_both(of(layer), visit);
}

void AdapterSet::visit_factors(const ExpertWeights& weights,
                               const std::function<void(Parameter&)>& visit) const {
  visit_both(of(weights), visit);
}

std::vector<AdaptedRows> adapters_of(const Pass& pass, std::int64_t rows) {
  std::int64_t total = 0;
  for (const AdaptedRows& segment : pass.adapters) total += segment.rows;
  if (pass.adapters.empty() || rows == total) return pass.adapters;
  TORCH_CHECK(pass.tensor_group != nullptr, "the adapters of ", total, " rows for a layer of ",
              rows);
  const ops::Rows own = ops::own_rows(total, *pass.tensor_group);
  TORCH_CHECK(own.count == rows, "the adapters of ", total, " rows, ", own.count,
              " on this rank, for a layer of ", rows);
  std::vector<AdaptedRows> mine;
  std::int64_t begin = 0;
  for (const AdaptedRows& segment : pass.adapters) {
    const std::int64_t first = std::max(begin, own.first),
                       last = std::min(begin + segment.rows, own.first + own.count);
    if (first < last) {
      mine.push_back({segment.set, last - first, {}});
      if (segment.draws.defined())
        mine.back().draws = segment.draws.narrow(0, first - begin, last - first);
    }
    begin += segment.rows;
  }
  return mine;
}

}  // namespace heddle::nn
