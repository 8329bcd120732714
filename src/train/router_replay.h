#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ckpt/tensor_io.h"
#include "comm/group.h"
#include "config/run_config.h"
#include "data/batch.h"
#include "models/config.h"
#include "ops/collectives.h"

namespace heddle::train {

/// The experts that tokens choose, recorded by step, layer and token, and so readable in any
/// layout: train.router_record, train.router_replay. Layouts round differently, and where experts
/// are nearly equal that is enough for a token to take another one; with the choices of one run
/// given to another, what remains between them is rounding alone.
///
/// step-N-rank-R.safetensors holds what the tokens of rank R chose in step N (from 1): for each
/// layer L with experts layer.L.tokens [n] int64 (data::Batch::token_numbers) and layer.L.experts
/// [n,k] int64.
class RouterReplay {
 public:
  /// Nothing if neither is wanted. Throws ConfigError: the model has no experts, there is no folder
  /// to replay.
  static std::optional<RouterReplay> open(const config::TrainSection& train,
                                          const models::Config& model, c10::Device device);

  /// Rows of hidden states: numbers [n] on the host, of which those after the first `real` belong
  /// to no sequence and are not recorded.
  struct Tokens {
    at::Tensor numbers;
    std::int64_t real;
  };

  /// All ranks together, before the first step: a run that continues after `step` records the later
  /// ones anew, and removes what it, or a run on other ranks, left of them. Throws ConfigError: a
  /// run from its beginning (0) would record to a folder that is not empty.
  void continue_after(std::int64_t step, const comm::Group& world);

  /// From 1. Reads what there is to replay. Throws DataError: nothing of this step.
  void begin_step(std::int64_t step);
  /// By layer from `first_layer` on, the experts [n,k] to replay, undefined in layers without;
  /// empty if nothing is replayed. Throws DataError: a token of which nothing is recorded.
  std::vector<at::Tensor> choices(std::int64_t first_layer, std::size_t layers,
                                  const Tokens& tokens) const;
  void add(std::int64_t first_layer, const std::vector<at::Tensor>& experts, const Tokens& tokens);
  /// Writes what was added since begin_step.
  void end_step();

 private:
  /// Choices of one layer, in one step.
  struct Choices {
    at::Tensor tokens, experts;
  };
  static Choices joined(const std::vector<Choices>& parts);
  void remove_newer_than(std::int64_t step) const;

  std::filesystem::path record_, replay_;
  std::int64_t rank_ = 0, step_ = 0, top_k_ = 0;
  std::vector<bool> sparse_;  ///< By layer
  c10::Device device_ = c10::kCPU;
  std::vector<Choices> replayed_;               ///< By layer, tokens in rising order
  std::vector<std::vector<Choices>> recorded_;  ///< By layer and micro-batch
};

/// By layer from `first_layer` on, the experts [n,k] that a batch on the host names (see
/// data::Batch::experts) for these rows, of which those after the first `real` belong to no
/// sequence; undefined in layers without.
std::vector<at::Tensor> experts_of_batch(const data::Batch& batch, ops::Rows rows,
                                         std::int64_t real, const models::Config& model,
                                         std::int64_t first_layer, std::size_t layers,
                                         c10::Device device);

}  // namespace heddle::train
