#include "plan/work.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "assembly/from_config.h"
#include "assembly/frozen_experts.h"
#include "config/objective.h"
#include "config/policy_versions.h"
#include "ops/linear/linear.h"
#include "ops/optimizer_step/eight_bit.h"
#include "plan/parameters.h"
#include "runtime/context.h"
#include "train/idle_ranks.h"

namespace heddle::plan {
namespace {

using models::Config;
using models::Cut;
using models::LayerShape;

void add_attention(LayerWork& work, const nn::AttentionDims& dims) {
  const double q = as_double(dims.num_attention_heads * dims.head_dim),
               kv = as_double(dims.num_key_value_heads * dims.head_dim);
  work.attention = 6 * q;
  // Norm and rotation of q and k: in and out, backward the input besides.
  work.forward += 2 * (q + kv);
  work.backward += 3 * (q + kv);
  if (!dims.has_output_gate) return;
  // Output gate: o and gate in, y out; o, gate and dy in, two gradients out.
  work.forward += 3 * q;
  work.backward += 5 * q;
  work.again += q;
}

void add_gated_delta_net(LayerWork& work, const nn::GatedDeltaNetDims& dims) {
  const double v = as_double(dims.value_dim()), conv = as_double(dims.conv_channels());
  work.delta_rule = 12 * v * as_double(dims.key_head_dim);
  // Convolution: x in, y out; backward x and dy in, dx out. Gated norm: as an output gate.
  work.forward += 2 * conv + 3 * v;
  work.backward += 3 * conv + 5 * v;
  work.again += (dims.keeps_convolution ? 0 : 2 * conv) + v;
}

void add_mlp(LayerWork& work, const LayerShape& layer) {
  const double F = as_double(layer.dense_width()), H = as_double(layer.hidden_size);
  // SwiGLU: gate and up in, y out; gate, up and dy in, two gradients out.
  work.forward += 3 * F;
  work.backward += 5 * F;
  work.again += F;
  if (!layer.moe) return;
  const double copies = as_double(layer.moe->num_experts_per_tok);
  const double width = copies * as_double(layer.moe->moe_intermediate_size);
  work.experts = 3 * H * width;
  work.products -= work.experts;
  // Rows to experts and back, weighted.
  work.forward += 3 * width + (2 * copies + copies + 1) * H;
  work.backward += 5 * width + 2 * (2 * copies + copies + 1) * H;
}

/// LoRA reads the input of a group of products twice and what its products make once, or what a
/// product of divided inputs takes twice and what it makes once.
void add_adapters(LayerWork& work, const LayerShape& layer) {
  std::string group;
  for (const models::Product& product : layer.products()) {
    const double in = as_double(product.in), out = as_double(product.out);
    if (product.cut.along == Cut::Along::kIn) {
      work.adapters += 2 * in;
      work.adapters_whole += out;
    } else if (product.cut.along == Cut::Along::kOut) {
      if (product.group != group) work.adapters_whole += 2 * in;
      work.adapters += out;
    }
    group = product.group;
  }
}

}  // namespace

LayerWork layer_work(const LayerShape& layer) {
  const double H = as_double(layer.hidden_size);
  LayerWork work;
  work.products = as_double(layer.matmul_weights());
  // Two norms with the residual sum: h and the branch in, h and the normalised out; backward three
  // in, one out.
  work.forward = 8 * H;
  work.backward = 8 * H;
  // The backward of a norm, SwiGLU or gate writes its intermediates; the convolution runs again.
  work.again = 2 * H;
  if (layer.attention) add_attention(work, *layer.attention);
  if (layer.gated_delta_net) add_gated_delta_net(work, *layer.gated_delta_net);
  add_mlp(work, layer);
  add_adapters(work, layer);
  return work;
}

namespace {

bool is_policy(const config::RunConfig& config) {
  return config::objective_of(config) == config::Objective::kPolicy;
}

double state_bytes(config::StateDtype dtype, const Step& step) {
  switch (dtype) {
    case config::StateDtype::kFloat32:
      return 2 * step.wide + (step.element < 4 ? 4 : 0);
    case config::StateDtype::kBFloat16:
      return 4;
    case config::StateDtype::kInt8:
      return 2 * (1 + 4 / as_double(ops::eight_bit::kBlock));
  }
  return 0;
}

/// A trainer and its rollouts are several ranks of one job.
bool has_rollouts_in_its_job(const config::RunConfig& config) {
  return is_policy(config) && config.rl.rollout_ranks > 0 && !config.rl.has_two_jobs();
}

c10::ScalarType dtype_of(const config::RunConfig& config) {
  return runtime::parse_dtype(std::string(config::to_string(config.model.dtype)), "model.dtype");
}

}  // namespace

bool keeps_experts_in_eight_bits(const config::RunConfig& config, const Config& model,
                                 bool is_job_of_several_ranks) {
  if (!model.is_moe() || config.train.method != config::Method::kLora ||
      config.model.dtype != config::Dtype::kBFloat16 || has_rollouts_in_its_job(config))
    return false;
  const auto named = config.kernels.choice.find("frozen_experts");
  if (named != config.kernels.choice.end()) return named->second != assembly::kExpertsAsLoaded;
  return config.kernels.fp8 &&
         assembly::may_keep_frozen_experts(assembly::recipe_of_run(config, model),
                                           comm::Mesh::single(), is_job_of_several_ranks);
}

namespace {

/// It has the policy's adapters on the base model, and nothing that is trained whole beside them
/// (rl/critic.cpp).
bool critic_keeps_experts_in_eight_bits(config::RunConfig config, const Config& model) {
  config.adapter.modules_to_save.clear();
  return keeps_experts_in_eight_bits(config, model, /*is_job_of_several_ranks=*/false);
}

/// Follows from the name of the kernel of linear layers that the configuration asks for.
std::optional<std::int64_t> first_eight_bit_block(const config::RunConfig& config) {
  const ops::KernelPolicy policy = assembly::kernel_policy(config);
  std::string kernel;
  if (const auto wish = policy.wishes.find(ops::Linear::kName); wish != policy.wishes.end())
    kernel = wish->second.kernel;
  if (const auto named = policy.named.find(ops::Linear::kName); named != policy.named.end())
    kernel = named->second;
  constexpr std::string_view kFromBlock = "cuda.fp8_rowwise_from_block_";
  std::int64_t first = 0;
  if (kernel.starts_with(kFromBlock))
    std::from_chars(kernel.data() + kFromBlock.size(), kernel.data() + kernel.size(), first);
  else if (kernel != "cuda.fp8_rowwise_or_bf16")
    return std::nullopt;
  return first;
}

/// Slots besides those of sequences, of an engine for requests without turns
/// (rollout::EngineOptions).
constexpr double kKeptStates = 4;
/// Shares of the free memory that caches take where rollout.memory_fraction is 0.
constexpr double kFractionBesideTraining = 0.5, kFractionAlone = 0.9;

void add_policy(Step& step, const config::RunConfig& config, const Config& model) {
  const config::RlSection& rl = config.rl;
  const config::RolloutSection& rollout = config.rollout;
  step.has_critic = rl.has_critic();
  step.has_eight_bit_critic = step.has_critic && critic_keeps_experts_in_eight_bits(config, model);
  const config::RlReference& reference = rl.reference;
  const bool goes_on = reference.kl_coef > 0 && !config.adapter.path.empty();
  step.has_kept_reference = reference.follows() || goes_on;
  // With LoRA the base model is there.
  const bool is_base_model = step.is_lora && config.adapter.modules_to_save.empty();
  step.has_frozen_reference = reference.kl_coef > 0 && !step.has_kept_reference && !is_base_model;
  // Completions that may be answered keep their states. Those of tasks are not known here.
  const bool may_answer = rl.reward.verifiers.empty();
  const bool is_here = !rl.is_disaggregated();
  const double usual = is_here ? kFractionBesideTraining : kFractionAlone;
  const double asked = rollout.caches.memory_fraction;
  step.generation = {
      .is_here = is_here,
      .gathers_weights = rollout.gather_weights,
      .releases_caches = rollout.release_memory,
      .sequences = as_double(rollout.max_sequences),
      .capacity = as_double(config.data.max_length),
      .page = as_double(rollout.caches.kv_page),
      .kept_states = may_answer ? as_double(rollout.max_sequences) : kKeptStates,
      .state_element = rollout.caches.state_dtype == rollout::StateDtype::kBFloat16 ? 2 : step.wide,
      .memory_fraction = asked > 0 ? asked : usual,
      .tp = as_double(rollout.tp),
      // Another job's number of ranks is not known.
      .replicas = std::max(1.0, as_double(rl.rollout_ranks / rollout.tp)),
      .pinned_sets = as_double(config::pinned_sets_of(config))};
}

}  // namespace

void require_frozen_experts(const config::RunConfig& config, const Config& model,
                            std::int64_t world) {
  if (!config.kernels.choice.contains("frozen_experts")) return;
  assembly::ModelRecipe recipe = assembly::recipe_of_run(config, model);
  if (assembly::only_generates(config)) recipe.purpose = assembly::Purpose::kGenerate;
  const comm::Mesh mesh(assembly::mesh_sizes(config.parallel, world), 0, world, config.parallel.ep);
  assembly::require_frozen_experts(recipe, dtype_of(config), mesh,
                                   world > 1 || has_rollouts_in_its_job(config));
}

void require_merged_adapter(const config::RunConfig& config, const Step& step,
                            const comm::Mesh& training) {
  if (step.merged.empty() || !config.rl.is_disaggregated())
    return assembly::require_whole(step.merged, training);
  const config::ParallelSection layout = assembly::rollout_layout(config).parallel;
  // Another job's number of ranks is not known.
  const std::int64_t ranks = std::max(config.rl.rollout_ranks, layout.tp);
  assembly::require_whole(step.merged,
                          comm::Mesh(assembly::mesh_sizes(layout, ranks), 0, ranks, layout.ep));
}

Step describe_step(const config::RunConfig& config, const Config& model) {
  Step step;
  step.model = model;
  for (const LayerShape& layer : model.layers) step.layers.push_back(layer_work(layer));
  step.is_lora = config.train.method == config::Method::kLora;
  count_parameters(step, config);
  step.length = as_double(config.data.max_length);
  step.rows = as_double(train::rows_of_step(config).global_batch_size);
  step.micro_batch_tokens =
      as_double(std::max(config.train.micro_batch_tokens, config.data.max_length));
  const c10::ScalarType type = dtype_of(config);
  step.element = as_double(static_cast<std::int64_t>(c10::elementSize(type)));
  step.wide = type == c10::ScalarType::Double ? 8 : 4;
  const bool is_narrow = config.optim.grad_dtype == config::Dtype::kBFloat16 &&
                         config.model.dtype == config::Dtype::kBFloat16;
  step.gradient = is_narrow ? 2 : step.wide;
  step.state = state_bytes(config.optim.state_dtype, step);
  step.offloads_state = config.optim.offload;
  step.offloads_inputs = config.train.offload_activations;
  step.first_eight_bit_block = first_eight_bit_block(config);
  step.has_eight_bit_experts = keeps_experts_in_eight_bits(config, model, false);
  step.has_eight_bit_experts_on_ranks = keeps_experts_in_eight_bits(config, model, true);
  if (is_policy(config)) add_policy(step, config, model);
  return step;
}

}  // namespace heddle::plan
