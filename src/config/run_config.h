#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/log.h"
#include "base/named_enum.h"
#include "config/rl_config.h"
#include "config/schedule.h"
#include "data/readers/row_format.h"
#include "data/rendering/row_policies.h"
#include "models/head.h"
#include "objective/dpo_options.h"
#include "ops/context_parallel/method.h"
#include "parallel/recompute_policy.h"
#include "parallel/summing.h"

/// Everything a run can be told, one plain struct per section of the YAML file. The members'
/// initialisers are the defaults; names, documentation, ranges and allowed values stand beside them
/// in schema.cpp.
namespace heddle::config {

using heddle::to_string;

/// Dtypes of an optimizer's moments.
enum class StateDtype { kFloat32, kBFloat16, kInt8 };
constexpr auto names_of(StateDtype) { return spelled("float32", "bfloat16", "int8"); }

enum class Dtype { kFloat64, kFloat32, kBFloat16 };
constexpr auto names_of(Dtype) { return spelled("float64", "float32", "bfloat16"); }

struct ModelSection {
  std::string path;
  std::string tokenizer;
  Dtype dtype = Dtype::kFloat32;  ///< load() makes it bfloat16 on an accelerator if none is given
  models::Head head = models::Head::kLanguageModel;
  std::int64_t num_labels = 0;
  bool normalize = true;
  std::vector<std::string> added_tokens;
  std::int64_t resize_vocab = 0;
};

/// A file and how often its rows are seen in an epoch: 1 once, 2.5 twice and half of them a third
/// time.
struct DataSource {
  std::string path;
  double weight = 1;
  bool operator==(const DataSource&) const = default;
};

/// Under which names a row keeps its parts.
struct DataFields : data::FieldNames {
  std::string query = "query";
  std::string positive = "positive";
  std::string negatives = "negatives";
  std::string chosen = "chosen";
  std::string rejected = "rejected";
  std::string answer = "answer";
  std::string meta = "meta";
};

/// A value handed to the chat template.
using Scalar = std::variant<bool, std::int64_t, double, std::string>;

struct DataSection {
  std::vector<DataSource> train;
  std::vector<DataSource> eval;
  data::RowFormat format = data::RowFormat::kAuto;
  bool packing = true;  ///< load() makes it false for rows of several texts if the user gave none
  std::int64_t max_length = 2048;
  data::Truncation truncation = data::Truncation::kAuto;
  data::BadRowPolicy on_bad_line = data::BadRowPolicy::kError;
  bool shuffle = true;
  data::LossOn loss_on = data::LossOn::kAssistant;
  std::string chat_template;
  std::map<std::string, Scalar> template_args;
  std::string cache_dir;
  /// Names of the classes of head classify; a run finds them before it starts if none are given.
  std::vector<std::string> labels;
  DataFields fields;
};

/// kAuto: as model.head says, see config/objective.h.
enum class Objective {
  kAuto,
  kLanguageModel,
  kClassification,
  kContrastive,
  kDpo,
  kReward,
  kPolicy
};
constexpr auto names_of(Objective) {
  return spelled("auto", "language_model", "classification", "contrastive", "dpo", "reward",
                 "policy");
}

enum class Method { kFull, kLora };
constexpr auto names_of(Method) { return spelled("full", "lora"); }

enum class AuxLoss { kSequence, kHf };
constexpr auto names_of(AuxLoss) { return spelled("sequence", "hf"); }

enum class CudaGraph { kAuto, kOff };
constexpr auto names_of(CudaGraph) { return spelled("auto", "off"); }

/// Fate of a step whose gradient norm stands out.
enum class Spike { kOff, kSkip, kStop };
constexpr auto names_of(Spike) { return spelled("off", "skip", "stop"); }

struct TrainSection {
  Objective objective = Objective::kAuto;
  Method method = Method::kFull;
  std::int64_t global_batch_size = 8;
  std::int64_t micro_batch_tokens = 0;  ///< load() replaces 0 by the tokens of a usual row
  std::int64_t max_steps = 0;
  double epochs = 1;
  std::uint64_t seed = 0;
  std::string output_dir;  ///< load() replaces "" by runs/<name of the file>
  std::string resume = "auto";
  std::vector<std::string> freeze;
  /// None: auto, chosen for each layer (train::AutoRecompute).
  std::optional<parallel::Recompute> recompute = parallel::Recompute::kOff;
  double memory_limit_gib = 0;
  bool offload_activations = false;
  double router_aux_loss_coef = -1;
  AuxLoss router_aux_loss = AuxLoss::kSequence;
  std::string router_record, router_replay;  ///< Folders; "": no
  double infonce_temperature = 0.05;
  std::int64_t eval_every = 0;
  double eval_every_epochs = 0;
  bool eval_on_start = false;
  std::int64_t early_stop_patience = 0;
  bool deterministic = false;
  CudaGraph cuda_graph = CudaGraph::kAuto;
  double neftune_alpha = 0;
  Spike spike = Spike::kOff;
  double spike_factor = 5;
  std::int64_t spike_window = 50;
  bool grad_cosine = false;
};

/// Answers of the model in training, judged as `heddle eval` judges them.
struct EvalSection {
  std::string input;                 ///< "": no answers are judged
  std::vector<std::string> metrics;  ///< empty: those that the rows are made for
  std::string answer;                ///< field; "": `answer`, else what the row itself answers
  std::int64_t max_rows = 200;       ///< 0: all
  std::int64_t max_new_tokens = 256;
  std::string metric = "loss";  ///< by which the best evaluation is chosen
};

enum class OptimName { kAdamW, kSgd, kMuon };
constexpr auto names_of(OptimName) { return spelled("adamw", "sgd", "muon"); }

struct OptimSection {
  OptimName name = OptimName::kAdamW;
  double lr = 2e-5;          ///< load() makes it 2e-4 for train.method lora if the user gave none
  double lr_head = 0;        ///< 0: lr
  double lr_embeddings = 0;  ///< 0: lr
  double weight_decay = 0;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double momentum = 0;  ///< load() makes it 0.95 for muon if the user gave none
  double clip_norm = 1;
  Schedule schedule = Schedule::kCosine;
  std::int64_t warmup_steps = 0;
  double warmup_ratio = 0;
  std::int64_t decay_steps = 0;
  DecayType decay_type = DecayType::kLinear;
  double min_lr_ratio = 0;
  std::vector<std::string> no_decay;
  Dtype grad_dtype = Dtype::kFloat32;
  StateDtype state_dtype = StateDtype::kFloat32;
  bool offload = false;
};

struct AdapterSection {
  std::string path;  ///< PEFT directory whose values the run begins with; "": from nothing
  std::int64_t rank = 16;
  double alpha = 32;
  bool rslora = false;
  double dropout = 0;
  std::vector<std::string> targets = {"all-linear"};
  std::vector<std::string> target_parameters;
  bool shared_expert_factors = false;
  std::vector<std::string> modules_to_save;
  double loraplus_lr_ratio = 1;
  std::uint64_t seed = 0;  ///< load() makes it train.seed if the user gave none
};

enum class PpSchedule { kOneForwardOneBackward, kInterleaved };
constexpr auto names_of(PpSchedule) { return spelled("1f1b", "interleaved"); }

/// A number of ranks along one dimension of the mesh, or `auto`: what the other dimensions leave of
/// the ranks that were started.
struct Degree {
  std::int64_t value = 1;  ///< 0: auto
  bool is_auto() const { return value == 0; }
  bool operator==(const Degree&) const = default;
};

struct ParallelSection {
  Degree dp;
  Degree fsdp;
  std::int64_t tp = 1;
  std::int64_t cp = 1;
  std::int64_t pp = 1;
  std::int64_t ep = 1;
  ops::ContextMethod cp_method = ops::ContextMethod::kState;
  PpSchedule pp_schedule = PpSchedule::kOneForwardOneBackward;
  parallel::Summing sum_gradients = parallel::Summing::kStep;
  std::int64_t pp_chunks = 2;
  double timeout_s = 600;
};

enum class Fallback { kRefuse, kAllow };
constexpr auto names_of(Fallback) { return spelled("refuse", "allow"); }

struct KernelsSection {
  Fallback fallback = Fallback::kRefuse;
  bool fp8 = false;
  std::map<std::string, std::string> choice;  ///< operator -> name of the kernel that must be used
};

struct ExportSection {
  std::int64_t max_shard_size = 5'000'000'000;  ///< bytes
};

struct CheckpointSection {
  std::int64_t every = 500;
  double every_epochs = 0;
  std::int64_t keep_last = 2;
  bool keep_best = false;
  ExportSection export_;
};

struct LogSection {
  std::int64_t every = 1;
  log::Level level = log::Level::kInfo;
  bool tensorboard = true;
  bool report = true;
  std::string command;
  std::vector<std::string> sample_prompts;
  std::int64_t sample_tokens = 64;
  std::int64_t profile_step = 0;
};

enum class DeviceType { kCpu, kCuda, kNpu };
constexpr auto names_of(DeviceType) { return spelled("cpu", "cuda", "npu"); }

/// Written cpu, cuda, cuda:1, npu, npu:1.
struct DeviceName {
  DeviceType type = DeviceType::kCpu;
  std::int64_t index = 0;
  bool operator==(const DeviceName&) const = default;
};
std::string to_string(const DeviceName& device);
/// Throws ConfigError: "device: expected cpu, cuda[:N] or npu[:N], found ...".
DeviceName parse_device(std::string_view text);

struct DeviceSection {
  DeviceName name;
  std::int64_t threads = 0;  ///< 0: the cores this process may run on
};

struct RunConfig {
  ModelSection model;
  DataSection data;
  TrainSection train;
  EvalSection eval;
  OptimSection optim;
  objective::DpoOptions dpo;
  RlSection rl;
  RolloutSection rollout;
  SyncSection sync;
  AdapterSection adapter;
  ParallelSection parallel;
  KernelsSection kernels;
  CheckpointSection ckpt;
  LogSection log;
  DeviceSection device;

  /// For each key the user gave: where ("run.yaml:12", "command line").
  std::map<std::string, std::string> origins;

  bool is_set(const std::string& key) const { return origins.contains(key); }
};

}  // namespace heddle::config
