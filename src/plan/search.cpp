#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/errors.h"

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
    for (const std::int64_t tp : divisors(world_)) {
      if (tp > hardware_.gpus_per_host || hardware_.gpus_per_host % tp != 0) continue;
      for (const std::int64_t pp : divisors(world_ / tp)) {
        if (pp > step_.model.num_hidden_layers()) break;
        for (const std::int64_t cp : divisors(world_ / tp / pp)) by_data(tp, pp, cp);
      }
    }
    return std::move(search_);
  }

 private:
  void by_data(std::int64_t tp, std::int64_t pp, std::int64_t cp) {
    const std::int64_t data = world_ / tp / pp / cp;
    // A rank without a row of its own does nothing, and a segment needs tokens.
    if (data > config_.train.global_batch_size ||
        static_cast<double>(2 * cp) > step_.micro_batch_tokens)
      return;
    for (const std::int64_t fsdp : divisors(data)) {
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
    return moe != nullptr ? divisors(moe->num_experts) : std::vector<std::int64_t>{1};
  }

  void by_recomputation(config::RunConfig& config) {
    for (const config::Recompute recompute :
         {config::Recompute::kOff, config::Recompute::kElementwise, config::Recompute::kSelective,
          config::Recompute::kFull}) {
      config.train.recompute = recompute;
      try {
        consider(Layout(step_, config, world_), config);
      } catch (const ConfigError&) {
        return;  // what a run refuses is no layout
      }
    }
  }

  void consider(const Layout& layout, const config::RunConfig& config) {
    ++search_.considered;
    Proposal proposal;
    for (std::int64_t rank = 0; rank < layout.stages.ranks; ++rank)
      proposal.peak_bytes = std::max(proposal.peak_bytes, memory_of(layout, rank).peak);
    const std::vector<Traffic> traffic = traffic_of(layout);
    proposal.time = time_of(layout, traffic, hardware_);
    const bool fits = proposal.peak_bytes <= kUsableMemory * hardware_.memory_gib * (1u << 30);
    if (!fits && !search_.best.empty()) return;
    proposal.tokens_per_s = step_.rows * step_.length / proposal.time.total;
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
    settings.push_back(
        fmt::format("train.recompute={}", config::to_string(config.train.recompute)));
    return settings;
  }

  const config::RunConfig& config_;
  Step step_;
  std::int64_t world_;
  const Hardware& hardware_;
  std::size_t count_;
  Search search_;
};

}  // namespace

Search search_layouts(const config::RunConfig& config, const models::Config& model,
                      std::int64_t world, const Hardware& hardware, std::size_t count) {
  return Searcher(config, model, world, hardware, count).run();
}

}  // namespace heddle::plan
