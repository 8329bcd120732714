#pragma once

#include <memory>
#include <string>
#include <vector>

#include "assembly/recipe.h"
#include "comm/agreement.h"
#include "comm/mesh.h"
#include "comm/world.h"
#include "config/run_config.h"
#include "runtime/context.h"

/// A run's configuration of ranks, devices and model. This is the only source of this layer
/// that knows config::RunConfig.
namespace heddle::assembly {

/// Device that a command uses when it is told none: the first accelerator that this build can use
/// and the machine has, else the CPU.
config::DeviceName usual_device();

/// The parts of a job in which other ranks generate than train.
inline constexpr const char* kTrainers = "trainers";
inline constexpr const char* kRollouts = "rollouts";
/// The configuration with the layout of the ranks that only generate.
config::RunConfig rollout_layout(config::RunConfig config);

/// No rank of the job trains: rl.role is rollout.
bool only_generates(const config::RunConfig& config);

/// Degrees of the mesh for `world` ranks, `auto` resolved. Throws ConfigError if it cannot be.
comm::Mesh::Sizes mesh_sizes(const config::ParallelSection& parallel, std::int64_t world);

/// Throws ConfigError unless parallel.* (and rl.*_ranks, rollout.tp) fit a job of `world` ranks.
void require_layout(const config::RunConfig& config, std::int64_t world);

/// Meets the other ranks if a launcher started several; null for one rank, which needs no launcher.
/// `more`: settings of the command besides the configuration. Throws ConfigError on all ranks if
/// their settings differ or parallel.* does not fit their number.
/// With rl.rollout_ranks the trainers meet, and the rollouts: World::part() says which this is. A
/// job of rl.role trainer or rollout has no parts.
std::shared_ptr<comm::World> join_world(const config::RunConfig& config,
                                        const std::string& command = "train",
                                        const std::vector<comm::Fact>& more = {});

/// The context of one rank; sets the CPU threads and starts the device.
runtime::Context make_context(const config::RunConfig& config,
                              std::shared_ptr<comm::World> world = nullptr);
/// A rank without device or processes: tensors have shapes alone.
runtime::Context context_of_shapes(const config::RunConfig& config,
                                   const comm::Mesh& mesh = comm::Mesh::single());

/// The kernels that the configuration allows.
ops::KernelPolicy kernel_policy(const config::RunConfig& config);
/// Stages on each rank of the pipeline.
std::int64_t stage_chunks(const config::RunConfig& config);
/// Weight of the experts' load-balancing loss in a run: train.router_aux_loss_coef; if that is -1
/// the checkpoint's router_aux_loss_coef where config.json asks for the loss
/// (output_router_logits), else 0; 0 without experts.
double auxiliary_coefficient(const config::RunConfig& config, const ModelConfig& model);

/// The adapters of a run. Opens adapter.path; throws ModelError.
NewAdapters adapters_of(const config::AdapterSection& adapter);

/// The model that a run trains. With a `source` its weights come from there; without one
/// `weights` is the caller's to choose.
ModelRecipe recipe_of_run(const config::RunConfig& config, ModelConfig model,
                          std::shared_ptr<const ckpt::ModelDirectory> source = nullptr);

}  // namespace heddle::assembly
