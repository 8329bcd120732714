#include "assembly/from_config.h"

#include <algorithm>
#include <utility>

#include "assembly/frozen_experts.h"
#include "base/errors.h"
#include "base/log.h"
#include "base/threads.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/hf_model.h"
#include "comm/launch_environment.h"
#include "config/config.h"
#include "config/objective.h"
#include "config/shared_entries.h"
#include "device/device.h"
#include "device/require.h"

namespace heddle::assembly {
namespace {

/// The device of one of several ranks. Those of a host take its devices in order, from the one that
/// is named; where the process is shown one alone (as by Slurm's --gpus-per-task) it is that.
/// Throws DeviceError if there is none.
c10::Device rank_device(const config::RunConfig& config,
                        const comm::LaunchEnvironment& environment) {
  config::DeviceName device = config.device.name;
  std::string why_none;
  if (device.type != config::DeviceType::kCpu && device::accelerators(why_none).size() != 1)
    device.index += environment.local_rank;
  return device::parse(config::to_string(device));
}

c10::ScalarType dtype_of(const config::RunConfig& config) {
  return runtime::parse_dtype(std::string(config::to_string(config.model.dtype)), "model.dtype");
}

/// The command and every key of the configuration but those that may differ by host.
std::vector<comm::Fact> settings_of(const std::string& command, const config::RunConfig& config) {
  std::vector<comm::Fact> facts = {{"the command", command}};
  for (auto& [key, value] : config::shared_entries(config)) facts.push_back({key, value});
  return facts;
}

/// All ranks of a job of one role do the same. Throws ConfigError where rl.*_ranks ask for another
/// number.
void require_ranks_of_role(const config::RlSection& rl, std::int64_t world) {
  const bool trains = rl.role == config::RlRole::kTrainer;
  const std::int64_t wanted = trains ? rl.trainer_ranks : rl.rollout_ranks;
  if (wanted == 0 || wanted == world) return;
  throw_error<ConfigError>(
      "rl.{} {}: with rl.role {} all ranks of the job are these, and it has {}; start it with "
      "heddle launch --nproc {}",
      trains ? "trainer_ranks" : "rollout_ranks", wanted, config::to_string(rl.role), world,
      wanted);
}

/// The part that a rank of a job is of; without a name where all ranks do the same. Throws
/// ConfigError for numbers of ranks that do not add up to the job's.
comm::JobPart part_of(const config::RunConfig& config, std::int64_t world, std::int64_t rank) {
  const config::RlSection& rl = config.rl;
  const bool is_policy = config::objective_of(config) == config::Objective::kPolicy;
  if (!is_policy || !rl.is_disaggregated()) return {};
  if (rl.has_two_jobs()) {
    require_ranks_of_role(rl, world);
    return {};
  }
  const std::int64_t trainers = rl.trainer_ranks > 0 ? rl.trainer_ranks : world - rl.rollout_ranks;
  if (trainers < 1 || trainers + rl.rollout_ranks != world) {
    throw_error<ConfigError>(
        "rl.rollout_ranks {}: with rl.trainer_ranks {} the job needs {} ranks and has {}; start it "
        "with heddle launch --nproc {}",
        rl.rollout_ranks, std::max<std::int64_t>(1, trainers),
        std::max<std::int64_t>(1, trainers) + rl.rollout_ranks, world,
        std::max<std::int64_t>(1, trainers) + rl.rollout_ranks);
  }
  if (rank < trainers) return {kTrainers, 0, trainers};
  return {kRollouts, trainers, rl.rollout_ranks};
}

}  // namespace

config::RunConfig rollout_layout(config::RunConfig config) {
  config::ParallelSection layout;
  layout.tp = config.rollout.tp;
  layout.dp.value = 0;  // what is left
  layout.timeout_s = config.parallel.timeout_s;
  config.parallel = layout;
  config.train.recompute = parallel::Recompute::kOff;
  config.train.offload_activations = false;
  return config;
}

bool only_generates(const config::RunConfig& config) {
  return config::objective_of(config) == config::Objective::kPolicy &&
         config.rl.role == config::RlRole::kRollout;
}

config::DeviceName usual_device() {
  std::string why_none;
  const std::vector<device::Accelerator> found = device::accelerators(why_none);
  return found.empty() ? config::DeviceName{} : config::parse_device(found.front().device);
}

comm::Mesh::Sizes mesh_sizes(const config::ParallelSection& p, std::int64_t world) {
  const std::int64_t given = p.tp * p.cp * p.pp * std::max<std::int64_t>(1, p.dp.value) *
                             std::max<std::int64_t>(1, p.fsdp.value);
  const auto degree = [&](const config::Degree& d, const char* key) {
    if (!d.is_auto()) return d.value;
    if (world % given != 0) {
      throw_error<ConfigError>(
          "{}: auto: {} ranks do not divide by the other degrees of parallel.*, whose product is "
          "{}",
          key, world, given);
    }
    return world / given;
  };
  return {p.tp, p.cp, degree(p.fsdp, "parallel.fsdp"), degree(p.dp, "parallel.dp"), p.pp};
}

void require_layout(const config::RunConfig& config, std::int64_t world) {
  const auto require = [](const config::ParallelSection& parallel, std::int64_t ranks) {
    [[maybe_unused]] const comm::Mesh mesh(mesh_sizes(parallel, ranks), 0, ranks, parallel.ep);
  };
  const auto ranks_of = [](const comm::Mesh::Sizes& sizes) {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes) product *= size;
    return product;
  };
  const bool is_whole = part_of(config, world, 0).name.empty();
  const std::int64_t rollouts = only_generates(config) ? world
                                : is_whole             ? 0
                                                       : config.rl.rollout_ranks;
  if (world > rollouts) {
    const std::int64_t trainers = world - rollouts;
    const std::int64_t wanted = ranks_of(mesh_sizes(config.parallel, trainers));
    if (rollouts > 0 && wanted != trainers) {
      throw_error<ConfigError>(
          "parallel.* has {} ranks that train, and of the job's {} rl.rollout_ranks {} leave {}: "
          "start it with heddle launch --nproc {}, or change parallel.*",
          wanted, world, rollouts, trainers, wanted + rollouts);
    }
    require(config.parallel, trainers);
  }
  if (rollouts > 0) require(rollout_layout(config).parallel, rollouts);
}

std::shared_ptr<comm::World> join_world(const config::RunConfig& config, const std::string& command,
                                        const std::vector<comm::Fact>& more) {
  const auto environment = comm::read_launch_environment();
  const comm::JobPart part =
      part_of(config, environment ? environment->world : 1, environment ? environment->rank : 0);
  if (!environment || environment->world == 1) return nullptr;
  auto world = comm::World::join(*environment, comm::Seconds(config.parallel.timeout_s), part);
  std::vector<comm::Fact> settings = settings_of(command, config);
  settings.insert(settings.end(), more.begin(), more.end());
  comm::announcing_failure(world.get(), [&] {
    comm::require_agreement(*world, "configuration", settings);
    require_layout(config, environment->world);
    rank_device(config, *environment);
  });
  return world;
}

runtime::Context make_context(const config::RunConfig& config, std::shared_ptr<comm::World> world) {
  runtime::Context context;
  std::int64_t threads = config.device.threads;
  if (threads == 0 && world)
    threads = std::max<std::int64_t>(1, available_cores() / world->environment().local_world);
  device::set_cpu_threads(static_cast<int>(threads));
  context.device = world ? rank_device(config, world->environment())
                         : device::parse(config::to_string(config.device.name));
  std::string why_none;
  if (!config.is_set("device.name") && device::accelerators(why_none).empty())
    log::info("device: cpu: no accelerator found (heddle doctor says why)");
  device::set_deterministic(config.train.deterministic);
  device::start(context.device);
  context.dtype = dtype_of(config);
  device::require_dtype(context.device, context.dtype, "model.dtype");
  const comm::Mesh::Sizes sizes = mesh_sizes(config.parallel, world ? world->size() : 1);
  context.mesh = comm::Mesh(sizes, std::move(world), config.parallel.ep);
  context.seed = config.train.seed;
  return context;
}

runtime::Context context_of_shapes(const config::RunConfig& config, const comm::Mesh& mesh) {
  return {c10::Device(c10::DeviceType::Meta), dtype_of(config), mesh, config.train.seed};
}

ops::KernelPolicy kernel_policy(const config::RunConfig& config) {
  ops::KernelPolicy policy;
  policy.allow_fallback = config.kernels.fallback == config::Fallback::kAllow;
  policy.named = config.kernels.choice;
  if (config.kernels.fp8) {
    policy.wishes = {{"linear", {"cuda.fp8_rowwise_from_block_4", true}},
                     {"swiglu", {"cuda.fused_fp8"}},
                     {"rms_norm", {"cuda.fused_fp8"}},
                     {"frozen_experts", {kExpertsInEightBits}}};
  }
  return policy;
}

std::int64_t stage_chunks(const config::RunConfig& config) {
  const bool is_interleaved =
      config.parallel.pp > 1 && config.parallel.pp_schedule == config::PpSchedule::kInterleaved;
  return is_interleaved ? config.parallel.pp_chunks : 1;
}

double auxiliary_coefficient(const config::RunConfig& config, const ModelConfig& model) {
  if (!model.is_moe()) return 0;
  if (config.train.router_aux_loss_coef >= 0) return config.train.router_aux_loss_coef;
  return model.output_router_logits ? model.router_aux_loss_coef : 0;
}

namespace {

/// Gives the model the rows of the embedding that an adapter brings along. Throws ModelError for an
/// adapter whose head is no longer the embedding's.
void require_tables_of(const ckpt::AdapterDirectory& adapter, ModelConfig& model) {
  model.vocab_size = std::max(model.vocab_size, ckpt::vocabulary_rows(adapter));
  if (!model.tie_word_embeddings || !ckpt::unties_head(adapter)) return;
  throw_error<ModelError>(
      "{}: gives the model a head that is not its embedding, and a run trains the two as one; "
      "merge "
      "it: heddle export BASE --adapter {} --output MERGED, and give MERGED as model.path",
      adapter.path().string(), adapter.path().string());
}

}  // namespace

NewAdapters adapters_of(const config::AdapterSection& adapter) {
  NewAdapters adapters{adapter.targets, adapter.target_parameters, {}, nullptr};
  adapters.options.rank = adapter.rank;
  adapters.options.alpha = adapter.alpha;
  adapters.options.rslora = adapter.rslora;
  adapters.options.dropout = adapter.dropout;
  adapters.options.seed = adapter.seed;
  if (adapter.shared_expert_factors)
    adapters.options.expert_factors = nn::ExpertFactors::kSharedOuter;
  if (!adapter.path.empty()) {
    adapters.start =
        std::make_shared<const ckpt::AdapterDirectory>(ckpt::AdapterDirectory::open(adapter.path));
  }
  return adapters;
}

ModelRecipe recipe_of_run(const config::RunConfig& config, ModelConfig model,
                          std::shared_ptr<const ckpt::ModelDirectory> source) {
  ModelRecipe recipe;
  if (source) {
    recipe.prefix = ckpt::text_prefix(*source, model);
    recipe.weights = Weights::kDirectory;
    recipe.source = std::move(source);
  }
  recipe.head = config.model.head;
  recipe.num_labels = config.model.num_labels > 0 ? config.model.num_labels : model.num_labels;
  recipe.purpose = Purpose::kTrain;
  if (config.train.method == config::Method::kLora) {
    config::AdapterSection section = config.adapter;
    // Shapes alone need no values.
    if (!recipe.source) section.path.clear();
    const NewAdapters adapters = adapters_of(section);
    if (adapters.start) require_tables_of(*adapters.start, model);
    recipe.adapters = adapters;
    recipe.saved_whole = config.adapter.modules_to_save;
  }
  recipe.freeze = config.train.freeze;
  recipe.kernels = kernel_policy(config);
  recipe.auxiliary_loss = auxiliary_coefficient(config, model) > 0;
  recipe.generates = !config.log.sample_prompts.empty() || !config.eval.input.empty() ||
                     config::objective_of(config) == config::Objective::kPolicy;
  recipe.context_method = config.parallel.cp_method;
  recipe.pipeline_chunks = stage_chunks(config);
  recipe.summing = config.parallel.sum_gradients;
  // Where it is auto, train::AutoRecompute goes on from full.
  recipe.recompute = config.train.recompute.value_or(parallel::Recompute::kFull);
  recipe.offload_activations = config.train.offload_activations;
  recipe.config = std::move(model);
  return recipe;
}

}  // namespace heddle::assembly
