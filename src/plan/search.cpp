#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/errors.h"
#include "base/text.h"
#include "models/flops.h"
#include "train/idle_ranks.h"

namespace heddle::plan {
namespace {

std::vector<std::int64_t> divisors(std::int64_t number) {
  std::vector<std::int64_t> all;
  for (std::int64_t d = 1; d <= number; ++d) {
    if (number % d == 0) all.push_back(d);
  }
  return all;
}

class Searcher {
 public:
  Searcher(const config::RunConfig& config, const models::Config& model, std::int64_t world,
           const Hardware& hardware, std::size_t count)
      : config_(config),
        step_(describe_step(config, model)),
        world_(world),
        hardware_(hardware),
        count_(count) {}

  Search run() {
    const config::ParallelSection& asked = config_.parallel;
    for (const std::int64_t tp : degrees("tp", asked.tp, world_)) {
      if (tp > hardware_.gpus_per_host || hardware_.gpus_per_host % tp != 0) continue;
      for (const std::int64_t pp : degrees("pp", asked.pp, world_ / tp)) {
        if (pp > step_.model.num_hidden_layers()) break;
        for (const std::int64_t cp : degrees("cp", asked.cp, world_ / tp / pp)) by_data(tp, pp, cp);
      }
    }
    return std::move(search_);
  }

 private:
  /// The user's degree, if the ranks can be divided so, else every divisor of `ranks`.
  std::vector<std::int64_t> degrees(const char* key, std::int64_t asked, std::int64_t ranks) const {
    const bool is_free = asked == 0 || !config_.is_set(fmt::format("parallel.{}", key));
    if (is_free) return divisors(ranks);
    return ranks % asked == 0 ? std::vector<std::int64_t>{asked} : std::vector<std::int64_t>{};
  }

  void by_data(std::int64_t tp, std::int64_t pp, std::int64_t cp) {
    const std::int64_t data = world_ / tp / pp / cp;
    // A rank without a row of its own does nothing, and a segment needs tokens.
    if (as_double(data) > step_.rows || static_cast<double>(2 * cp) > step_.micro_batch_tokens)
      return;
    const std::int64_t dp = config_.parallel.dp.value;
    const bool keeps_dp = dp > 0 && config_.is_set("parallel.dp");
    for (const std::int64_t fsdp : degrees("fsdp", config_.parallel.fsdp.value, data)) {
      if (keeps_dp && data / fsdp != dp) continue;
      config::RunConfig config = config_;
      config.parallel.tp = tp;
      config.parallel.pp = pp;
      config.parallel.cp = cp;
      config.parallel.fsdp.value = fsdp;
      config.parallel.dp.value = data / fsdp;
      for (const std::int64_t ep : expert_degrees()) {
        config.parallel.ep = ep;
        by_recomputation(config);
      }
    }
  }

  std::vector<std::int64_t> expert_degrees() const {
    const nn::MoeDims* moe = step_.model.moe();
    if (moe == nullptr) return {1};
    return degrees("ep", config_.parallel.ep, moe->num_experts);
  }

  void by_recomputation(config::RunConfig& config) {
    std::vector<parallel::Recompute> policies = {
        parallel::Recompute::kOff, parallel::Recompute::kElementwise,
        parallel::Recompute::kSelective, parallel::Recompute::kFull};
    const std::optional<parallel::Recompute> asked = config_.train.recompute;
    if (config_.is_set("train.recompute") && asked) policies = {*asked};
    for (const parallel::Recompute recompute : policies) {
      config.train.recompute = recompute;
      try {
        require_frozen_experts(config, step_.model, world_);
        consider(StepOnRanks(step_, config, world_), config);
      } catch (const ConfigError& error) {
        // A layout that a run refuses is none.
        if (search_.refusal.empty()) search_.refusal = error.what();
        return;
      }
    }
  }

  void consider(const StepOnRanks& layout, const config::RunConfig& config) {
    ++search_.considered;
    Proposal proposal;
    const double device = hardware_.memory_gib * (1u << 30);
    for (std::int64_t rank = 0; rank < layout.stages.ranks; ++rank)
      proposal.peak_bytes = std::max(proposal.peak_bytes, memory_of(layout, rank, device).peak);
    const std::vector<Traffic> traffic = traffic_of(layout);
    proposal.time = time_of(layout, traffic, hardware_);
    proposal.has_eight_bit_experts = layout.has_eight_bit_experts();
    const bool fits = proposal.peak_bytes <= kUsableMemory * device;
    if (!fits && !search_.best.empty()) return;
    proposal.tokens_per_s = step_.rows * step_.length / proposal.time.total;
    const double flops =
        models::training_flops_per_token(step_.model, step_.length, step_.is_lora ? 2.0 / 3 : 1);
    proposal.mfu =
        flops * proposal.tokens_per_s / (1e12 * hardware_.peak_tflops * as_double(world_));
    proposal.settings = settings_of(config);
    if (!fits) {
      if (search_.smallest.empty() || proposal.peak_bytes < search_.smallest[0].peak_bytes)
        search_.smallest = {std::move(proposal)};
      return;
    }
    search_.smallest.clear();
    const auto place = std::upper_bound(
        search_.best.begin(), search_.best.end(), proposal,
        [](const Proposal& a, const Proposal& b) { return a.time.total < b.time.total; });
    search_.best.insert(place, std::move(proposal));
    if (search_.best.size() > count_) search_.best.pop_back();
  }

  static std::vector<std::string> settings_of(const config::RunConfig& config) {
    const config::ParallelSection& p = config.parallel;
    std::vector<std::string> settings;
    const auto add = [&](const char* key, std::int64_t degree) {
      if (degree > 1) settings.push_back(fmt::format("parallel.{}={}", key, degree));
    };
    add("tp", p.tp);
    add("cp", p.cp);
    add("fsdp", p.fsdp.value);
    add("dp", p.dp.value);
    add("pp", p.pp);
    add("ep", p.ep);
    settings.push_back("train.recompute=" + std::string(to_string(config.train.recompute.value())));
    return settings;
  }

  const config::RunConfig& config_;
  Step step_;
  std::int64_t world_;
  const Hardware& hardware_;
  std::size_t count_;
  Search search_;
};

/// Settings that save memory, the cheapest first, and how a configuration gets them.
struct Saving {
  std::vector<std::string> settings;
  void (*apply)(config::RunConfig&);
};

constexpr auto kInt8State = [](config::RunConfig& c) {
  c.optim.state_dtype = config::StateDtype::kInt8;
};
constexpr auto kOffloadAll = [](config::RunConfig& c) {
  c.optim.offload = true;
  c.train.offload_activations = true;
};

const std::vector<Saving>& savings() {
  static const std::vector<Saving> all = {
      {{"optim.state_dtype=int8"}, kInt8State},
      {{"optim.offload=true"}, [](config::RunConfig& c) { c.optim.offload = true; }},
      {{"optim.offload=true", "train.offload_activations=true"}, kOffloadAll},
      {{"train.method=lora"}, [](config::RunConfig& c) { c.train.method = config::Method::kLora; }},
  };
  return all;
}

std::vector<Proposal> fitting_otherwise(const config::RunConfig& config,
                                        const models::Config& model, std::int64_t world,
                                        const Hardware& hardware) {
  std::vector<Proposal> found;
  for (const Saving& saving : savings()) {
    config::RunConfig changed = config;
    saving.apply(changed);
    try {
      Search search = Searcher(changed, model, world, hardware, 1).run();
      if (search.best.empty()) continue;
      Proposal& best = search.best.front();
      best.settings.insert(best.settings.begin(), saving.settings.begin(), saving.settings.end());
      found.push_back(std::move(best));
    } catch (const ConfigError&) {
      continue;  // LoRA by targets that no key but this one makes use of
    }
  }
  return found;
}

}  // namespace

Search search_layouts(const config::RunConfig& config, const models::Config& model,
                      std::int64_t world, const Hardware& hardware, std::size_t count) {
  // Said of no layout in particular: dp leaves experts whole.
  config::RunConfig whole = config;
  whole.parallel = {};
  whole.parallel.dp.value = world;
  require_frozen_experts(whole, model, world);
  Search search = Searcher(config, model, world, hardware, count).run();
  if (search.considered == 0 && !search.refusal.empty()) throw ConfigError(search.refusal);
  if (search.considered == 0) {
    const train::StepRows rows = train::rows_of_step(config);
    std::vector<std::string> set;
    for (const auto& [key, origin] : config.origins) {
      if (key.starts_with("parallel.") || key == "train.recompute") set.push_back(key);
    }
    throw_error<ConfigError>(
        "no layout of {} ranks on {} with {} a host has work for all of them{}: change the number "
        "of ranks, or raise {} ({} rows now)",
        world, hardware.name, hardware.gpus_per_host,
        set.empty() ? "" : " and keeps " + text::join(set, ", "), rows.keys,
        rows.global_batch_size);
  }
  if (search.best.empty()) search.otherwise = fitting_otherwise(config, model, world, hardware);
  return search;
}

}  // namespace heddle::plan
