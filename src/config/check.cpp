#include "config/check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"
#include "config/check_policy.h"
#include "config/field.h"
#include "config/objective.h"

namespace heddle::config {

using models::Head;
using parallel::Recompute;
namespace {

class Checker {
 public:
  Checker(const RunConfig& config, const std::string& source) : c_(config), source_(source) {}

  void required() const {
    for (const Section& section : schema()) {
      for (const Field& field : section.fields) {
        const Json value = field.required ? field.get(c_) : Json();
        const bool is_missing = value.is_string() ? value.get_ref<const std::string&>().empty()
                                                  : value.is_array() && value.empty();
        if (is_missing) {
          throw_error<ConfigError>("{}: required key '{}' is missing: {}", source_, field.key,
                                   field.doc);
        }
      }
    }
  }

  /// Numbers that nothing real reaches: counts that are multiplied, kept in lists or looped over.
  void sizes() const {
    static const std::map<std::string, double> kMost = {
        {"ckpt.keep_last", 1e6},       {"train.epochs", 1e6},
        {"adapter.rank", 1 << 20},     {"data.max_length", 1 << 30},
        {"model.num_labels", 1 << 24}, {"train.global_batch_size", 1 << 30}};
    for (const Section& section : schema()) {
      for (const Field& field : section.fields) {
        const Json value = field.get(c_);
        // All 64 bits of a seed count.
        if (!value.is_number() || field.key.ends_with("seed")) continue;
        const auto known = kMost.find(field.key);
        const double most = known != kMost.end()                 ? known->second
                            : field.key.starts_with("parallel.") ? 1 << 20
                                                                 : 1e15;
        if (std::abs(value.get<double>()) > most)
          fail(field.key, fmt::format("{} is too large: expected at most {}", value.dump(), most));
      }
    }
  }

  void head() const {
    labels();
    if (c_.model.head != Head::kLanguageModel && !c_.log.sample_prompts.empty()) {
      fail("log.sample_prompts", "only model.head lm generates text");
    }
    if (objective_of(c_) != Objective::kLanguageModel &&
        c_.data.truncation == data::Truncation::kSplit) {
      fail("data.truncation",
           objective_of(c_) == Objective::kPolicy
               ? "split is for single texts: the pieces of a prompt have no answer"
           : c_.model.head == Head::kLanguageModel
               ? "split is for single texts: the pieces of an answer have no pair"
               : "split is for model.head lm: the pieces of a text have no label");
    }
    if (c_.model.head == Head::kEmbed && c_.train.method == Method::kLora) {
      for (const std::string& module : c_.adapter.modules_to_save) {
        if (module == "lm_head")
          fail("adapter.modules_to_save", "head embed has no lm_head to train");
      }
    }
  }

  void labels() const {
    const std::vector<std::string>& names = c_.data.labels;
    if (names.empty() || c_.model.head != Head::kClassify) return;
    if (names.size() < 2) fail("data.labels", "one class cannot be told from others: expected two");
    std::set<std::string> seen;
    for (const std::string& name : names) {
      if (!seen.insert(name).second) fail("data.labels", fmt::format("'{}' is given twice", name));
    }
    if (c_.model.num_labels != std::ssize(names)) {
      fail("model.num_labels", fmt::format("is {}, but data.labels names {} classes: leave it out",
                                           c_.model.num_labels, names.size()));
    }
  }

  void objective() const {
    const Objective objective = objective_of(c_);
    const Head head = needs_of(objective).head;
    if (c_.model.head != head) {
      fail("train.objective", fmt::format("{} needs model.head {}, found {}", to_string(objective),
                                          to_string(head), to_string(c_.model.head)));
    }
    if (objective == Objective::kReward && c_.model.num_labels != 1) {
      fail("model.num_labels",
           fmt::format("train.objective reward gives a text one score: expected "
                       "1, found {}",
                       c_.model.num_labels));
    }
    if (objective == Objective::kDpo && c_.data.loss_on == data::LossOn::kAll) {
      fail("data.loss_on", "train.objective dpo compares the answers alone; set it to assistant");
    }
  }

  void caches() const {
    if (!std::has_single_bit(static_cast<std::uint64_t>(c_.rollout.caches.kv_page))) {
      fail("rollout.kv_page",
           fmt::format("expected a power of two, found {}", c_.rollout.caches.kv_page));
    }
    const std::vector<std::int64_t>& batches = c_.rollout.caches.graph_batches;
    if (std::adjacent_find(batches.begin(), batches.end(), std::greater_equal<>()) != batches.end())
      fail("rollout.graph_batches",
           fmt::format("expected ascending sizes, found [{}]", fmt::join(batches, ", ")));
  }

  void length() const {
    if (c_.train.max_steps == 0 && c_.train.epochs == 0) {
      fail("train.epochs", "0 with train.max_steps 0 trains nothing; set one of them");
    }
    if (c_.train.micro_batch_tokens < c_.data.max_length) {
      fail("train.micro_batch_tokens",
           fmt::format("{} is less than data.max_length {}: the longest row would not fit",
                       c_.train.micro_batch_tokens, c_.data.max_length));
    }
  }

  void gradients() const {
    if (c_.optim.grad_dtype == Dtype::kFloat64 && c_.model.dtype != Dtype::kFloat64) {
      fail("optim.grad_dtype",
           fmt::format("float64 is for model.dtype float64, found {}", to_string(c_.model.dtype)));
    }
  }

  void schedule() const {
    const OptimSection& o = c_.optim;
    if (o.schedule == Schedule::kWsd && o.decay_steps == 0) {
      fail("optim.schedule", "wsd needs optim.decay_steps >= 1");
    }
    const std::int64_t decay = o.schedule == Schedule::kWsd ? o.decay_steps : 0;
    if (c_.train.max_steps > 0 && o.warmup_steps + decay > c_.train.max_steps) {
      fail(o.warmup_steps > 0 ? "optim.warmup_steps" : "optim.decay_steps",
           fmt::format("warm-up {} and decay {} steps are more than train.max_steps {}",
                       o.warmup_steps, decay, c_.train.max_steps));
    }
  }

  /// Two keys that say the same thing.
  void one_of(const char* steps, const char* share, double value) const {
    if (value > 0 && c_.is_set(steps)) fail(share, fmt::format("is given beside {}", steps));
  }

  void paces() const {
    one_of("optim.warmup_steps", "optim.warmup_ratio", c_.optim.warmup_ratio);
    one_of("train.eval_every", "train.eval_every_epochs", c_.train.eval_every_epochs);
    one_of("ckpt.every", "ckpt.every_epochs", c_.ckpt.every_epochs);
  }

  void adapter() const {
    if (c_.train.method != Method::kLora) {
      if (!c_.adapter.path.empty())
        fail("adapter.path",
             "needs train.method lora; to train all weights of what the adapter made, merge it: "
             "heddle export BASE --adapter DIR --output MERGED, and give MERGED as model.path");
      return;
    }
    if (c_.adapter.rank == 0) fail("adapter.rank", "train.method lora needs a rank >= 1");
    if (c_.adapter.targets.empty() && c_.adapter.target_parameters.empty() &&
        c_.adapter.modules_to_save.empty()) {
      fail("adapter.targets", "train.method lora with no target trains nothing");
    }
    // Adapters of adapter.path are not known yet.
    if (c_.adapter.shared_expert_factors && c_.adapter.target_parameters.empty() &&
        c_.adapter.path.empty()) {
      fail("adapter.shared_expert_factors",
           "is of adapters on experts; name those in adapter.target_parameters");
    }
    if (!c_.adapter.target_parameters.empty() && c_.adapter.dropout > 0) {
      fail("adapter.dropout",
           "adapters on experts (adapter.target_parameters) have no dropout, in PEFT neither; set "
           "it to 0");
    }
  }

  /// Answers that are judged during training, and the number that chooses the best evaluation.
  void judged_answers() const {
    const std::string& metric = c_.eval.metric;
    const bool is_judged =
        std::find(c_.eval.metrics.begin(), c_.eval.metrics.end(), metric) != c_.eval.metrics.end();
    if (c_.eval.input.empty()) {
      if (!c_.eval.metrics.empty()) fail("eval.metrics", "needs eval.input, the rows to answer");
    } else if (c_.parallel.cp > 1) {
      fail("eval.input", "answers are generated in any layout but parallel.cp above 1");
    } else if (objective_of(c_) != Objective::kLanguageModel) {
      fail("eval.input",
           fmt::format("answers are judged with train.objective language_model, found {}",
                       to_string(objective_of(c_))));
    }
    if (objective_of(c_) == Objective::kLanguageModel && metric != "loss" && !is_judged) {
      fail("eval.metric",
           fmt::format(
               "'{}': expected loss or one of eval.metrics ({})", text::shown(metric),
               c_.eval.metrics.empty() ? "none is given" : text::join(c_.eval.metrics, ", ")));
    }
  }

  void evaluation() const {
    if (!c_.data.eval.empty()) return;
    if (!c_.eval.input.empty()) {
      fail("eval.input",
           "needs data.eval: answers are judged with the evaluations of its loss "
           "(data.eval=0.02 takes a share of the training rows)");
    }
    if (c_.train.early_stop_patience > 0) {
      fail("train.early_stop_patience", "early stopping needs data.eval");
    }
    if (c_.ckpt.keep_best) fail("ckpt.keep_best", "the best checkpoint is found with data.eval");
    if (c_.train.eval_every > 0) fail("train.eval_every", "evaluation needs data.eval");
    if (c_.train.eval_every_epochs > 0)
      fail("train.eval_every_epochs", "evaluation needs data.eval");
    if (c_.train.eval_on_start) fail("train.eval_on_start", "evaluation needs data.eval");
  }

  void stopping() const {
    if (c_.train.early_stop_patience > 0 && c_.train.eval_every == 0 &&
        c_.train.eval_every_epochs == 0) {
      fail("train.early_stop_patience",
           "early stopping needs train.eval_every >= 1, or train.eval_every_epochs");
    }
  }

  void layout() const {
    const ParallelSection& p = c_.parallel;
    if (p.dp.is_auto() && p.fsdp.is_auto()) {
      fail("parallel.fsdp", "only one of parallel.dp and parallel.fsdp can be auto");
    }
    if (p.cp > 1 && !c_.log.sample_prompts.empty()) {
      fail("log.sample_prompts",
           "answers are generated in any layout but parallel.cp above 1; expected [] with it");
    }
  }

  void router() const {
    const bool is_on = !c_.train.router_record.empty() || !c_.train.router_replay.empty();
    const char* key =
        c_.train.router_record.empty() ? "train.router_replay" : "train.router_record";
    if (is_on && c_.model.head == Head::kEmbed)
      fail(key, "head embed runs each text twice, which is not recorded");
    if (is_on && c_.train.router_record == c_.train.router_replay)
      fail(key, "router_record and router_replay must be two folders");
  }

  void optimizer_state() const {
    if (c_.optim.state_dtype == StateDtype::kBFloat16 && c_.model.dtype != Dtype::kBFloat16) {
      fail("optim.state_dtype", "bfloat16 moments need model.dtype bfloat16");
    }
    if (c_.optim.state_dtype == StateDtype::kInt8 && c_.model.dtype == Dtype::kFloat64) {
      fail("optim.state_dtype", "int8 moments need model.dtype bfloat16 or float32");
    }
  }

  /// Rates of groups are shares of optim.lr, whose schedule they follow.
  void learning_rates() const {
    const std::pair<const char*, double> groups[] = {
        {"optim.lr_head", c_.optim.lr_head}, {"optim.lr_embeddings", c_.optim.lr_embeddings}};
    for (const auto& [key, rate] : groups) {
      if (rate > 0 && c_.optim.lr == 0)
        fail(
            key,
            "follows the schedule of optim.lr, which is 0; train.freeze keeps weights as they are");
    }
  }

  void muon() const {
    if (c_.optim.name != OptimName::kMuon) return;
    if (c_.optim.state_dtype != StateDtype::kFloat32) {
      fail("optim.state_dtype", fmt::format("optim.name muon keeps its state in float32, found {}",
                                            to_string(c_.optim.state_dtype)));
    }
    if (c_.optim.offload)
      fail("optim.offload", "is for the state of AdamW; optim.name muon keeps it on the device");
  }

  void spike() const {
    if (c_.train.spike == Spike::kStop && objective_of(c_) == Objective::kPolicy) {
      fail("train.spike",
           "stop needs rows that can be read again, which train.objective policy generates; set it "
           "to skip");
    }
  }

  /// The noise of embeddings.
  void neftune() const {
    if (c_.train.neftune_alpha == 0) return;
    const Objective objective = objective_of(c_);
    if (objective == Objective::kContrastive || objective == Objective::kPolicy) {
      fail("train.neftune_alpha",
           fmt::format("train.objective {} compares two passes over the same tokens, which noise "
                       "would tell apart; set it to 0",
                       to_string(objective)));
    }
  }

  void offload() const {
    const std::optional<Recompute> recompute = c_.train.recompute;
    if (c_.train.offload_activations && recompute != Recompute::kSelective &&
        recompute != Recompute::kFull) {
      fail("train.offload_activations",
           "moves the inputs of what runs again in the backward; set train.recompute to full or "
           "selective");
    }
  }

 private:
  [[noreturn]] void fail(const std::string& key, const std::string& message) const {
    refuse(c_, source_, key, message);
  }

  const RunConfig& c_;
  const std::string& source_;
};

}  // namespace

void refuse(const RunConfig& config, const std::string& source, const std::string& key,
            const std::string& message) {
  const std::string start = config.is_set(key) ? where(config, key) : source + ": " + key;
  throw_error<ConfigError>("{}: {}", start, message);
}

void check(const RunConfig& config, const std::string& source, Completeness completeness) {
  const Checker checker(config, source);
  checker.layout();
  checker.caches();
  if (completeness == Completeness::kPartial) return;
  checker.required();
  checker.sizes();
  checker.head();
  checker.objective();
  if (objective_of(config) == Objective::kPolicy) check_policy(config, source);
  checker.router();
  checker.length();
  checker.gradients();
  checker.schedule();
  checker.paces();
  checker.adapter();
  checker.judged_answers();
  checker.evaluation();
  checker.stopping();
  checker.optimizer_state();
  checker.learning_rates();
  checker.muon();
  checker.spike();
  checker.neftune();
  checker.offload();
}

}  // namespace heddle::config
