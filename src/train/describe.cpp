#include "train/describe.h"

#include <algorithm>
#include <map>

#include "assembly/rank_memory.h"
#include "base/log.h"
#include "base/text.h"
#include "device/device.h"
#include "parallel/block_runner.h"
#include "train/parameter_groups.h"

namespace heddle::train {
namespace {

std::string kind_of(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has(".lora_")) return "LoRA adapters";
  if (is_embedding(name)) return "embedding";
  if (is_head(name)) return "head";
  if (has(".mlp.experts.")) return "routed experts";
  if (has(".linear_attn.")) return "Gated DeltaNet";
  if (has(".self_attn.")) return "attention";
  if (has(".mlp.")) return "MLP";
  return "norms";
}

/// Projections, what the mixer's operators keep and, with `all`, what they could make again:
/// convolution, gated output.
double kept_by_mixer(const models::LayerShape& layer, bool all) {
  if (const auto& dims = layer.attention) {
    const auto q = static_cast<double>(dims->num_attention_heads * dims->head_dim),
               kv = static_cast<double>(dims->num_key_value_heads * dims->head_dim),
               gate = dims->has_output_gate ? q : 0;
    return q + gate + 2 * kv + 2 * q + kv + (all ? gate : 0);
  }
  const nn::GatedDeltaNetDims& dims = *layer.gated_delta_net;
  const auto v = static_cast<double>(dims.value_dim()),
             qkv = static_cast<double>(dims.conv_channels());
  const double again = (all || dims.keeps_convolution ? qkv : 0) + (all ? v : 0);
  return qkv + v + 2.5 * v + again;
}

}  // namespace

double kept_elements(const models::LayerShape& layer, parallel::Recompute recompute,
                     bool offloads_inputs, std::int64_t tensor_ranks) {
  const auto H = static_cast<double>(layer.hidden_size);
  const bool is_off = recompute == parallel::Recompute::kOff;
  // Inputs of the stages.
  double divided = recompute == parallel::Recompute::kFull ? H : 2 * H;
  if (offloads_inputs) divided -= H;
  if (recompute != parallel::Recompute::kFull) divided += kept_by_mixer(layer, is_off);
  const bool keeps_mlp = is_off || recompute == parallel::Recompute::kElementwise;
  if (keeps_mlp) {
    const auto width = static_cast<double>(layer.active_width());
    divided += is_off ? 3 * width : 2 * width;
  }
  // Outputs of the norms are made again, but for rows that came from other ranks.
  double whole = 0;
  if (is_off || tensor_ranks > 1)
    whole = (recompute != parallel::Recompute::kFull ? H : 0) + (keeps_mlp ? H : 0);
  return whole + divided / static_cast<double>(tensor_ranks);
}

double activation_bytes_per_token(const models::Config& config,
                                  const std::vector<std::int64_t>& layers,
                                  std::int64_t element_bytes, const config::TrainSection& train,
                                  std::int64_t tensor_ranks) {
  double elements = 0;
  for (const std::int64_t i : layers) {
    elements +=
        kept_elements(config.layers[i], train.recompute.value_or(parallel::Recompute::kFull),
                      train.offload_activations, tensor_ranks);
  }
  if (train.offload_activations) {
    elements += static_cast<double>(parallel::kOffloadedInputsOnDevice * config.hidden_size) /
                static_cast<double>(tensor_ranks);
  }
  return elements * static_cast<double>(element_bytes);
}

namespace {

/// Estimate of what the micro-batches in flight on this rank leave for the backward.
double activation_bytes(const Setup& setup, const config::RunConfig& config, double micro_batches) {
  const comm::Mesh& mesh = setup.placed.context.mesh;
  config::TrainSection train = config.train;
  const double tokens =
      static_cast<double>(std::max(config.train.micro_batch_tokens, config.data.max_length)) /
      static_cast<double>(mesh.size(comm::Dim::kCp));
  const std::int64_t stage_rank = mesh.coordinate(comm::Dim::kPp);
  return tokens * setup.placed.stages.most_in_flight(stage_rank, micro_batches) *
         activation_bytes_per_token(
             setup.placed.model->config(), setup.placed.stages.layers_of(stage_rank),
             static_cast<std::int64_t>(c10::elementSize(setup.placed.context.dtype)), train,
             mesh.size(comm::Dim::kTp));
}

DataInfo describe_rows(const std::string& name, const data::Dataset& dataset) {
  DataInfo info{name, {}};
  for (const data::Dataset::File& file : dataset.files())
    info.files.emplace_back(file.path, file.report);
  std::vector<std::int64_t> lengths(dataset.lengths().begin(), dataset.lengths().end());
  std::sort(lengths.begin(), lengths.end());
  const double shares[] = {0.1, 0.5, 0.9, 0.99};
  for (std::size_t i = 0; i < info.lengths.size(); ++i) {
    info.lengths[i] =
        lengths[static_cast<std::size_t>(shares[i] * static_cast<double>(lengths.size() - 1))];
  }
  return info;
}

}  // namespace

RunInfo describe_setup(const Setup& setup, const config::RunConfig& config,
                       const Optimizer& optimizer, double micro_batches) {
  RunInfo info;
  const models::Config& model = setup.placed.model->config();
  info.model_type = model.model_type;
  std::map<std::string, std::int64_t> kinds;
  const auto count = [&](nn::Parameter& parameter) {
    kinds[kind_of(parameter.name())] += parameter.numel();
    info.total_parameters += parameter.numel();
    if (parameter.trainable()) info.trainable_parameters += parameter.numel();
  };
  setup.placed.model->visit_parameters(count);
  if (setup.placed.adapters) setup.placed.adapters->visit_parameters(count);
  for (const char* kind : {"embedding", "Gated DeltaNet", "attention", "MLP", "routed experts",
                           "norms", "head", "LoRA adapters"}) {
    if (kinds.count(kind) > 0) info.parameters.emplace_back(kind, kinds[kind]);
  }
  info.layout = setup.placed.context.mesh.describe();
  info.device = device::properties(setup.placed.context.device).name;
  info.dtype = runtime::dtype_name(setup.placed.context.dtype);
  info.ranks = setup.placed.context.mesh.world_size();
  const assembly::RankMemory memory =
      assembly::rank_memory(*setup.placed.model, setup.placed.adapters.get());
  const bool is_auto = !config.train.recompute;
  info.memory = {
      {"weights", memory.resident + memory.gathered},
      {"gradients", memory.gradients},
      {config.optim.offload ? "optimizer (on the host)" : "optimizer", optimizer.state_bytes()},
      {is_auto ? "activations (estimate, all recomputed)" : "activations (estimate)",
       static_cast<std::int64_t>(activation_bytes(setup, config, micro_batches))}};
  info.kernels = setup.placed.model->kernels().lines();
  info.undecayed = optimizer.undecayed();
  info.defaulted = model.defaulted;
  if (setup.train) {
    info.data.push_back(describe_rows("train", *setup.train));
    info.bad_examples = setup.train->report().bad_examples;
  }
  if (setup.eval) info.data.push_back(describe_rows("eval", *setup.eval));

  const bool has_mtp =
      std::any_of(setup.placed.load_report.carried.begin(), setup.placed.load_report.carried.end(),
                  [](const std::string& name) { return name.rfind("mtp.", 0) == 0; });
  if (has_mtp && config.train.method == config::Method::kFull) {
    log::warning(
        "the checkpoint has an MTP head (mtp.*), which is carried through unchanged: after full "
        "fine-tuning it no "
        "longer matches the model, and speculative decoding with it will accept fewer tokens");
  }
  return info;
}

}  // namespace heddle::train
