#include "rollout/recorded_decoding.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "device/copy_stream.h"
#include "device/upload.h"
#include "models/decode_step_model.h"
#include "nn/row_adapters.h"
#include "ops/autograd.h"
#include "ops/decode_step/decode_step.h"
#include "ops/moe/moe.h"

namespace heddle::rollout {
namespace {

/// Rows of RecordedDecoding::Numbers::whole.
constexpr std::int64_t kDraws = 3, kPosition = 2, kLength = 3, kToken = 4, kSlot = 5, kIsReal = 6,
                       kWhole = 7;

/// The smallest of the sizes that holds the rows. Padding rows cost little while the weights'
/// traffic dominates, a graph for every size would cost the time to record it.
std::int64_t batch_bucket(std::int64_t rows, const std::vector<std::int64_t>& batches) {
  if (!batches.empty()) return *std::lower_bound(batches.begin(), batches.end(), rows);
  for (const std::int64_t size : {1, 2, 4, 8, 16, 24, 32, 48, 64}) {
    if (rows <= size) return size;
  }
  return (rows + 31) / 32 * 32;
}

/// Copies `wanted` there unless it is what lies there; whether it did.
bool bring(const at::Tensor& there, const at::Tensor& known, const at::Tensor& wanted) {
  if (known.defined() && at::equal(known, wanted)) return false;
  there.copy_(device::upload(wanted, there.device()));
  return true;
}

AdapterTables::Sets sets_of(const std::vector<RecordedDecoding::Row>& rows) {
  AdapterTables::Sets sets;
  for (const RecordedDecoding::Row& row : rows) sets.push_back(row.set);
  return sets;
}

const nn::RowAdapters* address_of(const std::optional<nn::RowAdapters>& adapters) {
  return adapters ? &*adapters : nullptr;
}

/// Parts of a sequence beyond its end cost a launch's empty blocks.
std::int64_t length_bucket(std::int64_t longest, std::int64_t capacity) {
  std::int64_t bucket = 512;
  while (bucket <= longest) bucket *= 2;
  return std::min(bucket, capacity) - 1;
}

}  // namespace

std::string RecordedDecoding::why_not(const assembly::ModelOnRanks& placed, bool gathers) {
  if (!placed.context.device.is_cuda()) return "only CUDA devices record them";
  const comm::Mesh& mesh = placed.context.mesh;
  // Replicas have whole weights each, and a pass of theirs needs nothing of another rank.
  const std::int64_t replicas =
      mesh.size(comm::Dim::kDp) * (gathers ? mesh.size(comm::Dim::kFsdp) : 1);
  if (mesh.world_size() > replicas) return "the model is divided over ranks";
  for (const ops::KernelTable::Choice& choice : placed.model->kernels().choices()) {
    // Reference kernels of these wait for the device.
    if (choice.is_reference && (choice.op.ends_with("_decode") || choice.op == "sample_tokens" ||
                                choice.op == ops::MoeExperts::kName))
      return choice.op + " runs the reference";
  }
  return {};
}

RecordedDecoding::RecordedDecoding(assembly::ModelOnRanks& placed, CachePool& pool,
                                   std::int64_t capacity, std::vector<std::int64_t> batches)
    : placed_(placed),
      pool_(pool),
      capacity_(capacity),
      batches_(std::move(batches)),
      fingerprint_(fingerprint()) {
  const ops::NoGradient guard;
  rotary_ = placed_.model->rotary(
      at::arange(capacity_, at::TensorOptions().dtype(at::kLong).device(placed_.context.device)));
  if (AdapterTables::can_serve(placed)) tables_.emplace(placed, pool.size().slots);
}

RecordedDecoding::~RecordedDecoding() {
  // A graph stays until it has run. An error of the device has been thrown by the step that saw it.
  try {
    for (Started& step : started_) step.done.synchronize();
  } catch (const c10::Error&) {
  }
}

void RecordedDecoding::forget() {
  forget_steps();
  if (tables_) tables_->forget();
}

void RecordedDecoding::forget_steps() {
  steps_.clear();
  neighbour_ = nullptr;
}

bool RecordedDecoding::can_mix(const AdapterTables::Sets& sets) const {
  return tables_ && std::all_of(sets.begin(), sets.end(),
                                [&](const auto& set) { return tables_->takes(set); });
}

std::uint64_t RecordedDecoding::fingerprint() const {
  std::uint64_t mixed = 0;
  const auto mix = [&mixed](const nn::Parameter& parameter) {
    // A parameter that ranks divide has an address only while it is gathered.
    if (!parameter.is_held() || !parameter.has_memory()) return;
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
  const std::int64_t batch = key.batch, longest = key.longest;
  const c10::Device device = placed_.context.device;
  Step step;
  step.whole = at::empty({kWhole, batch}, at::TensorOptions().dtype(at::kLong).device(device));
  step.real = at::empty({3, batch}, at::TensorOptions().dtype(at::kDouble).device(device));
  step.temperature = at::empty({batch}, step.real.options().dtype(at::kFloat));
  step.told = at::zeros({2, batch, 3}, at::TensorOptions().dtype(at::kDouble).pinned_memory(true));
  step.pages_host = at::full({batch, pool_.pages_of(longest + 1)}, -1, at::kInt);
  step.pages = at::empty(step.pages_host.sizes(), step.pages_host.options().device(device));
  step.set = set;
  step.runs = at::empty({key.runs, 4}, at::TensorOptions().dtype(at::kInt).device(device));
  models::Model& model = *placed_.model;
  // Sets that tables do not take are told to the layers alone.
  if (key.set == nullptr && ops::can_decode_in_one_step(model.kernels())) {
    const auto adapters = adapters_of(step, key);
    if (const auto whole = models::decode_step_model(model, pool_.cache(), address_of(adapters)))
      step.exchange = ops::decode_step_exchange(model.kernels(), *whole, batch);
  }
  std::vector<std::int32_t> boundaries(static_cast<std::size_t>(batch) + 1);
  for (std::size_t i = 0; i < boundaries.size(); ++i) boundaries[i] = static_cast<std::int32_t>(i);
  step.sequences = ops::Sequences::from_host(boundaries, device);
  return step;
}

std::optional<nn::RowAdapters> RecordedDecoding::adapters_of(const Step& step,
                                                             const Key& key) const {
  if (key.rank == 0) return std::nullopt;
  return tables_->adapters(step.runs, key.rank);
}

at::Tensor RecordedDecoding::run_layers(Step& step, const Key& key,
                                        const ops::CacheRows& rows) const {
  models::Model& model = *placed_.model;
  nn::CachedSequences cached;
  cached.cache = &pool_.cache();
  cached.rows = rows;
  cached.rotary = rotary_;
  nn::Pass pass = model.cached_pass(step.sequences, std::move(cached));
  if (key.set != nullptr) pass.adapters = {{key.set, key.batch, {}}};
  const auto by_row = adapters_of(step, key);
  pass.row_adapters = address_of(by_row);
  std::vector<at::Tensor> experts;
  const at::Tensor hidden = placed_.pipeline->evaluate(model, step.whole.select(0, kToken), pass,
                                                       key.experts ? &experts : nullptr);
  if (key.experts) step.experts = OwnExperts::of(model.config(), experts);
  return model.logits(model.final_norm(hidden), pass.adapters, pass.row_adapters);
}

void RecordedDecoding::run(Step& step, const Key& key) const {
  models::Model& model = *placed_.model;
  ops::CacheRows rows;
  // The host's copies stay empty: the graph is replayed with other numbers.
  rows.slots = step.whole.select(0, kSlot);
  rows.lengths = step.whole.select(0, kLength);
  rows.pages = step.pages;
  rows.longest = key.longest;
  if (step.exchange.defined()) {
    const auto adapters = adapters_of(step, key);
    step.logits = ops::decode_step(
        model.kernels(),
        models::decode_step_model(model, pool_.cache(), address_of(adapters)).value(),
        step.whole.select(0, kToken), rows, rotary_, step.exchange);
  } else {
    step.logits = run_layers(step, key, rows);
  }
  if (!key.draws) return;
  const at::Tensor real = step.real;
  ops::sample_and_go_on(
      model.kernels(),
      {step.logits, step.temperature, real.select(0, 1), real.select(0, 2), step.whole.select(0, 0),
       step.whole.select(0, 1), step.whole.select(0, kPosition)},
      {step.whole.select(0, kToken), step.whole.narrow(0, kPosition, kLength - kPosition + 1),
       step.whole.select(0, kIsReal), step.told});
}

RecordedDecoding::Numbers RecordedDecoding::numbers_of(const std::vector<Row>& rows,
                                                       const std::vector<Draw>& draws,
                                                       std::int64_t batch) const {
  const auto count = static_cast<std::int64_t>(rows.size());
  const at::Tensor places = at::empty({kWhole - kDraws, batch}, at::kLong);
  const auto row_of = [&](std::int64_t row) {
    return places.mutable_data_ptr<std::int64_t>() + (row - kDraws) * batch;
  };
  for (std::int64_t i = 0; i < batch; ++i) {
    const bool is_real = i < count;
    const Row filler;
    const Row& row = is_real ? rows[static_cast<std::size_t>(i)] : filler;
    row_of(kLength)[i] = is_real ? row.held->tokens : 0;
    row_of(kToken)[i] = row.token;
    row_of(kSlot)[i] = is_real ? row.held->slot : pool_.dummy_slot();
    row_of(kIsReal)[i] = is_real ? 1 : 0;
  }
  DrawTables tables = DrawTables::of(draws);
  if (count < batch) {
    const DrawTables filler = DrawTables::of(
        std::vector<Draw>(static_cast<std::size_t>(batch - count), Draw{{.temperature = 0}}));
    tables = {at::cat({tables.whole, filler.whole}, 1), at::cat({tables.real, filler.real}, 1)};
  }
  return {at::cat({tables.whole, places}), tables.real};
}

void RecordedDecoding::fill_pages(Step& step, const std::vector<Row>& rows) const {
  const c10::Device device = placed_.context.device;
  const std::int64_t batch = step.whole.size(1), width = step.pages.size(1);
  const std::vector<std::int32_t> dummy = {pool_.dummy_page()};
  std::int32_t* const pages = step.pages_host.mutable_data_ptr<std::int32_t>();
  bool has_moved = false;
  for (std::int64_t i = 0; i < batch; ++i) {
    const bool is_real = i < static_cast<std::int64_t>(rows.size());
    const auto& held = is_real ? rows[static_cast<std::size_t>(i)].held->pages : dummy;
    std::int32_t* const own = pages + i * width;
    if (std::equal(held.begin(), held.end(), own)) continue;
    std::copy(held.begin(), held.end(), own);
    has_moved = true;
  }
  if (has_moved) step.pages.copy_(device::upload(step.pages_host.clamp_min(0), device));
}

RecordedDecoding::Key RecordedDecoding::key_of(const std::vector<Row>& rows,
                                               const AdapterTables::Sets& sets, bool plain) {
  std::int64_t longest = 0;
  for (const Row& row : rows) longest = std::max(longest, row.held->tokens);
  Key key{batch_bucket(static_cast<std::int64_t>(rows.size()), batches_),
          length_bucket(longest, capacity_),
          nullptr,
          0,
          0,
          plain,
          false};
  if (!can_mix(sets)) {
    key.set = sets[0].get();
    return key;
  }
  if (tables_->place(sets)) forget_steps();
  key.rank = tables_->rank_of(sets);
  return key;
}

void RecordedDecoding::start(const std::vector<Row>& rows, const std::vector<Draw>& draws,
                             bool tells_experts) {
  const ops::NoGradient guard;
  const bool plain =
      std::all_of(draws.begin(), draws.end(), [](const Draw& draw) { return draw.is_plain(); });
  const AdapterTables::Sets sets = sets_of(rows);
  Key key = key_of(rows, sets, plain);
  key.experts = tells_experts;
  at::Tensor runs;
  if (key.rank > 0) {
    runs = tables_->runs(sets, key.batch);
    key.runs = runs.size(0);
  }
  auto entry = steps_.find(key);
  if (entry != steps_.end() && key.set != nullptr && entry->second.set.lock() != sets[0]) {
    steps_.erase(entry);
    entry = steps_.end();
  }
  const bool is_new = entry == steps_.end();
  if (is_new) entry = steps_.emplace(key, make_step(key, sets[0])).first;
  Step& step = entry->second;
  fill_pages(step, rows);
  Numbers numbers = numbers_of(rows, draws, key.batch);
  bring(step.whole, step.known.whole, numbers.whole);
  if (bring(step.real, step.known.real, numbers.real))
    step.temperature.copy_(step.real.select(0, 0));
  step.known = std::move(numbers);
  if (key.rank > 0) {
    bring(step.runs, step.known_runs, runs);
    step.known_runs = runs;
  }
  queue(step, key, std::ssize(rows), plain ? std::vector<Draw>() : draws, is_new);
}

bool RecordedDecoding::can_go_on(std::int64_t tokens) const {
  return length_bucket(tokens, capacity_) == length_bucket(tokens + 1, capacity_);
}

void RecordedDecoding::start_next(const std::vector<Row>& rows) {
  const ops::NoGradient guard;
  const Key key = started_.back().key;
  Step& step = *started_.back().step;
  fill_pages(step, rows);
  queue(step, key, std::ssize(rows), {}, /*is_new=*/false);
}

void RecordedDecoding::queue(Step& step, const Key& key, std::int64_t count,
                             std::vector<Draw> draws, bool is_new) {
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
  const c10::Device device = placed_.context.device;
  started_.push_back({key, &step, count, std::move(draws), {}, {}, c10::Event(device.type())});
  Started& started = started_.back();
  if (key.experts) {
    // The step after it writes to the same place.
    const at::Tensor& chosen = step.experts.chosen;
    started.experts = {
        at::empty(chosen.sizes(), chosen.options().device(at::kCPU).pinned_memory(true)),
        step.experts.layers};
    started.experts.chosen.copy_(chosen, /*non_blocking=*/true);
  }
  started.done.record(device::current_stream(device));
  if (!key.draws) return;
  const std::int64_t* const positions =
      step.known.whole.select(0, kPosition).const_data_ptr<std::int64_t>();
  started.positions.assign(positions, positions + count);
  step.known.whole.narrow(0, kPosition, kLength - kPosition + 1)
      .add_(step.known.whole.select(0, kIsReal));
}

RecordedDecoding::Told RecordedDecoding::read() {
  const ops::NoGradient guard;
  Started started = std::move(started_.front());
  started_.pop_front();
  const Step& step = *started.step;
  Told all{{}, std::move(started.experts)};
  started.done.synchronize();
  if (!started.key.draws) {
    all.tokens =
        sample(placed_.model->kernels(), step.logits.narrow(0, 0, started.count), started.draws);
    return all;
  }
  std::int64_t* const next = step.known.whole.select(0, kToken).mutable_data_ptr<std::int64_t>();
  const at::Tensor told[] = {step.told.select(0, 0), step.told.select(0, 1)};
  for (std::int64_t i = 0; i < started.count; ++i) {
    const std::int64_t position = started.positions[static_cast<std::size_t>(i)];
    all.tokens.push_back(TokenTable{}.read(told[position % 2], i, 0, false));
    next[i] = all.tokens.back().id;
  }
  return all;
}

}  // namespace heddle::rollout
