#include "rollout/recorded_decoding.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

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

RecordedDecoding::RecordedDecoding(assembly::ModelOnRanks& placed, nn::Cache& cache,
                                   std::int64_t capacity, std::int64_t dummy_slot)
    : placed_(placed), cache_(cache), capacity_(capacity), dummy_slot_(dummy_slot) {}

void RecordedDecoding::forget() {
  steps_.clear();
  neighbour_ = nullptr;
}

RecordedDecoding::Step RecordedDecoding::make_step(std::int64_t batch) const {
  const c10::Device device = placed_.context.device;
  Step step;
  step.whole = at::empty({6, batch}, at::TensorOptions().dtype(at::kLong).device(device));
  step.real = at::empty({3, batch}, at::TensorOptions().dtype(at::kDouble).device(device));
  std::vector<std::int32_t> boundaries(static_cast<std::size_t>(batch) + 1);
  for (std::size_t i = 0; i < boundaries.size(); ++i) boundaries[i] = static_cast<std::int32_t>(i);
  step.sequences = ops::Sequences::from_host(boundaries, device);
  return step;
}

void RecordedDecoding::run(Step& step, std::int64_t longest) const {
  models::Model& model = *placed_.model;
  nn::CachedSequences cached{&cache_, {}};
  // The host's copies stay empty: the graph is replayed with other numbers.
  cached.rows.slots = step.whole.select(0, 4);
  cached.rows.lengths = step.whole.select(0, 5);
  cached.rows.longest = longest;
  const std::int64_t batch = step.whole.size(1);
  nn::Pass pass = model.cached_pass(step.sequences, std::move(cached));
  if (placed_.adapters) pass.adapters = {{placed_.adapters.get(), batch, {}}};
  const at::Tensor hidden = placed_.pipeline->evaluate(model, step.whole.select(0, 3), pass);
  const DrawTables draws{step.whole.narrow(0, 0, 3), step.real};
  step.drawn = as_table(
      ops::sample_tokens(model.kernels(), draws.with(model.logits(model.final_norm(hidden)))));
}

std::vector<SampledToken> RecordedDecoding::step(const std::vector<Row>& rows) {
  const ops::NoGradient guard;
  std::int64_t longest = 0;
  for (const Row& row : rows) longest = std::max(longest, row.length);
  const std::int64_t batch = batch_bucket(static_cast<std::int64_t>(rows.size())),
                     bound = length_bucket(longest, capacity_);
  const auto [entry, is_new] = steps_.try_emplace({batch, bound});
  Step& step = entry->second;
  if (is_new) step = make_step(batch);

  std::vector<Draw> draws(static_cast<std::size_t>(batch));
  const at::Tensor places = at::empty({3, batch}, at::kLong);
  std::int64_t* const place = places.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < batch; ++i) {
    Row row{0, dummy_slot_, 0, {{.temperature = 0}, 0}};
    if (i < static_cast<std::int64_t>(rows.size())) row = rows[static_cast<std::size_t>(i)];
    place[i] = row.token, place[batch + i] = row.slot, place[2 * batch + i] = row.length;
    draws[static_cast<std::size_t>(i)] = row.draw;
  }
  const DrawTables tables = DrawTables::of(draws);
  const c10::Device device = placed_.context.device;
  step.whole.copy_(device::upload(at::cat({tables.whole, places}), device));
  step.real.copy_(device::upload(tables.real, device));

  if (is_new) {
    // The first one queues its launches: what libraries set up on their first call is not recorded.
    run(step, bound);
  } else {
    if (!step.graph) {
      step.graph = device::record(
          device, [&] { run(step, bound); }, neighbour_);
      if (neighbour_ == nullptr) neighbour_ = step.graph.get();
    }
    step.graph->replay();
  }
  return from_table(step.drawn, rows.size());
}

}  // namespace heddle::rollout
