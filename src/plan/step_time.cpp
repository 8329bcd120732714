#include "plan/step_time.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace heddle::plan {
namespace {

using comm::Dim;

// Kernels of one block, forward and backward, as profiles of a step show them: 1100 in 24 layers,
// with adapters 2300 in 32; 12,100 in 40 where each has experts that ranks divide, and weights that
// they gather.
constexpr double kLaunches = 46, kLaunchesWithAdapters = 72, kLaunchesWithExchange = 302;

/// Time of the blocks of one rank of the pipeline for one micro-batch, by kind.
struct Compute {
  double products = 0, attention = 0, delta_rule = 0, elementwise = 0, launches = 0;

  double sum() const { return products + attention + delta_rule + elementwise + launches; }
  Compute& operator+=(const Compute& other) {
    products += other.products;
    attention += other.attention;
    delta_rule += other.delta_rule;
    elementwise += other.elementwise;
    launches += other.launches;
    return *this;
  }
  friend Compute operator*(double factor, Compute c) {
    c.products *= factor;
    c.attention *= factor;
    c.delta_rule *= factor;
    c.elementwise *= factor;
    c.launches *= factor;
    return c;
  }
};

class Timer {
 public:
  Timer(const StepOnRanks& layout, const Hardware& hardware)
      : layout_(layout),
        step_(*layout.step),
        hardware_(hardware),
        product_rate_(hardware.peak_tflops * 1e12 * hardware.products),
        expert_rate_(hardware.peak_tflops * 1e12 * hardware.expert_products *
                     (layout.has_eight_bit_experts() ? hardware.eight_bit_experts : 1)),
        attention_rate_(hardware.peak_tflops * 1e12 * hardware.attention * step_.length /
                        (step_.length + hardware.attention_half_length)),
        delta_rate_(hardware.peak_tflops * 1e12 * hardware.gated_delta_rule),
        memory_rate_(hardware.memory_gbs * 1e9 * hardware.elementwise),
        tp_(layout.size(Dim::kTp)) {}

  Compute forward(std::int64_t stage_rank) const {
    Compute sum;
    for (const std::int64_t i : layout_.stages.layers_of(stage_rank)) sum += layer_forward(i);
    return sum;
  }

  /// With what recomputation repeats.
  Compute backward(std::int64_t stage_rank) const {
    Compute sum;
    for (const std::int64_t i : layout_.stages.layers_of(stage_rank)) {
      if (i < step_.first_trained) continue;
      const LayerWork& work = step_.layers[i];
      Compute c = compute(i, 2.0 / 3, work.backward + exchanged(i));
      c.products = products(i, input_gradient_rate()) +
                   products(work.trained_products, work.trained_experts, product_rate_);
      if (layout_.size(Dim::kCp) > 1 && layout_.method == ops::ContextMethod::kState)
        c.delta_rule *= 1 + crossing();
      if (step_.is_lora) c.elementwise += elements(work.adapters + tp_ * work.adapters_whole);
      sum += c;
      sum += again(i);
    }
    return sum;
  }

  /// Embedding and head of one micro-batch.
  Compute ends(std::int64_t stage_rank) const {
    Compute c;
    const double H = as_double(step_.model.hidden_size), V = as_double(step_.model.vocab_size);
    const double rows = layout_.tokens / tp_;
    if (stage_rank == 0) c.elementwise += 5 * H * rows * step_.element / memory_rate_;
    if (!layout_.has_head(stage_rank) || !step_.has_logits) return c;
    const bool is_trained = step_.trains_logits();
    c.products = rows * V * H * (is_trained ? 6 : 4) / product_rate_;
    // Softmax: logits read twice, their gradient written once.
    double bytes = 3 * rows * V * step_.element;
    if (is_trained) bytes += head_gradient_bytes(rows);
    c.elementwise += bytes / memory_rate_;
    return c;
  }

  double optimizer(std::int64_t stage_rank) const {
    const Held held = held_by(layout_, stage_rank);
    const double owned = held.trained_dense / layout_.shards() / layout_.size(Dim::kDp) +
                         held.trained_tables / layout_.table_shards() / layout_.size(Dim::kDp) +
                         held.trained_experts / layout_.expert_shards() / layout_.size(Dim::kEdp);
    // Norm and update read the gradient; weight, and state, are read and written.
    const double bytes = 2 * step_.gradient + 2 * step_.element + 2 * step_.state;
    const double update = owned * bytes / memory_rate_;
    if (!step_.offloads_state) return update;
    return std::max(update, owned * step_.state / (hardware_.host_memory_gbs * 1e9));
  }

  /// Copies of weights out of gathered buffers and of gradients into those that are summed, of
  /// one micro-batch.
  double copies(std::int64_t stage_rank) const {
    const Held held = held_by(layout_, stage_rank);
    double bytes = 0;
    if (layout_.shards() > 1) bytes += 2 * 2 * held.dense * step_.element;
    if (layout_.expert_shards() > 1) bytes += 2 * 2 * held.experts * step_.element;
    if (layout_.table_shards() > 1) bytes += 2 * held.gathered_tables * step_.element;
    if (layout_.table_shards() * layout_.size(Dim::kDp) > 1)
      bytes += 3 * held.trained_tables * step_.gradient / layout_.micro_batches;
    if (layout_.shards() * layout_.size(Dim::kDp) > 1)
      bytes += 3 * held.trained_dense * step_.gradient / layout_.micro_batches;
    return bytes / memory_rate_;
  }

 private:
  /// Elements of the rows that ranks exchange, forward and as many backward: put in order and added
  /// up at home, and as many results of experts more.
  double exchanged(std::int64_t layer) const {
    if (!exchanges(layer)) return 0;
    return (1 + 3 * layout_.expert_ranks()) * as_double(step_.model.hidden_size);
  }
  bool exchanges(std::int64_t layer) const {
    return layout_.size(Dim::kEp) > 1 && step_.model.layers[layer].moe.has_value();
  }
  /// Until the host knows how many rows go where.
  double wait(std::int64_t layer) const { return exchanges(layer) ? hardware_.wait_us * 1e-6 : 0; }
  double elements(double per_token) const {
    return layout_.tokens / tp_ * per_token * step_.element / memory_rate_;
  }

  /// Rates of products of linear layers: of outputs, and of input gradients. Gradients of weights
  /// and the head are products of 16 bits in any case.
  double output_rate(std::int64_t layer) const {
    const auto& first = step_.first_eight_bit_block;
    return product_rate_ * (first && layer >= *first ? hardware_.eight_bit_products : 1);
  }
  double input_gradient_rate() const {
    return product_rate_ * (step_.first_eight_bit_block ? hardware_.eight_bit_products : 1);
  }

  /// Seconds of the products of one kind with all weights of a layer.
  double products(std::int64_t layer, double rate) const {
    return products(step_.layers[layer].products, step_.layers[layer].experts, rate);
  }
  double products(double linears, double experts, double rate) const {
    return layout_.tokens / tp_ * 2 * (linears / rate + experts / expert_rate_);
  }

  /// All but products; of attention and delta rule a share of the FLOPs.
  Compute compute(std::int64_t layer, double share, double moved) const {
    const LayerWork& work = step_.layers[layer];
    const double tokens = layout_.tokens / tp_;
    Compute c;
    c.attention = tokens * share * work.attention * step_.length / attention_rate_;
    c.delta_rule = tokens * share * work.delta_rule / delta_rate_;
    c.elementwise = elements(moved);
    const double launches = exchanges(layer) ? kLaunchesWithExchange
                            : step_.is_lora  ? kLaunchesWithAdapters
                                             : kLaunches;
    c.launches = share * launches * hardware_.launch_us * 1e-6;
    return c;
  }

  Compute layer_forward(std::int64_t layer) const {
    Compute c = compute(layer, 1.0 / 3, step_.layers[layer].forward + exchanged(layer));
    c.products = products(layer, output_rate(layer));
    if (layout_.size(Dim::kCp) > 1 && layout_.method == ops::ContextMethod::kState)
      c.delta_rule *= 1 + crossing();
    c.launches += wait(layer);
    return c;
  }

  Compute again(std::int64_t layer) const {
    switch (layout_.recompute) {
      case parallel::Recompute::kOff:
        return {};
      case parallel::Recompute::kElementwise: {
        Compute c;
        c.elementwise = elements(step_.layers[layer].again);
        return c;
      }
      case parallel::Recompute::kSelective: {
        // The MLP runs again; the mixer's elementwise operators do.
        Compute c = compute(
            layer, 0,
            step_.layers[layer].again + 2 * width_of(layer) + as_double(step_.model.hidden_size));
        c.products = mlp_again(layer);
        c.launches += wait(layer);
        return c;
      }
      case parallel::Recompute::kFull: {
        Compute c = layer_forward(layer);
        if (!step_.model.layers[layer].moe) c.products -= last_product(layer);
        return c;
      }
    }
    return {};
  }

  /// The product that makes a dense MLP's output, which nothing reads when the MLP runs again.
  double last_product(std::int64_t layer) const {
    return layout_.tokens / tp_ * 2 * as_double(step_.model.hidden_size) * width_of(layer) /
           output_rate(layer);
  }

  /// Width of the dense MLP or the shared expert.
  double width_of(std::int64_t layer) const {
    return as_double(step_.model.layers[layer].dense_width());
  }

  double mlp_again(std::int64_t layer) const {
    if (!step_.model.layers[layer].moe) return 2 * last_product(layer);
    return 3 * last_product(layer) +
           layout_.tokens / tp_ * 2 * step_.layers[layer].experts / expert_rate_;
  }

  /// Share of the tokens in sequences that cross a border of the 2 cp segments: the gated delta
  /// rule runs over them once more (docs/parallel.md).
  double crossing() const {
    const double cp = layout_.size(Dim::kCp);
    return std::min(1.0, (2 * cp - 1) * step_.length / (layout_.tokens * cp));
  }

  /// The gradient of the head's weight is added up in fp32 over chunks of logits; the first writes.
  double head_gradient_bytes(double rows) const {
    const double chunks =
        std::ceil(rows * as_double(step_.model.vocab_size) * step_.element / logits_bytes(true));
    return (chunks > 1 ? 8 * chunks - 4 + 2 * step_.gradient : 2 * step_.gradient) *
           step_.vocabulary_elements();
  }

  const StepOnRanks& layout_;
  const Step& step_;
  const Hardware& hardware_;
  double product_rate_, expert_rate_, attention_rate_, delta_rate_, memory_rate_, tp_;
};

/// How fast, and with what latency, the ranks along some dimensions reach each other.
struct Link {
  double bytes_per_s, latency_s;
};

Link link_over(const StepOnRanks& layout, const Traffic& traffic, const Hardware& hardware) {
  const std::vector<std::int64_t> ranks = layout.mesh.ranks_along(traffic.over);
  const std::int64_t host = ranks.front() / hardware.gpus_per_host;
  const auto here = std::count_if(ranks.begin(), ranks.end(), [&](std::int64_t rank) {
    return rank / hardware.gpus_per_host == host;
  });
  const double doublings = std::bit_width(static_cast<std::uint64_t>(ranks.size() - 1));
  if (here == static_cast<std::ptrdiff_t>(ranks.size())) {
    return {hardware.host_link_gbs * 1e9 * hardware.links,
            doublings * hardware.host_latency_us * 1e-6};
  }
  // Each GPU has its own way out of the host, and the members of a group there share them all. In
  // an exchange of all with all only what goes to other hosts takes it.
  const bool is_exchange = traffic.over.front() == Dim::kEp;
  const double ways = is_exchange ? as_double(static_cast<std::int64_t>(ranks.size())) /
                                        as_double(static_cast<std::int64_t>(ranks.size()) - here)
                                  : as_double(here);
  const double network = hardware.network_gbs * ways;
  return {std::min(network, hardware.host_link_gbs) * 1e9 * hardware.links,
          doublings * hardware.network_latency_us * 1e-6};
}

}  // namespace

double StepTime::communication() const {
  return std::accumulate(exposed.begin(), exposed.end(), 0.0);
}

StepTime time_of(const StepOnRanks& layout, const std::vector<Traffic>& traffic,
                 const Hardware& hardware) {
  const Timer timer(layout, hardware);
  const double m = layout.micro_batches, pp = as_double(layout.stages.ranks);
  // By rank of the pipeline: one micro-batch, and of it forward and backward of the blocks.
  StepTime time;
  double longest = 0, all = 0, optimizer = 0, forward_s = 0, backward_s = 0;
  for (std::int64_t rank = 0; rank < layout.stages.ranks; ++rank) {
    const Compute forward = timer.forward(rank), backward = timer.backward(rank);
    Compute c = forward;
    c += backward;
    c += timer.ends(rank);
    c.elementwise += timer.copies(rank);
    all += c.sum();
    optimizer = std::max(optimizer, timer.optimizer(rank));
    if (c.sum() < longest) continue;
    longest = c.sum();
    forward_s = forward.sum();
    backward_s = backward.sum();
    time.products = m * c.products;
    time.attention = m * c.attention;
    time.delta_rule = m * c.delta_rule;
    time.elementwise = m * c.elementwise;
    time.idle = m * c.launches + hardware.step_ms * 1e-3;
  }
  time.optimizer = optimizer;
  double in_micro_batches = 0, after = 0;
  for (const Traffic& row : traffic) {
    const Link link = link_over(layout, row, hardware);
    const double transfer = row.bytes / link.bytes_per_s + row.calls * link.latency_s;
    const double hidden = row.hiding == Hiding::kForward        ? m * forward_s
                          : row.hiding == Hiding::kBackward     ? m * backward_s
                          : row.hiding == Hiding::kLastBackward ? backward_s
                                                                : 0;
    const double exposed = std::max(0.0, transfer - hidden);
    time.exposed.push_back(exposed);
    // A micro-batch's messages also delay the stages after it.
    (row.calls >= 2 * m ? in_micro_batches : after) += exposed;
  }
  // 1F1B: all stages once, and the slowest for every further micro-batch; with several chunks a
  // rank's share of the first pass is that much shorter.
  const double communication = in_micro_batches / m;
  const double fill =
      (all + pp * communication - longest - communication) / as_double(layout.stages.chunks);
  time.waiting = fill;
  time.total =
      m * longest + in_micro_batches + fill + after + time.optimizer + hardware.step_ms * 1e-3;
  return time;
}

}  // namespace heddle::plan
