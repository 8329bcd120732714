#include "train/setup.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "base/text.h"
#include "base/threads.h"
#include "ckpt/config_bounds.h"
#include "comm/launch_environment.h"
#include "config/config.h"
#include "device/device.h"
#include "device/require.h"
#include "ops/linear/linear.h"
#include "parallel/layout.h"
#include "train/auxiliary_loss.h"
#include "train/gdn_path.h"
#include "train/model_units.h"
#include "train/same_inputs.h"
#include "train/trainable.h"
#include "train/vocabulary.h"

namespace heddle::train {
namespace {

using models::qwen3_5::Head;

Head head_of(config::Head head) {
  switch (head) {
    case config::Head::kLanguageModel:
      return Head::kLanguageModel;
    case config::Head::kClassify:
      return Head::kClassify;
    case config::Head::kEmbed:
      return Head::kEmbed;
  }
  return Head::kLanguageModel;
}

/// What the chosen kernels' tiles must fit into; 0 (no limit) on the CPU, and where tensors have
/// shapes alone.
std::int64_t on_chip_limit(c10::Device device) {
  return device.is_cpu() || device.is_meta() ? 0 : device::properties(device, 16).on_chip_bytes;
}

models::qwen3_5::Config read_model_config(const ckpt::ModelDirectory& source) {
  models::qwen3_5::Config config =
      models::qwen3_5::parse_config(source.config(), (source.path() / "config.json").string());
  ckpt::require_size_of_files(config, source);
  return config;
}

/// Says what runs slower than it could, for a kernel that does not fit.
void warn_of_losses(const models::qwen3_5::Model& model) {
  for (const std::string& loss : model.kernels().losses()) log::warning("{}", loss);
}

void warn_of_slow_rank(const models::qwen3_5::Model& model, std::int64_t rank) {
  const ops::Linear::Functions& functions = model.kernels().get<ops::Linear>();
  if (functions.reads_once == nullptr || functions.reads_once(rank)) return;
  log::warning(
      "adapter.rank {}: the backward of the adapters reads each output gradient twice, where "
      "multiples of 8 up to 32 have a kernel that reads it once",
      rank);
}

/// Names what a kernel of linear layers that computes in less than the model's type leaves in it.
void warn_of_wide_layers(models::qwen3_5::Model& model) {
  const ops::Linear::Functions& functions = model.kernels().get<ops::Linear>();
  if (functions.is_narrow == nullptr) return;
  std::set<std::string> wide;
  model.visit_linears([&](nn::Linear& linear) {
    if (&linear == model.lm_head() ||
        functions.is_narrow(linear.out_features(), linear.in_features()))
      return;
    const std::string& name = linear.weight().name();
    const std::size_t layer = name.find("layers.");
    wide.insert(
        fmt::format("{} [{}, {}]",
                    layer == std::string::npos ? name : name.substr(name.find('.', layer + 7) + 1),
                    linear.out_features(), linear.in_features()));
  });
  log::warning(
      "kernels.linear: in the model's type stay the gradients of weights, the products of "
      "adapters, the language-model head, micro-batches below {} tokens, and {}",
      functions.narrow_rows,
      wide.empty() ? "no layer" : fmt::format("the layers {}", fmt::join(wide, ", ")));
}

}  // namespace

ops::ContextMethod context_method(const config::RunConfig& config) {
  return config.parallel.cp_method == config::CpMethod::kUlysses ? ops::ContextMethod::kUlysses
                                                                 : ops::ContextMethod::kState;
}

std::int64_t stage_chunks(const config::RunConfig& config) {
  const bool is_interleaved =
      config.parallel.pp > 1 && config.parallel.pp_schedule == config::PpSchedule::kInterleaved;
  return is_interleaved ? config.parallel.pp_chunks : 1;
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

config::DeviceName usual_device() {
  std::string why_none;
  const std::vector<device::Accelerator> found = device::accelerators(why_none);
  return found.empty() ? config::DeviceName{} : config::parse_device(found.front().device);
}

std::shared_ptr<comm::World> join_world(const config::RunConfig& config, const std::string& command,
                                        const std::vector<comm::Fact>& more) {
  const auto environment = comm::read_launch_environment();
  if (!environment || environment->world == 1) return nullptr;
  auto world = comm::World::join(*environment, comm::Seconds(config.parallel.timeout_s));
  std::vector<comm::Fact> settings = settings_of(command, config);
  settings.insert(settings.end(), more.begin(), more.end());
  comm::require_agreement(*world, "configuration", settings);
  try {
    [[maybe_unused]] const comm::Mesh mesh(mesh_sizes(config.parallel, environment->world),
                                           environment->rank, environment->world,
                                           config.parallel.ep);
    rank_device(config, *environment);
  } catch (const std::exception& error) {
    world->fail(error.what());
    throw;
  }
  return world;
}

std::shared_ptr<comm::World> join_world(const config::RunConfig& config) {
  return join_world(config, "train", {});
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
    log::info("device: cpu, for no accelerator was found (heddle doctor says why)");
  device::set_deterministic(config.train.deterministic);
  device::start(context.device);
  context.dtype =
      runtime::parse_dtype(std::string(config::to_string(config.model.dtype)), "model.dtype");
  device::require_dtype(context.device, context.dtype, "model.dtype");
  const comm::Mesh::Sizes sizes = mesh_sizes(config.parallel, world ? world->size() : 1);
  context.mesh = comm::Mesh(sizes, std::move(world), config.parallel.ep);
  context.seed = config.train.seed;
  return context;
}

ops::KernelPolicy kernel_policy(const config::RunConfig& config, c10::Device device) {
  ops::KernelPolicy policy;
  policy.allow_fallback = config.kernels.fallback == config::Fallback::kAllow;
  policy.chosen_by_user = config.kernels.choice;
  policy.on_chip_limit_bytes = on_chip_limit(device);
  return policy;
}

std::unique_ptr<adapters::LoraSet> make_adapters(const config::RunConfig& config,
                                                 models::qwen3_5::Model& model) {
  adapters::LoraOptions lora;
  lora.rank = config.adapter.rank;
  lora.alpha = config.adapter.alpha;
  lora.rslora = config.adapter.rslora;
  lora.dropout = config.adapter.dropout;
  lora.seed = config.adapter.seed;
  // PEFT reads gate_proj, up_proj and down_proj of this model type as its routed experts,
  // whatever stands before them, so an adapter on the shared expert could not be loaded there.
  if (model.config().text_model_type == "qwen3_next") {
    lora.excluded = {"*.mlp.shared_expert.*_proj"};
    log::info(
        "adapter.targets: all-linear leaves out mlp.shared_expert of Qwen3-Next, which PEFT "
        "cannot load; name it to adapt it all the same");
  }
  return std::make_unique<adapters::LoraSet>(ckpt::adaptable(model), config.adapter.targets,
                                             config.adapter.target_parameters, lora,
                                             model.context());
}

void allocate_model(const config::RunConfig& config, models::qwen3_5::Config model_config,
                    const std::string& prefix, Setup& setup) {
  models::qwen3_5::ModelOptions options;
  options.head = head_of(config.model.head);
  options.num_labels =
      config.model.num_labels > 0 ? config.model.num_labels : model_config.num_labels;
  options.auxiliary_loss = auxiliary_coefficient(config, model_config) > 0;
  options.kernel_policy = kernel_policy(config, setup.context.device);
  options.context_method = context_method(config);
  const comm::Mesh& mesh = setup.context.mesh;
  const bool is_ulysses = options.context_method == ops::ContextMethod::kUlysses;
  choose_gdn_path(model_config, setup.context,
                  mesh.size(comm::Dim::kTp) * (is_ulysses ? mesh.size(comm::Dim::kCp) : 1),
                  /*is_training=*/true, options.kernel_policy);
  setup.model = std::make_unique<models::qwen3_5::Model>(std::move(model_config), prefix,
                                                         setup.context, options);
  setup.stages = parallel::StagePlan::balanced(setup.model->config(), mesh.size(comm::Dim::kPp),
                                               stage_chunks(config));
  parallel::hold_stages(*setup.model, setup.stages, mesh.coordinate(comm::Dim::kPp));
  if (mesh.world_size() == 1) {
    setup.model->allocate();
  } else {
    setup.sharding =
        shard_model(*setup.model, config.parallel.sum_gradients == config::SumGradients::kStep
                                      ? parallel::Sharding::Summing::kStep
                                      : parallel::Sharding::Summing::kMicroBatch);
  }
}

void complete_model(const config::RunConfig& config, Setup& setup, bool has_values) {
  warn_of_losses(*setup.model);
  warn_of_wide_layers(*setup.model);
  if (config.train.method == config::Method::kLora) {
    warn_of_slow_rank(*setup.model, config.adapter.rank);
    setup.adapters = make_adapters(config, *setup.model);
    if (setup.sharding) shard_adapters(*setup.model, *setup.adapters, *setup.sharding);
    if (has_values) setup.adapters->initialize();
  }
  choose_trainable(config, setup);
  if (setup.sharding) {
    if (has_values) setup.sharding->publish();
    setup.sharding->freeze_untrained();
  }
}

namespace {

void require_same_inputs(const Setup& setup) {
  const std::shared_ptr<comm::World>& world = setup.context.mesh.world();
  if (!world) return;
  std::vector<comm::Fact> facts = facts_of(*setup.source);
  const auto add = [&](const std::vector<comm::Fact>& more) {
    facts.insert(facts.end(), more.begin(), more.end());
  };
  add(facts_of("data.train", *setup.train));
  if (setup.eval) add(facts_of("data.eval", *setup.eval));
  comm::require_agreement(*world, "model or data", facts);
}

}  // namespace

Setup make_setup(const config::RunConfig& config, Observer& observer,
                 std::shared_ptr<comm::World> world) {
  Setup setup;
  setup.context = make_context(config, std::move(world));
  setup.source =
      std::make_unique<ckpt::ModelDirectory>(ckpt::ModelDirectory::open(config.model.path));
  models::qwen3_5::Config model_config = read_model_config(*setup.source);
  parallel::check_layout(setup.context.mesh, model_config, context_method(config),
                         stage_chunks(config));

  check_added_tokens_trained(config, model_config);
  RunTokenizer tokenizer = load_tokenizer(config);
  setup.tokenizer = tokenizer.tokenizer;
  setup.tokenizer_source = std::move(tokenizer.source);
  model_config.vocab_size = vocabulary_rows(config, *setup.tokenizer, model_config.vocab_size);
  const auto progress = [&](const data::TokenizeProgress& p) {
    observer.on_tokenize(p.file, p.fraction, p.rows);
  };
  const data::DatasetOptions train = dataset_options(config, DataPart::kTrain);
  const data::DatasetOptions eval = dataset_options(config, DataPart::kEval);
  const bool has_eval = !eval.files.empty();
  if (has_eval) data::require_files(eval);  // said before the training data are tokenised
  setup.train = data::Dataset::open(train, *setup.tokenizer, progress);
  if (has_eval) setup.eval = data::Dataset::open(eval, *setup.tokenizer, progress);
  require_same_inputs(setup);

  allocate_model(config, std::move(model_config), ckpt::text_prefix(*setup.source), setup);
  setup.load_report = ckpt::load_model(*setup.source, *setup.model, config.train.seed);
  complete_model(config, setup);
  return setup;
}

LoadedModel load_for_inference(const std::filesystem::path& directory,
                               const std::filesystem::path& adapter,
                               const runtime::Context& context, models::qwen3_5::Head head,
                               ops::ContextMethod context_method) {
  LoadedModel loaded;
  loaded.context = context;
  loaded.source = std::make_unique<ckpt::ModelDirectory>(ckpt::ModelDirectory::open(directory));
  models::qwen3_5::Config config = read_model_config(*loaded.source);
  std::optional<ckpt::AdapterDirectory> put_on;
  loaded.tokenizer_directory = directory;
  const comm::Mesh& mesh = context.mesh;
  parallel::check_layout(mesh, config, context_method, /*stage_chunks=*/1);
  if (!adapter.empty()) {
    put_on = ckpt::AdapterDirectory::open(adapter);
    config.vocab_size = std::max(config.vocab_size, ckpt::vocabulary_rows(*put_on));
    if (std::filesystem::exists(adapter / "tokenizer.json")) loaded.tokenizer_directory = adapter;
  }
  if (mesh.world()) {
    std::vector<comm::Fact> facts = facts_of(*loaded.source);
    if (put_on) {
      const std::vector<comm::Fact> more = facts_of(*put_on);
      facts.insert(facts.end(), more.begin(), more.end());
    }
    comm::require_agreement(*mesh.world(), "model", facts);
  }
  models::qwen3_5::ModelOptions options;
  options.head = head;
  options.num_labels = std::max<std::int64_t>(1, config.num_labels);
  options.kernel_policy.on_chip_limit_bytes = on_chip_limit(context.device);
  options.context_method = context_method;
  const bool is_ulysses = context_method == ops::ContextMethod::kUlysses;
  choose_gdn_path(config, context,
                  mesh.size(comm::Dim::kTp) * (is_ulysses ? mesh.size(comm::Dim::kCp) : 1),
                  /*is_training=*/false, options.kernel_policy);
  loaded.model = std::make_unique<models::qwen3_5::Model>(
      std::move(config), ckpt::text_prefix(*loaded.source), context, options);
  warn_of_losses(*loaded.model);
  loaded.stages = parallel::StagePlan::balanced(loaded.model->config(), mesh.size(comm::Dim::kPp),
                                                /*chunks=*/1);
  parallel::hold_stages(*loaded.model, loaded.stages, mesh.coordinate(comm::Dim::kPp));
  if (mesh.world_size() == 1) {
    loaded.model->allocate();
  } else {
    loaded.sharding = shard_model(*loaded.model);
  }
  loaded.load_report = ckpt::load_model(*loaded.source, *loaded.model, context.seed);
  if (put_on) {
    loaded.adapters = ckpt::load_adapter(*put_on, *loaded.model, [&](adapters::LoraSet& adapters) {
      if (loaded.sharding) shard_adapters(*loaded.model, adapters, *loaded.sharding);
    });
  }
  for (nn::Parameter* parameter : loaded.model->parameters()) parameter->set_trainable(false);
  if (loaded.adapters) {
    loaded.adapters->visit_parameters(
        [](nn::Parameter& parameter) { parameter.set_trainable(false); });
  }
  if (loaded.sharding) {
    loaded.sharding->publish();
    loaded.sharding->freeze_untrained();
  }
  return loaded;
}

}  // namespace heddle::train
