#include "rollout/adapter_tables.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>

#include "device/upload.h"
#include "nn/low_rank.h"

namespace heddle::rollout {
namespace {

constexpr std::int64_t kRankStep = 16;

/// Whether the factors are as ops::LowRankSlots wants them, rows in steps of 16 bytes.
bool fits(const nn::Parameter& a, const nn::Parameter& b) {
  const auto lies_well = [](const at::Tensor& factor) {
    return factor.scalar_type() == at::kBFloat16 && factor.is_contiguous() &&
           reinterpret_cast<std::uintptr_t>(factor.const_data_ptr()) % 16 == 0;
  };
  return lies_well(a.data()) && lies_well(b.data()) && a.data().size(1) % 8 == 0;
}

}  // namespace

bool AdapterTables::can_serve(const assembly::ModelOnRanks& placed) {
  const ops::KernelTable& kernels = placed.model->kernels();
  const auto& choices = kernels.choices();
  return std::any_of(choices.begin(), choices.end(), [&](const auto& choice) {
    return choice.op == ops::GroupedLowRank::kName && !choice.is_reference &&
           kernels.get<ops::GroupedLowRank>().slot_lows != nullptr;
  });
}

AdapterTables::AdapterTables(assembly::ModelOnRanks& placed, std::int64_t slots)
    : slots_(static_cast<std::size_t>(slots)) {
  placed.model->visit_linears([&](nn::Linear& linear) { linears_.push_back(&linear); });
  is_changed_.assign(linears_.size(), false);
  table_ = at::zeros({static_cast<std::int64_t>(linears_.size()) + 1, slots, 3},
                     at::TensorOptions().dtype(at::kLong).device(placed.context.device));
}

bool AdapterTables::takes(const std::shared_ptr<const nn::AdapterSet>& set) const {
  return !set || find(set) >= 0 ||
         (!set->changes_experts() &&
          std::all_of(linears_.begin(), linears_.end(), [&](const nn::Linear* linear) {
            const nn::LowRank* const change = set->of(*linear);
            return change == nullptr || fits(change->a(), change->b());
          }));
}

std::int64_t AdapterTables::rank_of(const Sets& sets) const {
  std::int64_t most = 0, rank = kRankStep;
  const nn::AdapterSet* before = nullptr;
  for (const auto& set : sets) {
    if (set.get() == before) continue;
    before = set.get();
    if (set) most = std::max(most, slots_[static_cast<std::size_t>(find(set))].rank);
  }
  while (rank < most) rank *= 2;
  return most == 0 ? 0 : rank;
}

std::int64_t AdapterTables::find(const std::shared_ptr<const nn::AdapterSet>& set) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    // The address first: a lock costs more.
    if (slots_[i].address == set.get() && slots_[i].set.lock() == set)
      return static_cast<std::int64_t>(i);
  }
  return -1;
}

std::int64_t AdapterTables::free_slot() const {
  const auto oldest =
      std::min_element(slots_.begin(), slots_.end(),
                       [](const Slot& a, const Slot& b) { return a.last_used < b.last_used; });
  TORCH_CHECK(oldest->last_used < step_, "more sets of adapters in a step than ", slots_.size());
  return oldest - slots_.begin();
}

std::int64_t AdapterTables::write(std::int64_t slot, const nn::AdapterSet& set) const {
  std::int64_t rank = 0;
  const auto layers = static_cast<std::int64_t>(linears_.size());
  const at::Tensor entries = at::zeros({layers, 3}, at::kLong);
  for (std::int64_t i = 0; i < layers; ++i) {
    const nn::LowRank* const change = set.of(*linears_[static_cast<std::size_t>(i)]);
    if (change == nullptr) continue;
    rank = std::max(rank, change->rank());
    entries.select(0, i).copy_(
        ops::slot_entry(change->a().data(), change->b().data(), change->scaling()));
  }
  table_.narrow(0, 0, layers).select(1, slot).copy_(device::upload(entries, table_.device()));
  return rank;
}

bool AdapterTables::place(const Sets& sets) {
  ++step_;
  bool has_more = false;
  std::vector<const std::shared_ptr<const nn::AdapterSet>*> absent;
  const nn::AdapterSet* before = nullptr;
  for (const auto& set : sets) {
    if (!set || set.get() == before) continue;
    before = set.get();
    const std::int64_t slot = find(set);
    if (slot < 0) {
      absent.push_back(&set);
    } else {
      slots_[static_cast<std::size_t>(slot)].last_used = step_;
    }
  }
  for (const auto* set : absent) {
    if (find(*set) >= 0) continue;  // two runs of one set
    const std::int64_t slot = free_slot();
    slots_[static_cast<std::size_t>(slot)] = {*set, set->get(), write(slot, **set), step_};
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      if (is_changed_[i] || (*set)->of(*linears_[i]) == nullptr) continue;
      is_changed_[i] = true;
      has_more = true;
    }
  }
  return has_more;
}

at::Tensor AdapterTables::runs(const Sets& sets, std::int64_t rows) const {
  std::vector<std::int32_t> numbers;
  const auto set_of = [&](std::int64_t row) {
    return row < static_cast<std::int64_t>(sets.size()) ? sets[static_cast<std::size_t>(row)].get()
                                                        : nullptr;
  };
  for (std::int64_t first = 0; first < rows;) {
    std::int64_t last = first;
    while (last < rows && set_of(last) == set_of(first) &&
           last - first < ops::LowRankSlots::kMostRows)
      ++last;
    const std::int64_t slot =
        set_of(first) == nullptr ? -1 : find(sets[static_cast<std::size_t>(first)]);
    for (const std::int64_t number : {slot, first, last - first, std::int64_t{0}})
      numbers.push_back(static_cast<std::int32_t>(number));
    first = last;
  }
  numbers.resize(4 * std::bit_ceil(numbers.size() / 4));
  return at::tensor(numbers, at::kInt).view({-1, 4});
}

nn::RowAdapters AdapterTables::adapters(const at::Tensor& runs, std::int64_t rank) const {
  nn::RowAdapters adapters{runs, rank, {}, table_.select(0, table_.size(0) - 1)};
  for (std::size_t i = 0; i < linears_.size(); ++i) {
    if (is_changed_[i])
      adapters.layers.emplace(linears_[i], table_.select(0, static_cast<std::int64_t>(i)));
  }
  return adapters;
}

void AdapterTables::forget() { std::fill(slots_.begin(), slots_.end(), Slot{}); }

}  // namespace heddle::rollout
