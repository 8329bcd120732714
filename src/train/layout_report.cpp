#include "train/layout_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "models/qwen3_5/model.h"
#include "parallel/layout.h"
#include "train/describe.h"
#include "train/setup.h"

namespace heddle::train {
namespace {

using comm::Dim;
using models::qwen3_5::Config;

double as_double(std::int64_t value) { return static_cast<double>(value); }

/// Sizes of one run that all estimates stand on.
class Planner {
 public:
  Planner(const config::RunConfig& config, const Config& model, std::int64_t world)
      : config_(config),
        model_(model),
        mesh_(mesh_sizes(config.parallel, world), 0, world, config.parallel.ep),
        stages_(parallel::StagePlan::balanced(model, mesh_.size(Dim::kPp), stage_chunks(config))),
        method_(context_method(config)) {
    const double rows = as_double(config.train.global_batch_size) / as_double(mesh_.data_size());
    step_tokens_ = std::ceil(rows) * as_double(config.data.max_length);
    batch_tokens_ = as_double(std::max(config.train.micro_batch_tokens, config.data.max_length));
    micro_batches_ = std::ceil(step_tokens_ / batch_tokens_);
    local_tokens_ = step_tokens_ / size(Dim::kCp);
    const auto type =
        runtime::parse_dtype(std::string(config::to_string(config.model.dtype)), "model.dtype");
    element_ = as_double(static_cast<std::int64_t>(c10::elementSize(type)));
    wide_ = type == c10::ScalarType::Double ? 8 : 4;
    gradient_ = config.optim.grad_dtype == config::Dtype::kBFloat16 ? 2 : wide_;
    is_lora_ = config.train.method == config::Method::kLora;
    count_parameters();
  }

  LayoutReport report() const {
    LayoutReport report;
    report.mesh = mesh_.describe();
    for (const Dim dim :
         {Dim::kTp, Dim::kCp, Dim::kFsdp, Dim::kDp, Dim::kPp, Dim::kEp, Dim::kEfsdp, Dim::kEdp}) {
      const bool is_of_experts = dim == Dim::kEp || dim == Dim::kEfsdp || dim == Dim::kEdp;
      if (mesh_.size(dim) == 1 || (is_of_experts && mesh_.size(Dim::kEp) == 1)) continue;
      report.groups.push_back({comm::name(dim), mesh_.size(dim),
                               mesh_.world_size() / mesh_.size(dim), mesh_.ranks_along({dim})});
    }
    report.tokens_per_step = step_tokens_ * as_double(mesh_.data_size());
    report.micro_batches = micro_batches_;
    report.traffic = traffic();
    const parallel::PipelineSchedule schedule(stages_.ranks, stages_.chunks,
                                              static_cast<std::int64_t>(micro_batches_));
    for (std::int64_t rank = 0; rank < stages_.ranks; ++rank)
      report.memory.push_back(memory(rank, schedule.most_in_flight(rank)));
    if (stages_.ranks > 1) {
      report.schedule = schedule.draw();
      report.bubble = schedule.bubble();
    }
    return report;
  }

 private:
  double size(Dim dim) const { return as_double(mesh_.size(dim)); }
  /// Share of what the others of a group hold.
  double others(Dim dim) const { return (size(dim) - 1) / size(dim); }

  /// Elements of a stage rank's parameters after tp and ep.
  struct Elements {
    double dense = 0, experts = 0, largest_block = 0;
  };

  void count_parameters() {
    models::qwen3_5::ModelOptions options;
    options.kernel_policy.allow_fallback = true;
    models::qwen3_5::Model model(model_, "model.", runtime::Context(), options);
    elements_.resize(static_cast<std::size_t>(stages_.ranks));
    const auto held_by = [&](std::int64_t rank) {
      parallel::hold_stages(model, stages_, rank);
      Elements& elements = elements_[static_cast<std::size_t>(rank)];
      const auto local = [&](const nn::Parameter& parameter) {
        double count = as_double(parameter.numel());
        for (const nn::Shard& shard : parameter.placement()) count /= size(shard.mesh_dim);
        return count;
      };
      model.visit_parameters([&](nn::Parameter& parameter) {
        if (!parameter.is_held()) return;
        const auto& placement = parameter.placement();
        const bool is_expert = std::any_of(placement.begin(), placement.end(),
                                           [](const auto& s) { return s.mesh_dim == Dim::kEp; });
        (is_expert ? elements.experts : elements.dense) += local(parameter);
      });
      for (const auto& layer : model.layers()) {
        double block = 0;
        layer->visit_parameters([&](nn::Parameter& parameter) {
          if (parameter.is_held()) block += local(parameter);
        });
        elements.largest_block = std::max(elements.largest_block, block);
      }
    };
    for (std::int64_t rank = 0; rank < stages_.ranks; ++rank) held_by(rank);
    // LoRA trains r (in + out) of every projection of in x out; take their share of a square one.
    trained_ = is_lora_ ? 2 * as_double(config_.adapter.rank) / as_double(model_.hidden_size) : 1;
  }

  double layers(bool is_attention) const {
    return as_double(
        std::count(model_.full_attention.begin(), model_.full_attention.end(), is_attention));
  }

  std::vector<LayoutTraffic> traffic() const {
    std::vector<LayoutTraffic> rows;
    const auto add = [&](Dim dim, const char* what, double bytes) {
      if (bytes > 0) rows.push_back({comm::name(dim), what, bytes});
    };
    const double depth = as_double(model_.num_hidden_layers) / size(Dim::kPp);
    const double hidden = local_tokens_ * as_double(model_.hidden_size) * element_;
    const double passes = config_.train.recompute == config::Recompute::kFull ? 6 : 4;
    add(Dim::kTp, "sums of hidden states", 2 * others(Dim::kTp) * passes * depth * hidden);
    add(Dim::kTp, "rows of embedding and head", 2 * others(Dim::kTp) * hidden);
    if (!is_lora_) {
      add(Dim::kTp, "gradient of the vocabulary's matrix",
          2 * others(Dim::kTp) * as_double(model_.vocab_size * model_.hidden_size) * element_);
    }
    if (size(Dim::kCp) > 1) add_context(add);
    double largest = 0, largest_experts = 0;
    for (const Elements& elements : elements_) {
      largest = std::max(largest, elements.dense);
      largest_experts = std::max(largest_experts, elements.experts);
    }
    add_sharding(add, largest, size(Dim::kFsdp) * size(Dim::kCp), Dim::kFsdp, Dim::kDp);
    if (largest_experts > 0)
      add_sharding(add, largest_experts, size(Dim::kEfsdp), Dim::kEfsdp, Dim::kEdp);
    if (size(Dim::kPp) > 1)
      add(Dim::kPp, "hidden states and gradients between stages",
          2 * as_double(stages_.chunks) * hidden);
    if (size(Dim::kEp) > 1) {
      const double sparse =
          as_double(std::count(model_.sparse_mlp.begin(), model_.sparse_mlp.end(), true));
      add(Dim::kEp, "tokens to experts and back, and gradients",
          4 * others(Dim::kEp) * sparse / size(Dim::kPp) * hidden / size(Dim::kTp) *
              as_double(model_.num_experts_per_tok));
    }
    return rows;
  }

  template <class Add>
  void add_context(const Add& add) const {
    const double kv = 2 * as_double(model_.num_key_value_heads * model_.head_dim) / size(Dim::kTp);
    const double q = as_double(model_.num_attention_heads * model_.head_dim) / size(Dim::kTp);
    const double k =
        as_double(model_.linear_num_key_heads * model_.linear_key_head_dim) / size(Dim::kTp);
    const double v =
        as_double(model_.linear_num_value_heads * model_.linear_value_head_dim) / size(Dim::kTp);
    const double attention = layers(true) / size(Dim::kPp), gdn = layers(false) / size(Dim::kPp);
    if (method_ == ops::ContextMethod::kUlysses) {
      add(Dim::kCp, "tokens to heads and back",
          2 * others(Dim::kCp) * local_tokens_ * element_ *
              (attention * (2 * q + kv) + gdn * (2 * k + 2 * v)));
      return;
    }
    add(Dim::kCp, "keys and values, and gradients",
        2 * (size(Dim::kCp) - 1) * local_tokens_ * element_ * attention * kv);
    const double state = v * as_double(model_.linear_key_head_dim) * wide_;  // of all heads
    const double transition =
        state / as_double(model_.linear_value_head_dim) * as_double(model_.linear_key_head_dim);
    add(Dim::kCp, "states and transitions, and gradients",
        2 * (size(Dim::kCp) - 1) * micro_batches_ * gdn * (2 * state + transition));
  }

  template <class Add>
  void add_sharding(const Add& add, double elements, double shards, Dim shard, Dim replica) const {
    const std::string inner = comm::name(shard), outer = comm::name(replica);
    const double replicas = size(replica);
    if (shards > 1) {
      add(shard, "weights gathered for forward and backward",
          2 * micro_batches_ * (shards - 1) / shards * elements * element_);
      add(shard, "gradients", (shards - 1) / shards * elements * trained_ * gradient_);
    }
    const double part = elements / shards * trained_;
    add(replica, "gradients", (replicas - 1) / replicas * part * gradient_);
    add(replica, "new weights", (replicas - 1) / replicas * part * element_);
  }

  LayoutMemory memory(std::int64_t rank, std::int64_t in_flight) const {
    const Elements& elements = elements_[static_cast<std::size_t>(rank)];
    const double shards = size(Dim::kFsdp) * size(Dim::kCp);
    const auto resident = [&](double count, double over) {
      return over > 1 ? count / over : count;
    };
    LayoutMemory memory{rank, {}, 0, 0, 0, 0};
    double share = 0;
    for (std::int64_t chunk = 0; chunk < stages_.chunks; ++chunk) {
      const auto [first, last] = stages_.layers[chunk * stages_.ranks + rank];
      memory.layers += fmt::format("{}{}-{}", chunk > 0 ? ", " : "", first, last - 1);
      share += as_double(last - first) / as_double(model_.num_hidden_layers);
    }
    const double experts_over = size(Dim::kEfsdp);
    memory.weights =
        element_ * (resident(elements.dense, shards) + resident(elements.experts, experts_over));
    if (shards > 1) memory.weights += 2 * element_ * elements.largest_block;
    const double all = elements.dense + elements.experts;
    memory.gradients = all * trained_ * gradient_;
    const double owned = elements.dense / shards / size(Dim::kDp) +
                         elements.experts / experts_over / size(Dim::kEdp);
    const bool is_narrow_state = config_.optim.state_dtype == config::Dtype::kBFloat16;
    const double state = is_narrow_state ? 4 : 2 * wide_ + (element_ < 4 ? 4 : 0);
    memory.optimizer = owned * trained_ * state;
    const double per_token = activation_bytes_per_token(model_, static_cast<std::int64_t>(element_),
                                                        config_.train.recompute) /
                             as_double(stages_.chunks);
    memory.activations = batch_tokens_ / size(Dim::kCp) * per_token * share *
                         as_double(std::max<std::int64_t>(1, in_flight));
    return memory;
  }

  const config::RunConfig& config_;
  const Config& model_;
  comm::Mesh mesh_;
  parallel::StagePlan stages_;
  ops::ContextMethod method_;
  double step_tokens_ = 0, batch_tokens_ = 0, micro_batches_ = 0, local_tokens_ = 0;
  double element_ = 4, wide_ = 4, gradient_ = 4, trained_ = 1;
  bool is_lora_ = false;
  std::vector<Elements> elements_;  ///< [rank of the pipeline]
};

}  // namespace

LayoutReport plan_layout(const config::RunConfig& config, const Config& model, std::int64_t world) {
  const comm::Mesh mesh(mesh_sizes(config.parallel, world), 0, world, config.parallel.ep);
  parallel::check_layout(mesh, model, context_method(config), stage_chunks(config));
  return Planner(config, model, world).report();
}

}  // namespace heddle::train
