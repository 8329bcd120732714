#include "parallel/pipeline_schedule.h"

#include <algorithm>
#include <limits>

namespace heddle::parallel {
namespace {

constexpr std::int64_t kForwardTime = 1, kBackwardTime = 2;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// All ranks, step by step: each takes the next forward unless too many wait for their backward,
/// else the next backward, if what it needs is there.
class Simulation {
 public:
  Simulation(std::int64_t ranks, std::int64_t chunks, std::int64_t micro_batches)
      : ranks_(ranks),
        chunks_(chunks),
        micro_batches_(micro_batches),
        forward_end_(stages(), std::vector<std::int64_t>(micro_batches, kNever)),
        backward_end_(forward_end_),
        next_forward_(ranks, 0),
        next_backward_(ranks, 0),
        free_at_(ranks, 0),
        actions_(ranks) {
    // Groups of as many micro-batches as ranks go through one chunk after the other.
    for (std::int64_t first = 0; first < micro_batches; first += ranks) {
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (std::int64_t m = first; m < std::min(first + ranks, micro_batches); ++m) {
          forward_order_.emplace_back(m, chunk);
          backward_order_.emplace_back(m, chunks - 1 - chunk);
        }
      }
    }
  }

  std::vector<std::vector<PipelineAction>> run() {
    const std::int64_t all = 2 * ranks_ * chunks_ * micro_batches_;
    std::int64_t done = 0;
    for (std::int64_t now = 0; done < all; ++now) {
      bool is_any_busy = false;
      for (std::int64_t rank = 0; rank < ranks_; ++rank) {
        if (free_at_[rank] <= now && start(rank, now, /*over_limit=*/false)) ++done;
        is_any_busy = is_any_busy || free_at_[rank] > now;
      }
      // An uneven last group can leave everybody at the limit: the first that can goes over it.
      for (std::int64_t rank = 0; rank < ranks_ && !is_any_busy; ++rank) {
        if (!start(rank, now, /*over_limit=*/true)) continue;
        ++done;
        is_any_busy = true;
      }
    }
    return std::move(actions_);
  }

 private:
  std::int64_t stages() const { return ranks_ * chunks_; }

  /// How many forward passes may wait for their backward: as many as it takes until the first
  /// gradient can be back.
  std::int64_t limit(std::int64_t rank) const {
    if (chunks_ == 1) return ranks_ - rank;
    return 2 * (ranks_ - rank - 1) + (chunks_ - 1) * ranks_ + 1;
  }

  bool start(std::int64_t rank, std::int64_t now, bool over_limit) {
    return start_forward(rank, now, over_limit) || start_backward(rank, now);
  }

  bool start_forward(std::int64_t rank, std::int64_t now, bool over_limit) {
    if (next_forward_[rank] == static_cast<std::int64_t>(forward_order_.size())) return false;
    const auto [m, chunk] = forward_order_[next_forward_[rank]];
    const std::int64_t stage = chunk * ranks_ + rank;
    if (stage > 0 && forward_end_[stage - 1][m] > now) return false;
    if (!over_limit && in_flight(rank) >= limit(rank)) return false;
    ++next_forward_[rank];
    forward_end_[stage][m] = now + kForwardTime;
    add(rank, {false, m, chunk, now, now + kForwardTime});
    return true;
  }

  bool start_backward(std::int64_t rank, std::int64_t now) {
    if (next_backward_[rank] == static_cast<std::int64_t>(backward_order_.size())) return false;
    const auto [m, chunk] = backward_order_[next_backward_[rank]];
    const std::int64_t stage = chunk * ranks_ + rank;
    const std::int64_t ready =
        stage + 1 == stages() ? forward_end_[stage][m] : backward_end_[stage + 1][m];
    if (ready > now) return false;
    ++next_backward_[rank];
    backward_end_[stage][m] = now + kBackwardTime;
    add(rank, {true, m, chunk, now, now + kBackwardTime});
    return true;
  }

  std::int64_t in_flight(std::int64_t rank) const {
    return next_forward_[rank] - next_backward_[rank];
  }

  void add(std::int64_t rank, const PipelineAction& action) {
    free_at_[rank] = action.end;
    actions_[rank].push_back(action);
  }

  std::int64_t ranks_, chunks_, micro_batches_;
  std::vector<std::vector<std::int64_t>> forward_end_, backward_end_;  ///< [stage][micro-batch]
  /// Micro-batch and chunk, the same on all ranks.
  std::vector<std::pair<std::int64_t, std::int64_t>> forward_order_, backward_order_;
  std::vector<std::int64_t> next_forward_, next_backward_;  ///< [rank] in these orders
  std::vector<std::int64_t> free_at_;
  std::vector<std::vector<PipelineAction>> actions_;
};

/// Fills PipelineAction::arrived.
class Arrivals {
 public:
  Arrivals(std::vector<std::vector<PipelineAction>>& actions, std::int64_t chunks,
           std::int64_t micro_batches)
      : actions_(actions),
        ranks_(static_cast<std::int64_t>(actions.size())),
        last_stage_(ranks_ * chunks - 1),
        micro_batches_(micro_batches),
        places_(actions.size(), std::vector<std::int64_t>(2 * chunks * micro_batches)) {
    for (std::size_t rank = 0; rank < actions.size(); ++rank) {
      for (std::size_t i = 0; i < actions[rank].size(); ++i) {
        const PipelineAction& action = actions[rank][i];
        places_[rank][number_of(action, action.chunk)] = static_cast<std::int64_t>(i);
      }
    }
  }

  void fill() {
    for (std::int64_t rank = 0; rank < ranks_; ++rank) fill(rank);
  }

 private:
  struct UnderWay {
    PipelineMessage message;
    std::int64_t receiver, place;  ///< Index of the receiver's action that receives it.
  };

  void fill(std::int64_t rank) {
    std::vector<UnderWay> under_way;
    // [rank] the last of its actions that is known to have received its message.
    std::vector<std::int64_t> known(static_cast<std::size_t>(ranks_), -1);
    for (PipelineAction& action : actions_[rank]) {
      const std::int64_t stage = action.chunk * ranks_ + rank;
      const std::int64_t before = stage + (action.is_backward ? 1 : -1);
      const std::int64_t behind = stage - (action.is_backward ? 1 : -1);
      if (before >= 0 && before <= last_stage_) {
        std::int64_t& place = known[before % ranks_];
        place = std::max(place, place_of(action, before));
      }
      std::erase_if(under_way, [&](const UnderWay& sent) {
        const bool has_arrived = sent.place <= known[sent.receiver];
        if (has_arrived) action.arrived.push_back(sent.message);
        return has_arrived;
      });
      if (behind >= 0 && behind <= last_stage_) {
        under_way.push_back({{action.is_backward, action.micro_batch, action.chunk},
                             behind % ranks_,
                             place_of(action, behind)});
      }
    }
  }

  /// Where the rank of another stage does the same with the same micro-batch.
  std::int64_t place_of(const PipelineAction& action, std::int64_t stage) const {
    return places_[stage % ranks_][number_of(action, stage / ranks_)];
  }
  std::int64_t number_of(const PipelineAction& action, std::int64_t chunk) const {
    return 2 * (chunk * micro_batches_ + action.micro_batch) + (action.is_backward ? 1 : 0);
  }

  std::vector<std::vector<PipelineAction>>& actions_;
  std::int64_t ranks_, last_stage_, micro_batches_;
  std::vector<std::vector<std::int64_t>> places_;  ///< [rank][number of an action]
};

}  // namespace

PipelineSchedule::PipelineSchedule(std::int64_t ranks, std::int64_t chunks,
                                   std::int64_t micro_batches)
    : actions_(Simulation(ranks, chunks, micro_batches).run()) {
  Arrivals(actions_, chunks, micro_batches).fill();
  for (const auto& actions : actions_) {
    if (!actions.empty()) duration_ = std::max(duration_, actions.back().end);
  }
}

double PipelineSchedule::bubble() const {
  if (duration_ == 0) return 0;
  double busy = 0;
  for (const auto& actions : actions_) {
    for (const PipelineAction& action : actions)
      busy += static_cast<double>(action.end - action.begin);
  }
  return 1 - busy / static_cast<double>(duration_ * static_cast<std::int64_t>(actions_.size()));
}

std::int64_t PipelineSchedule::most_in_flight(std::int64_t rank) const {
  std::int64_t now = 0, most = 0;
  for (const PipelineAction& action : actions_[rank])
    most = std::max(most, now += action.is_backward ? -1 : 1);
  return most;
}

std::vector<std::string> PipelineSchedule::draw(std::size_t width) const {
  std::vector<std::string> lines;
  for (const auto& actions : actions_) {
    std::string line(static_cast<std::size_t>(duration_), '.');
    for (const PipelineAction& action : actions) {
      const char letter = action.is_backward ? static_cast<char>('a' + action.micro_batch % 26)
                                             : static_cast<char>('0' + action.micro_batch % 10);
      for (std::int64_t t = action.begin; t < action.end; ++t)
        line[static_cast<std::size_t>(t)] = letter;
    }
    if (line.size() > width) line = line.substr(0, width - 3) + "...";
    lines.push_back(std::move(line));
  }
  return lines;
}

std::vector<std::pair<std::int64_t, std::int64_t>> balanced_stages(const std::vector<double>& costs,
                                                                   std::int64_t stages,
                                                                   double last_extra) {
  const auto layers = static_cast<std::int64_t>(costs.size());
  std::vector<double> sum(layers + 1, 0);
  for (std::int64_t i = 0; i < layers; ++i) sum[i + 1] = sum[i] + costs[i];
  // most[s][n]: the cost of the most expensive of s stages over the first n layers.
  const double infinite = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> most(stages + 1, std::vector<double>(layers + 1, infinite));
  std::vector<std::vector<std::int64_t>> cut(stages + 1, std::vector<std::int64_t>(layers + 1, 0));
  most[0][0] = 0;
  for (std::int64_t s = 1; s <= stages; ++s) {
    const double extra = s == stages ? last_extra : 0;
    for (std::int64_t n = s; n <= layers; ++n) {
      for (std::int64_t before = s - 1; before < n; ++before) {
        const double worst = std::max(most[s - 1][before], sum[n] - sum[before] + extra);
        if (worst < most[s][n]) {
          most[s][n] = worst;
          cut[s][n] = before;
        }
      }
    }
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> runs(stages);
  std::int64_t end = layers;
  for (std::int64_t s = stages; s > 0; --s) {
    runs[s - 1] = {cut[s][end], end};
    end = cut[s][end];
  }
  return runs;
}

}  // namespace heddle::parallel
