#include "train/router_replay.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "base/errors.h"
#include "base/files.h"
#include "ckpt/safetensors.h"
#include "device/upload.h"

namespace heddle::train {
namespace {

std::string file_prefix(std::int64_t step) { return fmt::format("step-{}-rank-", step); }
std::string tokens_name(std::size_t layer) { return fmt::format("layer.{}.tokens", layer); }
std::string experts_name(std::size_t layer) { return fmt::format("layer.{}.experts", layer); }

}  // namespace

RouterReplay::Choices RouterReplay::joined(const std::vector<Choices>& parts) {
  std::vector<at::Tensor> tokens, experts;
  for (const Choices& part : parts) {
    tokens.push_back(part.tokens);
    experts.push_back(part.experts);
  }
  return {at::cat(tokens), at::cat(experts)};
}

std::optional<RouterReplay> RouterReplay::open(const config::TrainSection& train,
                                               const models::Config& model, c10::Device device) {
  if (train.router_record.empty() && train.router_replay.empty()) return std::nullopt;
  const char* key = train.router_record.empty() ? "train.router_replay" : "train.router_record";
  RouterReplay router;
  router.record_ = train.router_record;
  router.replay_ = train.router_replay;
  router.sparse_ = model.sparse_layers();
  router.device_ = device;
  if (std::find(router.sparse_.begin(), router.sparse_.end(), true) == router.sparse_.end())
    throw_error<ConfigError>("{}: this model has no experts", key);
  router.top_k_ = model.moe()->num_experts_per_tok;
  if (!router.replay_.empty() && !std::filesystem::is_directory(router.replay_))
    throw_error<ConfigError>("train.router_replay: {} is no folder", train.router_replay);
  return router;
}

void RouterReplay::remove_newer_than(std::int64_t step) const {
  std::vector<std::filesystem::path> newer;
  for (const auto& entry : std::filesystem::directory_iterator(record_)) {
    const std::string name = entry.path().filename().string();
    std::int64_t recorded = 0;
    if (std::sscanf(name.c_str(), "step-%" SCNd64 "-rank-", &recorded) == 1 && recorded > step)
      newer.push_back(entry.path());
  }
  for (const std::filesystem::path& path : newer) std::filesystem::remove(path);
}

void RouterReplay::continue_after(std::int64_t step, const comm::Group& world) {
  rank_ = world.rank();
  if (record_.empty()) return;
  files::make_writable_directory(record_);
  // Other ranks' files of an earlier run would be read with this one's.
  if (world.any(step == 0 && !std::filesystem::is_empty(record_)))
    throw_error<ConfigError>("train.router_record: {} is not empty", record_.string());
  if (rank_ == 0) remove_newer_than(step);
  world.barrier();
}

void RouterReplay::begin_step(std::int64_t step) {
  step_ = step;
  recorded_.assign(sparse_.size(), {});
  if (replay_.empty()) return;
  std::vector<std::vector<Choices>> found(sparse_.size());
  bool is_there = false;
  for (const auto& entry : std::filesystem::directory_iterator(replay_)) {
    if (!entry.path().filename().string().starts_with(file_prefix(step))) continue;
    is_there = true;
    const ckpt::SafetensorsFile file(entry.path());
    for (std::size_t layer = 0; layer < sparse_.size(); ++layer) {
      if (file.find(tokens_name(layer)) == nullptr) continue;
      found[layer].push_back({ckpt::read_tensor(file.at(tokens_name(layer))),
                              ckpt::read_tensor(file.at(experts_name(layer)))});
    }
  }
  if (!is_there) throw_error<DataError>("{} has nothing of step {}", replay_.string(), step);
  replayed_.assign(sparse_.size(), {});
  for (std::size_t layer = 0; layer < sparse_.size(); ++layer) {
    if (found[layer].empty()) continue;
    const Choices all = joined(found[layer]);
    const auto [sorted, order] = at::sort(all.tokens);
    replayed_[layer] = {sorted, at::index_select(all.experts, 0, order)};
  }
}

std::vector<at::Tensor> RouterReplay::choices(std::int64_t first_layer, std::size_t layers,
                                              const Tokens& tokens) const {
  if (replay_.empty()) return {};
  std::vector<at::Tensor> result(layers);
  const at::Tensor real = tokens.numbers.narrow(0, 0, tokens.real);
  for (std::size_t i = 0; i < layers; ++i) {
    const std::size_t layer = static_cast<std::size_t>(first_layer) + i;
    if (!sparse_[layer]) continue;
    const Choices& all = replayed_[layer];
    const std::int64_t count = all.tokens.defined() ? all.tokens.numel() : 0;
    const at::Tensor place =
        count > 0 ? at::searchsorted(all.tokens, real).clamp_max(count - 1) : at::Tensor();
    if (count == 0 || all.experts.size(1) != top_k_ ||
        !at::index_select(all.tokens, 0, place).equal(real)) {
      throw_error<DataError>(
          "{} lacks experts of layer {} for tokens of step {}: it was recorded with other data or "
          "in another order",
          replay_.string(), layer, step_);
    }
    // Rows of no sequence go to the first experts: their values are read nowhere.
    const at::Tensor others =
        at::arange(top_k_, at::kLong).expand({tokens.numbers.numel() - tokens.real, -1});
    result[i] = device::upload(at::cat({at::index_select(all.experts, 0, place), others}), device_);
  }
  return result;
}

void RouterReplay::add(std::int64_t first_layer, const std::vector<at::Tensor>& experts,
                       const Tokens& tokens) {
  if (record_.empty()) return;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (!experts[i].defined()) continue;
    recorded_[static_cast<std::size_t>(first_layer) + i].push_back(
        {tokens.numbers.narrow(0, 0, tokens.real), experts[i].narrow(0, 0, tokens.real).cpu()});
  }
}

void RouterReplay::end_step() {
  if (record_.empty()) return;
  std::vector<ckpt::NamedTensor> tensors;
  for (std::size_t layer = 0; layer < recorded_.size(); ++layer) {
    if (recorded_[layer].empty()) continue;
    const Choices all = joined(recorded_[layer]);
    tensors.push_back({tokens_name(layer), all.tokens});
    tensors.push_back({experts_name(layer), all.experts});
  }
  ckpt::write_tensors(record_ / fmt::format("{}{}.safetensors", file_prefix(step_), rank_),
                      tensors);
}

std::vector<at::Tensor> experts_of_batch(const data::Batch& batch, ops::Rows rows,
                                         std::int64_t real, const models::Config& model,
                                         std::int64_t first_layer, std::size_t layers,
                                         c10::Device device) {
  const std::vector<bool> sparse = model.sparse_layers();
  const std::int64_t k = model.moe()->num_experts_per_tok;
  const auto first = sparse.begin() + first_layer;
  const auto count = [](auto begin, auto end) { return std::count(begin, end, true); };
  const std::int64_t before = count(sparse.begin(), first),
                     here = count(first, first + static_cast<std::ptrdiff_t>(layers));
  std::vector<at::Tensor> result(layers);
  if (here == 0) return result;
  at::Tensor table = batch.experts.narrow(1, rows.first, rows.count)
                         .narrow(0, before * k, here * k)
                         .to(at::kLong)
                         .reshape({here, k, rows.count})
                         .transpose(1, 2)
                         .clone();  // [layers, n, k]
  // Rows of no sequence go to the first experts: their values are read nowhere.
  table.narrow(1, real, rows.count - real).copy_(at::arange(k, at::kLong));
  table = device::upload(table.contiguous(), device);
  std::int64_t next = 0;
  for (std::size_t i = 0; i < layers; ++i) {
    if (first[static_cast<std::ptrdiff_t>(i)]) result[i] = table.select(0, next++);
  }
  return result;
}

}  // namespace heddle::train
