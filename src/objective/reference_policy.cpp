#include "objective/reference_policy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "assembly/model_units.h"
#include "assembly/same_weights.h"
#include "base/hash.h"
#include "base/log.h"
#include "ckpt/safetensors.h"
#include "ckpt/tensor_io.h"
#include "device/upload.h"
#include "objective/language_model.h"
#include "objective/sequence_sums.h"
#include "ops/autograd.h"

namespace heddle::objective {
namespace {

/// Key of weights, type and rows, on which the log-probabilities depend.
std::string key_of(const assembly::ModelOnRanks& placed, const data::Dataset& rows) {
  hash::Hasher hasher;
  if (placed.source) {
    for (const comm::Fact& fact : assembly::facts_of(*placed.source)) hasher.add(fact.value);
  }
  if (placed.start) {
    for (const comm::Fact& fact : assembly::facts_of(*placed.start)) hasher.add(fact.value);
  }
  return hasher.add(runtime::dtype_name(placed.context.dtype)).add(rows.key()).hex();
}

/// The [rows, 2] kept under a key; undefined if the file is not there, is not whole, or holds
/// others.
at::Tensor read_kept(const std::filesystem::path& file, const std::string& name,
                     const std::string& key, std::int64_t rows) {
  if (!std::filesystem::exists(file)) return {};
  try {
    const ckpt::SafetensorsFile kept(file);
    const auto found = kept.metadata().find("key");
    if (found == kept.metadata().end() || found->second != key) return {};
    at::Tensor table = ckpt::read_tensor(kept.at(name));
    return table.dim() == 2 && table.size(0) == rows && table.size(1) == 2 ? table : at::Tensor();
  } catch (const Error& error) {
    log::warning("{}; computing the log-probabilities again", error.what());
    return {};
  }
}

void write_kept(const std::filesystem::path& file, const std::string& name, const std::string& key,
                const at::Tensor& table) {
  ckpt::SafetensorsWriter writer(
      file, {{.name = name, .dtype = ckpt::Dtype::kF64, .shape = table.sizes().vec()}},
      {{"key", key}});
  writer.append(name, {static_cast<const std::byte*>(table.const_data_ptr()), table.nbytes()});
  writer.commit();
}

}  // namespace

ReferencePolicy::ReferencePolicy(const assembly::ModelOnRanks& placed, ReferenceOptions options)
    : placed_(placed),
      options_(std::move(options)),
      is_base_model_(placed.adapters != nullptr && !placed.start && placed.saved_whole.empty()) {}

void ReferencePolicy::prepare(const RunRows& rows) {
  if (is_base_model_) return;
  train_ = read_or_compute("train", rows.train);
  if (rows.eval) held_out_ = read_or_compute("eval", rows.eval);
}

at::Tensor ReferencePolicy::read_or_compute(
    const std::string& name, const std::shared_ptr<const data::Dataset>& rows) const {
  const comm::Group world = placed_.context.mesh.world_group();
  const std::filesystem::path file =
      options_.directory / fmt::format("reference_logprobs_{}.safetensors", name);
  const std::string key = key_of(placed_, *rows);
  at::Tensor table;
  if (world.rank() == 0) table = read_kept(file, name, key, rows->rows());
  if (world.any(table.defined())) {
    if (!table.defined()) table = at::zeros({rows->rows(), 2}, at::kDouble);
    world.all_reduce_sum(table);
    return table;
  }
  if (world.rank() == 0) {
    log::info("train.objective dpo: log-probabilities of the {} pairs of data.{} before training",
              rows->rows(), name);
  }
  table = compute_all(rows);
  if (world.rank() == 0) write_kept(file, name, key, table);
  return table;
}

at::Tensor ReferencePolicy::compute_all(const std::shared_ptr<const data::Dataset>& rows) const {
  const comm::Mesh& mesh = placed_.context.mesh;
  data::EvaluationLoader loader(rows, {.micro_batch_tokens = options_.micro_batch_tokens,
                                       .rank = static_cast<int>(mesh.data_rank()),
                                       .world = static_cast<int>(mesh.data_size())});
  const parallel::Acquired ends = assembly::acquire_ends(placed_.sharding.get(), *placed_.model);
  at::Tensor table = at::zeros({rows->rows(), 2}, at::kDouble);
  auto* const entries = table.mutable_data_ptr<double>();
  const bool tells = mesh.coordinate(comm::Dim::kTp) == 0 && mesh.coordinate(comm::Dim::kCp) == 0;
  while (const auto batch = loader.next()) {
    const at::Tensor device_sums = compute(*batch);
    if (!tells || !device_sums.defined()) continue;
    const at::Tensor sums = device_sums.to(at::kCPU, at::kDouble);
    for (std::size_t s = 0; s < batch->row_ids.size(); ++s)
      entries[2 * batch->row_ids[s] + batch->text_of_row[s]] = sums.const_data_ptr<double>()[s];
  }
  mesh.world_group().all_reduce_sum(table);
  return table;
}

at::Tensor ReferencePolicy::compute(const data::Batch& whole) const {
  const ops::NoGradient guard;
  Model& model = *placed_.model;
  // Without a set of adapters: the base model.
  const LocalBatch batch(model, whole, placed_.start ? placed_.adapters.get() : nullptr);
  const at::Tensor hidden = evaluate_hidden(model, *placed_.pipeline, batch);
  if (!hidden.defined()) return {};
  const LossRows rows(model, batch.host, 1);
  const TokenLogprobs logprobs(model, hidden, rows, {});
  return sums_of_rows(placed_.context, batch, rows, whole.real_sequences).of(logprobs.values());
}

at::Tensor ReferencePolicy::logprobs(const data::Batch& whole, bool is_held_out) const {
  if (is_base_model_) {
    const parallel::Acquired ends = assembly::acquire_ends(placed_.sharding.get(), *placed_.model);
    return compute(whole);
  }
  if (!placed_.pipeline->has_last_stage()) return {};
  const at::Tensor& table = is_held_out ? held_out_ : train_;
  const auto* entries = table.const_data_ptr<double>();
  at::Tensor sums = at::empty({std::ssize(whole.row_ids)}, at::kDouble);
  for (std::size_t s = 0; s < whole.row_ids.size(); ++s) {
    sums.mutable_data_ptr<double>()[s] = entries[2 * whole.row_ids[s] + whole.text_of_row[s]];
  }
  return device::upload(sums.to(sum_dtype(placed_.context)), placed_.context.device);
}

}  // namespace heddle::objective
