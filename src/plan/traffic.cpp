#include <algorithm>

#include "plan/step_on_ranks.h"

namespace heddle::plan {
namespace {

using comm::Dim;

class Counter {
 public:
  explicit Counter(const StepOnRanks& layout) : layout_(layout), step_(*layout.step) {
    depth_ = as_double(step_.model.num_hidden_layers()) / layout.size(Dim::kPp);
    backward_ = share_with_backward();
    tokens_ = layout.tokens * layout.micro_batches;
    hidden_ = tokens_ * as_double(step_.model.hidden_size) * step_.element;
  }

  std::vector<Traffic> rows() {
    tensor();
    if (layout_.size(Dim::kCp) > 1) context();
    Held largest;
    for (std::int64_t rank = 0; rank < layout_.stages.ranks; ++rank) {
      const Held held = held_by(layout_, rank);
      if (held.all() > largest.all()) largest = held;
    }
    sharded({Dim::kCp, Dim::kFsdp}, Dim::kDp, layout_.shards(), largest.dense + largest.adapters,
            largest.trained_dense);
    tables(largest);
    if (largest.experts > 0) experts(largest);
    if (layout_.size(Dim::kPp) > 1) {
      const double chunks = as_double(layout_.stages.chunks);
      const double moved = 2 * chunks * hidden_ / layout_.size(Dim::kTp);
      add({Dim::kPp}, "hidden states and gradients between stages", moved,
          2 * chunks * layout_.micro_batches);
    }
    return std::move(rows_);
  }

 private:
  void add(std::vector<Dim> over, const char* what, double bytes, double calls,
           Hiding hiding = Hiding::kNothing) {
    if (bytes > 0) rows_.push_back({std::move(over), what, bytes, calls, hiding});
  }
  /// Share of the layers of a stage, of several stages the most, that have a backward.
  double share_with_backward() const {
    double most = 0;
    for (std::int64_t rank = 0; rank < layout_.stages.ranks; ++rank) {
      const std::vector<std::int64_t> layers = layout_.stages.layers_of(rank);
      const auto count = std::ranges::count_if(
          layers, [&](std::int64_t layer) { return layer >= step_.first_trained; });
      most = std::max(most, as_double(count) / as_double(std::ssize(layers)));
    }
    return most;
  }
  double share_of_others(double ranks) const { return (ranks - 1) / ranks; }
  double layers(bool is_attention) const {
    const auto& all = step_.model.layers;
    return as_double(std::count_if(all.begin(), all.end(),
                                   [&](const models::LayerShape& layer) {
                                     return layer.attention.has_value() == is_attention;
                                   })) /
           layout_.size(Dim::kPp);
  }

  double sparse_layers() const {
    const std::vector<bool> flags = step_.model.sparse_layers();
    return as_double(std::count(flags.begin(), flags.end(), true)) / layout_.size(Dim::kPp);
  }
  bool reruns_mlp() const {
    return layout_.recompute == parallel::Recompute::kFull ||
           layout_.recompute == parallel::Recompute::kSelective;
  }

  void tensor() {
    const double others = share_of_others(layout_.size(Dim::kTp));
    // Mixer and MLP: the gathers forward and backward, the sums forward. When a dense MLP runs
    // again nothing reads its sum.
    const double behind = backward_ * depth_;
    double gathers = 2 * (depth_ + behind), sums = 2 * depth_;
    if (layout_.recompute == parallel::Recompute::kFull) {
      gathers += behind;
      sums += behind;
    }
    if (reruns_mlp()) {
      gathers += behind;
      sums += backward_ * sparse_layers();
    }
    const auto move = [&](const char* what, double times, Hiding hiding) {
      add({Dim::kTp}, what, others * times * hidden_, times * layout_.micro_batches, hiding);
    };
    move("rows of hidden states", gathers, Hiding::kNothing);
    move("sums of hidden states", sums, Hiding::kNothing);
    // The gradients of weights run beside these.
    move("sums of gradients of hidden states", 2 * behind,
         step_.is_lora ? Hiding::kNothing : Hiding::kBackward);
  }

  void context() {
    const double tp = layout_.size(Dim::kTp), cp = layout_.size(Dim::kCp);
    const nn::AttentionDims* attention = step_.model.attention();
    const nn::GatedDeltaNetDims* delta = step_.model.gated_delta_net();
    const double passes = 1 + backward_ * (layout_.recompute == parallel::Recompute::kFull ? 2 : 1);
    const double calls = passes * layout_.micro_batches;
    if (layout_.method == ops::ContextMethod::kUlysses) {
      double elements = 0;
      if (attention != nullptr) {
        const double dim = as_double(attention->head_dim);
        const double q = as_double(attention->num_attention_heads) * dim / tp;
        // With more ranks than heads each has one.
        const double kv = 2 * dim * std::max(1.0, as_double(attention->num_key_value_heads) / tp);
        elements += layers(true) * (2 * q + kv);
      }
      if (delta != nullptr)
        elements += layers(false) * 2 * as_double(delta->key_dim() + delta->value_dim()) / tp;
      const double moved = passes * tokens_ * step_.element * elements;
      add({Dim::kCp}, "tokens to heads and back", share_of_others(cp) * moved, 2 * calls * depth_);
      return;
    }
    add({Dim::kCp}, "keys and values, and gradients",
        share_of_others(cp) * calls * layers(true) * gathered_keys_bytes(layout_),
        calls * layers(true));
    if (delta == nullptr) return;
    // Of all heads.
    const double state = as_double(delta->value_dim() * delta->key_head_dim) / tp * step_.wide;
    const double transition =
        state / as_double(delta->value_head_dim) * as_double(delta->key_head_dim);
    // Two segments on every rank.
    add({Dim::kCp}, "states and transitions, and gradients",
        2 * calls * (cp - 1) * layers(false) * (2 * state + transition), 3 * calls * layers(false));
  }

  /// Adds one kind of parameter: `blocks` elements in all blocks.
  void sharded(const std::vector<Dim>& inner, Dim outer, double shards, double blocks,
               double trained) {
    const double others = share_of_others(shards);
    if (shards > 1) {
      const double gathered = others * layout_.micro_batches * blocks * step_.element;
      const double calls = layout_.micro_batches * depth_;
      add(inner, "weights gathered for the forward", gathered, calls, Hiding::kForward);
      add(inner, "weights gathered for the backward", backward_ * gathered, backward_ * calls,
          Hiding::kBackward);
      const double first = blocks / depth_;
      add(inner, "weights of the first block", others * first * step_.element, 1);
      add_sums(inner, "gradients", others * trained, depth_);
      add(inner, "gradients of the last block", others * std::min(first, trained) * step_.gradient,
          1);
    }
    const double replicas = share_of_others(layout_.size(outer));
    add_sums({outer}, "gradients", replicas * trained / shards, depth_);
    add({outer}, "new weights", replicas * trained / shards * step_.element, depth_);
  }

  /// Adds sums of gradients, hidden by the backward of the blocks before theirs.
  void add_sums(std::vector<Dim> over, const char* what, double elements, double calls) {
    const double times = layout_.sums_every_micro_batch ? layout_.micro_batches : 1;
    add(std::move(over), what, times * elements * step_.gradient, times * calls,
        layout_.sums_every_micro_batch ? Hiding::kBackward : Hiding::kLastBackward);
  }

  /// Embedding and head: gathered for each micro-batch, but for the first while a block runs.
  void tables(const Held& held) {
    const std::vector<Dim> inner = {Dim::kTp, Dim::kCp, Dim::kFsdp};
    const double shards = layout_.table_shards(), others = share_of_others(shards);
    const double one = held.largest_table, m = layout_.micro_batches;
    const double behind = std::max(0.0, m * held.gathered_tables - one);
    add(inner, "embedding and head", others * behind * step_.element, behind / std::max(one, 1.0),
        Hiding::kForward);
    add(inner, "embedding of the first micro-batch", others * one * step_.element, 1);
    // A head of its own has its gradient before the blocks have theirs.
    const double last = std::min(step_.trained_embedding, held.trained_tables);
    add(inner, "gradient of the head", others * (held.trained_tables - last) * step_.gradient, 1,
        Hiding::kLastBackward);
    add(inner, "gradient of the embedding", others * last * step_.gradient, 1);
    const double replicas = share_of_others(layout_.size(Dim::kDp));
    add({Dim::kDp}, "gradient of the embedding",
        replicas * held.trained_tables / shards * step_.gradient, 1);
    add({Dim::kDp}, "new weights", replicas * held.trained_tables / shards * step_.element, 1);
  }

  void experts(const Held& held) {
    sharded({Dim::kEfsdp}, Dim::kEdp, layout_.expert_shards(), held.experts + held.expert_adapters,
            held.trained_experts);
    const double passes = 2 + backward_ * (reruns_mlp() ? 4 : 2);
    const double moved =
        passes * sparse_layers() * hidden_ / layout_.size(Dim::kTp) * layout_.expert_ranks();
    add({Dim::kEp}, "tokens to experts and back, and gradients",
        share_of_others(layout_.size(Dim::kEp)) * moved,
        passes * sparse_layers() * layout_.micro_batches);
  }

  const StepOnRanks& layout_;
  const Step& step_;
  double depth_, backward_, tokens_, hidden_;
  std::vector<Traffic> rows_;
};

}  // namespace

std::vector<Traffic> traffic_of(const StepOnRanks& layout) { return Counter(layout).rows(); }

}  // namespace heddle::plan
