#include "rollout/recorded_decoding.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "device/upload.h"
#include "ops/autograd.h"

namespace heddle::rollout {
namespace {

/// Padding rows cost little while the weights' traffic dominates, a graph for every size would cost
/// the time to record it.
std::int64_t batch_bucket(std::int64_t rows) {
  for (const std::int64_t size : {1, 2, 4, 8, 16, 24, 32, 48, 64}) {
    if (rows <= size) return size;
  }
  return (rows + 31) / 32 * 32;
}

/// Parts of a sequence beyond its end cost a launch's empty blocks.
std::int64_t length_bucket(std::int64_t longest, std::int64_t capacity) {
  std::int64_t bucket = 512;
  while (bucket <= longest) bucket *= 2;
  return std::min(bucket, capacity) - 1;
}

}  // namespace

std::string RecordedDecoding::why_not(const assembly::ModelOnRanks& placed) {
  if (!placed.context.device.is_cuda()) return "only CUDA devices record them";
  if (placed.context.mesh.world_size() > 1) return "several ranks generate together";
  if (placed.model->config().moe() != nullptr) return "the model has routed experts";
  for (const ops::KernelTable::Choice& choice : placed.model->kernels().choices()) {
    if (choice.is_reference && (choice.op.ends_with("_decode") || choice.op == "sample_tokens"))
      return choice.op + " runs the reference";
  }
  return {};
}

RecordedDecoding::RecordedDecoding(assembly::ModelOnRanks& placed, CachePool& pool,
                                   std::int64_t capacity)
    : placed_(placed), pool_(pool), capacity_(capacity), fingerprint_(fingerprint()) {}

void RecordedDecoding::forget() {
  steps_.clear();
  neighbour_ = nullptr;
}

std::uint64_t RecordedDecoding::fingerprint() const {
  std::uint64_t mixed = 0;
  const auto mix = [&mixed](const nn::Parameter& parameter) {
    if (!parameter.is_held()) return;
    mixed = (mixed ^ reinterpret_cast<std::uintptr_t>(parameter.data().const_data_ptr())) *
            0x9E3779B97F4A7C15;
  };
  placed_.model->visit_parameters(mix);
  if (placed_.adapters) placed_.adapters->visit_parameters(mix);
  return mixed;
}

void RecordedDecoding::forget_if_moved() {
  const std::uint64_t now = fingerprint();
  if (std::exchange(fingerprint_, now) != now) forget();
}

RecordedDecoding::Step RecordedDecoding::make_step(
    const Key& key, const std::shared_ptr<const nn::AdapterSet>& set) const {
  const auto [batch, longest, set_address, draws] = key;
  const c10::Device device = placed_.context.device;
  Step step;
  step.whole = at::empty({6, batch}, at::TensorOptions().dtype(at::kLong).device(device));
  step.real = at::empty({3, batch}, at::TensorOptions().dtype(at::kDouble).device(device));
  step.pages_host = at::full({batch, pool_.pages_of(longest + 1)}, -1, at::kInt);
  step.pages = at::empty(step.pages_host.sizes(), step.pages_host.options().device(device));
  step.set = set;
  std::vector<std::int32_t> boundaries(static_cast<std::size_t>(batch) + 1);
  for (std::size_t i = 0; i < boundaries.size(); ++i) boundaries[i] = static_cast<std::int32_t>(i);
  step.sequences = ops::Sequences::from_host(boundaries, device);
  return step;
}

void RecordedDecoding::run(Step& step, const Key& key) const {
  const auto [batch, longest, set, draws] = key;
  models::Model& model = *placed_.model;
  nn::CachedSequences cached;
  cached.cache = &pool_.cache();
  // The host's copies stay empty: the graph is replayed with other numbers.
  cached.rows.slots = step.whole.select(0, 4);
  cached.rows.lengths = step.whole.select(0, 5);
  cached.rows.pages = step.pages;
  cached.rows.longest = longest;
  nn::Pass pass = model.cached_pass(step.sequences, std::move(cached));
  if (set != nullptr) pass.adapters = {{set, batch, {}}};
  const at::Tensor hidden = placed_.pipeline->evaluate(model, step.whole.select(0, 3), pass);
  step.logits = model.logits(model.final_norm(hidden));
  if (!draws) return;
  const DrawTables tables{step.whole.narrow(0, 0, 3), step.real};
  step.drawn = as_table(ops::sample_tokens(model.kernels(), tables.with(step.logits)));
}

void RecordedDecoding::fill(Step& step, const std::vector<Row>& rows) const {
  const std::int64_t batch = step.whole.size(1), width = step.pages.size(1);
  Holding dummy;
  dummy.slot = pool_.dummy_slot();
  dummy.pages = {pool_.dummy_page()};
  const Row filler{0, &dummy, {{.temperature = 0}}};
  std::vector<Draw> draws;
  const at::Tensor places = at::empty({3, batch}, at::kLong);
  std::int64_t* const place = places.mutable_data_ptr<std::int64_t>();
  std::int32_t* const pages = step.pages_host.mutable_data_ptr<std::int32_t>();
  bool has_moved = false;
  for (std::int64_t i = 0; i < batch; ++i) {
    const Row& row =
        i < static_cast<std::int64_t>(rows.size()) ? rows[static_cast<std::size_t>(i)] : filler;
    place[i] = row.token, place[batch + i] = row.held->slot,
    place[2 * batch + i] = row.held->tokens;
    draws.push_back(row.draw);
    std::int32_t* const own = pages + i * width;
    if (std::equal(row.held->pages.begin(), row.held->pages.end(), own)) continue;
    std::copy(row.held->pages.begin(), row.held->pages.end(), own);
    has_moved = true;
  }
  const c10::Device device = placed_.context.device;
  const DrawTables tables = DrawTables::of(draws);
  step.whole.copy_(device::upload(at::cat({tables.whole, places}), device));
  step.real.copy_(device::upload(tables.real, device));
  if (has_moved) step.pages.copy_(device::upload(step.pages_host.clamp_min(0), device));
}

std::vector<SampledToken> RecordedDecoding::step(const std::vector<Row>& rows,
                                                 const std::shared_ptr<const nn::AdapterSet>& set) {
  const ops::NoGradient guard;
  std::int64_t longest = 0;
  for (const Row& row : rows) longest = std::max(longest, row.held->tokens);
  const bool plain =
      std::all_of(rows.begin(), rows.end(), [](const Row& row) { return row.draw.is_plain(); });
  const auto count = static_cast<std::int64_t>(rows.size());
  const Key key{batch_bucket(count), length_bucket(longest, capacity_), set.get(), plain};
  auto entry = steps_.find(key);
  if (entry != steps_.end() && entry->second.set.lock() != set) {
    steps_.erase(entry);
    entry = steps_.end();
  }
  const bool is_new = entry == steps_.end();
  if (is_new) entry = steps_.emplace(key, make_step(key, set)).first;
  Step& step = entry->second;
  fill(step, rows);
  if (is_new) {
    // The first one queues its launches: what libraries set up on their first call is not recorded.
    run(step, key);
  } else {
    if (!step.graph) {
      step.graph = device::record(
          placed_.context.device, [&] { run(step, key); }, neighbour_);
      if (neighbour_ == nullptr) neighbour_ = step.graph.get();
    }
    step.graph->replay();
  }
  std::vector<Draw> draws;
  for (const Row& row : rows) draws.push_back(row.draw);
  if (!plain) return sample(placed_.model->kernels(), step.logits.narrow(0, 0, count), draws);
  const at::Tensor table = step.drawn.cpu();
  std::vector<SampledToken> tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(TokenTable{}.read(table, i, 0, false));
  return tokens;
}

}  // namespace heddle::rollout
