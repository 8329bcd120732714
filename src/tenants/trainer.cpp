#include "tenants/trainer.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "device/device.h"
#include "device/upload.h"
#include "objective/language_model.h"
#include "tenants/cuts.h"
#include "tenants/joint_passes.h"
#include "tenants/loss.h"
#include "tenants/recorded_passes.h"
#include "tenants/trained_set.h"

namespace heddle::tenants {
namespace {

/// Rows of the head for each target in the place of one a token. Its rows are read again for each.
void give_targets(objective::LossRows& rows, const Targets& targets) {
  const c10::Device device = rows.labels.device();
  std::vector<std::int64_t> places;
  for (const std::int64_t position : targets.positions)
    places.push_back(rows.tokens[static_cast<std::size_t>(position)]);
  rows.total = std::ssize(places);
  rows.index = device::upload(places, device);
  rows.labels = device::upload(targets.tokens, device);
  rows.loss_weights = at::ones({rows.total}, rows.loss_weights.options());
  rows.gradient_weights = rows.loss_weights;
  rows.tokens = std::move(places);
}

/// Some cuts and the sets that they are of, in the same order.
struct CutsOfPass {
  std::span<const Cut> cuts;
  std::span<const adapters::LoraSet* const> sets;
};

/// Log-probabilities of all rows of some cuts first; then each cut's loss and the gradient by its
/// own.
PassHeadResult apply_head(assembly::Model& model, const CutsOfPass& pass, const at::Tensor& hidden,
                          const objective::LocalBatch& batch) {
  const std::span<const Cut> cuts = pass.cuts;
  const bool wants_gradients = !cuts[0].work->forward_only;
  objective::LossRows rows(model, batch.host, 1);
  if (const auto soft = soft_targets_of(cuts)) give_targets(rows, *soft);
  std::vector<objective::ChangedHeadRows> changed;
  for (std::size_t i = 0; i < cuts.size(); ++i)
    changed.push_back({pass.sets[i]->of(*model.lm_head()), cuts[i].rows});
  const auto on_device = [&](const std::vector<double>& derivatives) {
    return device::upload(at::tensor(derivatives, at::kDouble).to(rows.loss_weights.scalar_type()),
                          hidden.device());
  };
  at::Tensor known;
  if (const auto constant = constant_derivatives(cuts); constant && wants_gradients)
    known = on_device(*constant);
  objective::TokenLogprobs logprobs(model, hidden, rows,
                                    {.want_gradients = wants_gradients,
                                     .changed = std::move(changed),
                                     .known_derivatives = known});
  const at::Tensor host = logprobs.values().to(at::kCPU, at::kDouble).contiguous();
  const CutLosses losses =
      losses_of(cuts, {host.const_data_ptr<double>(), static_cast<std::size_t>(host.numel())});
  PassHeadResult result;
  for (const double sum : losses.sums)
    result.losses.push_back(at::tensor(sum, rows.loss_weights.options()));
  if (wants_gradients) result.grad_hidden = logprobs.gradient(on_device(losses.d_logprobs));
  return result;
}

/// The head of one cut alone, whose products are then those of the cut alone.
objective::HeadFunction head_of(assembly::Model& model, const Cut& cut,
                                const adapters::LoraSet& set) {
  return [&model, cut, &set](const at::Tensor& hidden, const objective::LocalBatch& batch) {
    const adapters::LoraSet* const own_set = &set;
    const PassHeadResult own = apply_head(model, {{&cut, 1}, {&own_set, 1}}, hidden, batch);
    return objective::HeadResult{own.losses[0], own.grad_hidden};
  };
}

/// While it lives, sets of one pass have products of their own if `is_wanted`: see
/// nn::changed_linears.
class ExactPasses {
 public:
  explicit ExactPasses(bool is_wanted) : before_(at::globalContext().deterministicAlgorithms()) {
    if (is_wanted && !before_) device::set_deterministic(true);
  }
  ~ExactPasses() { device::set_deterministic(before_); }
  ExactPasses(const ExactPasses&) = delete;
  ExactPasses& operator=(const ExactPasses&) = delete;

 private:
  bool before_;
};

/// Checks that there are as many targets as tokens or, with soft targets, as cells.
void check_targets(const Datum& datum, std::size_t i) {
  const std::size_t wanted =
      datum.has_soft_targets() ? datum.target_cells.size() : datum.tokens.size();
  if (datum.target_tokens.size() != wanted) {
    throw_error<DataError>("datum {}: 'target_tokens' has {} values for {} {}", i,
                           datum.target_tokens.size(), wanted,
                           datum.has_soft_targets() ? "cells" : "tokens");
  }
  const std::int64_t cells = std::ssize(datum.tokens) * datum.target_width;
  std::int64_t last = -1;
  for (const std::int64_t cell : datum.target_cells) {
    if (cell <= last || cell >= cells)
      throw_error<DataError>("datum {}: target cell {} after {}: expected ascending ones below {}",
                             i, cell, last, cells);
    last = cell;
  }
}

void check_promises(const assembly::ModelOnRanks& base, const TrainerOptions& options) {
  if (options.deterministic && !base.context.device.is_cpu()) {
    throw_error<ConfigError>(
        "deterministic: that a set's bits do not depend on others is shown on the CPU alone; leave "
        "it out on {}",
        base.context.device.str());
  }
  if (base.context.mesh.world_size() > 1) {
    throw_error<ConfigError>(
        "parallel.*: serving the training of many adapters on {} ranks is not built; start one "
        "rank, or train them by heddle sft with adapters:",
        base.context.mesh.world_size());
  }
}

}  // namespace

struct Trainer::State {
  assembly::ModelOnRanks& base;
  TrainerOptions options;
  std::map<SetId, TrainedSet> sets = {};
  SetId last_id = 0;
  std::vector<PassShape> shapes = {};
  std::unique_ptr<RecordedPasses> recorded = {};  ///< Null: passes are launched.

  TrainedSet& at(SetId id) {
    const auto it = sets.find(id);
    if (it == sets.end()) throw_error<DataError>("there is no set of adapters {}", id);
    return it->second;
  }
  SetId add(TrainedSet set) {
    sets.emplace(++last_id, std::move(set));
    return last_id;
  }
  void run(const std::vector<Cut>& cuts, bool wants_gradients);
  void launch(const std::vector<std::vector<Cut>>& planned,
              const std::vector<std::vector<Piece>>& passes, bool wants_gradients);
  /// Puts alike cuts of a pass in the same order in every pass, whoever they belong to.
  void sort(std::vector<Cut>& pass);
  void drop_gradients(std::span<const Work> works);
  /// Whether a graph did all of the pass.
  bool replay(const std::vector<Cut>& pass, const std::vector<Piece>& pieces);
};

Trainer::Trainer(assembly::ModelOnRanks& base, const TrainerOptions& options)
    : state_(std::make_unique<State>(State{base, options})) {
  check_promises(base, options);
  if (!options.records || options.deterministic) return;
  const std::string reason = RecordedPasses::why_not(base);
  if (reason.empty()) {
    state_->recorded = std::make_unique<RecordedPasses>(base);
  } else if (base.context.device.is_cuda()) {
    log::info("training passes are not recorded as graphs: {}", reason);
  }
}
Trainer::~Trainer() = default;

SetId Trainer::create(const SetOptions& options) {
  return state_->add(make_trained_set(state_->base, options));
}
void Trainer::remove(SetId set) {
  if (state_->recorded) state_->recorded->forget(*state_->at(set).factors);
  state_->at(set);
  state_->sets.erase(set);
}
const SetOptions& Trainer::options(SetId set) const { return state_->at(set).options; }
std::int64_t Trainer::steps(SetId set) const { return state_->at(set).optimizer->steps(); }

void Trainer::check(const Work& work) const {
  state_->at(work.set);
  if (work.data.empty()) throw DataError("data: expected at least one datum, found none");
  const std::int64_t vocabulary = state_->base.model->config().vocab_size;
  for (std::size_t i = 0; i < work.data.size(); ++i) {
    const Datum& datum = work.data[i];
    if (datum.tokens.empty()) throw_error<DataError>("datum {}: no token", i);
    check_targets(datum, i);
    for (const auto* ids : {&datum.tokens, &datum.target_tokens}) {
      const auto wrong = std::find_if(ids->begin(), ids->end(),
                                      [&](std::int64_t id) { return id < 0 || id >= vocabulary; });
      if (wrong == ids->end()) continue;
      throw_error<DataError>("datum {}: {} {} at position {} is not in the vocabulary of {}", i,
                             ids == &datum.tokens ? "token" : "target", *wrong,
                             wrong - ids->begin(), vocabulary);
    }
  }
  check_loss(work);
}

void Trainer::State::sort(std::vector<Cut>& pass) {
  std::vector<std::pair<std::vector<std::int64_t>, Cut>> keyed;
  for (const Cut& cut : pass) {
    std::vector<std::int64_t> lengths;
    for (const Datum& datum : cut.data) lengths.push_back(std::ssize(datum.tokens));
    keyed.emplace_back(recorded->order_of(*at(cut.work->set).factors, lengths), cut);
  }
  std::ranges::stable_sort(
      keyed, {}, [](const auto& entry) -> const auto& { return entry.first; });
  for (std::size_t i = 0; i < pass.size(); ++i) pass[i] = keyed[i].second;
}

bool Trainer::State::replay(const std::vector<Cut>& pass, const std::vector<Piece>& pieces) {
  CutLosses losses;
  const RecordedPasses::Loss loss{.derivatives =
                                      [&](std::span<const double> logprobs) {
                                        losses = losses_of(pass, logprobs);
                                        return losses.d_logprobs;
                                      },
                                  .constant = constant_derivatives(pass)};
  const bool done = recorded->run(pieces, loss);
  // Rounded as where they go through the device.
  for (std::size_t i = 0; done && i < pass.size(); ++i)
    pass[i].result->metrics["loss:sum"] += static_cast<float>(losses.sums[i]);
  return done;
}

void Trainer::State::launch(const std::vector<std::vector<Cut>>& planned,
                            const std::vector<std::vector<Piece>>& passes, bool wants_gradients) {
  JointOptions joint{.wants_gradients = wants_gradients};
  if (!options.deterministic) {
    joint.pass_head = [&](std::size_t pass, const at::Tensor& hidden,
                          const objective::LocalBatch& batch) {
      std::vector<const adapters::LoraSet*> sets;
      for (const Piece& piece : passes[pass]) sets.push_back(piece.set);
      return apply_head(*base.model, {planned[pass], sets}, hidden, batch);
    };
  }
  const auto sums = run_joint_passes(base, passes, joint);
  for (std::size_t p = 0; p < planned.size(); ++p) {
    for (std::size_t i = 0; i < planned[p].size(); ++i)
      planned[p][i].result->metrics["loss:sum"] += sums[p][i].loss;
  }
}

void Trainer::State::run(const std::vector<Cut>& cuts, bool wants_gradients) {
  const bool may_replay = recorded && wants_gradients;
  std::vector<std::vector<Cut>> planned = passes_of(cuts, options.pass_tokens);
  std::vector<std::vector<Piece>> passes;
  for (std::vector<Cut>& pass : planned) {
    if (may_replay) sort(pass);
    std::vector<Piece> pieces;
    // A set has one cut in a pass.
    PassShape shape{.sets = static_cast<std::int64_t>(pass.size())};
    for (const Cut& cut : pass) {
      shape.sequences += static_cast<std::int64_t>(cut.data.size());
      shape.tokens += cut.tokens;
      const adapters::LoraSet& set = *at(cut.work->set).factors;
      pieces.push_back(
          {.set = &set, .batch = batch_of(cut.data), .head = head_of(*base.model, cut, set)});
    }
    if (may_replay) {
      // One by one: a set's sums come in the order of its cuts.
      shape.recorded = !soft_targets_of(pass) && replay(pass, pieces);
      if (!shape.recorded) launch({pass}, {std::move(pieces)}, wants_gradients);
    } else {
      passes.push_back(std::move(pieces));
    }
    shapes.push_back(shape);
  }
  if (!may_replay) launch(planned, passes, wants_gradients);
}

/// After a pass that failed with a part of the gradients added, if any.
void Trainer::State::drop_gradients(std::span<const Work> works) {
  for (const Work& work : works) {
    const auto found = sets.find(work.set);
    if (!work.forward_only && found != sets.end())
      found->second.drop_gradients(/*refuses_step=*/true);
  }
}

const std::vector<PassShape>& Trainer::last_passes() const { return state_->shapes; }

std::vector<WorkResult> Trainer::forward_backward(std::span<const Work> works) {
  state_->shapes.clear();
  std::vector<WorkResult> results(works.size());
  std::vector<Cut> forward, both;
  for (std::size_t i = 0; i < works.size(); ++i) {
    try {
      check(works[i]);
    } catch (const DataError& error) {
      results[i].error = error.what();
      continue;
    }
    results[i].data.resize(works[i].data.size());
    const std::vector<Cut> cuts = cuts_of(works[i], results[i], state_->options.pass_tokens);
    std::vector<Cut>& all = works[i].forward_only ? forward : both;
    all.insert(all.end(), cuts.begin(), cuts.end());
  }
  const ExactPasses exact(state_->options.deterministic);
  try {
    state_->run(forward, /*wants_gradients=*/false);
    state_->run(both, /*wants_gradients=*/true);
  } catch (const c10::OutOfMemoryError& error) {
    state_->drop_gradients(works);
    log::error("a training pass: {}", error.what_without_backtrace());
    throw_error<DeviceError>(
        "{} has no memory left for a training pass: expected shorter sequences, or fewer runs in "
        "memory",
        state_->base.context.device.str());
  } catch (...) {
    state_->drop_gradients(works);
    throw;
  }
  return results;
}

StepResult Trainer::optim_step(SetId set, const AdamParams& params) {
  const SetUpdate update{set, params};
  return optim_steps({&update, 1})[0];
}

std::vector<StepResult> Trainer::optim_steps(std::span<const SetUpdate> updates) {
  std::set<SetId> seen;
  for (const SetUpdate& update : updates) {
    state_->at(update.set);
    if (!seen.insert(update.set).second)
      throw_error<DataError>("the set of adapters {} has two updates in one step", update.set);
  }
  std::vector<StepResult> results(updates.size());
  std::vector<std::size_t> stepping;
  std::vector<SetStep> steps;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const auto& [id, params] = updates[i];
    TrainedSet& set = state_->at(id);
    if (set.refuses_step) {
      set.drop_gradients(/*refuses_step=*/false);
      results[i] = {.updated = false,
                    .error =
                        "a forward_backward since the last step failed, and the gradients were "
                        "dropped: send all of the step again"};
      continue;
    }
    set.optimizer->set_adamw(params.beta1, params.beta2, params.eps, params.weight_decay);
    steps.push_back(
        {.optimizer = set.optimizer.get(), .lr = params.lr, .clip_norm = params.grad_clip_norm});
    stepping.push_back(i);
  }
  // The host knows the norms; the device has yet to update. What comes next is queued behind it.
  const std::vector<StepResult> stepped = step(state_->base, steps);
  for (std::size_t s = 0; s < stepped.size(); ++s) {
    StepResult& result = results[stepping[s]];
    result = stepped[s];
    TrainedSet& set = state_->at(updates[stepping[s]].set);
    if (result.updated)
      result.warning = set.untrained.after_step(*set.optimizer, steps[s].lr, result.grad_norm);
  }
  return results;
}

void Trainer::drop_gradients(SetId set, bool refuses_step) {
  state_->at(set).drop_gradients(refuses_step);
}

void Trainer::save(SetId set, const std::filesystem::path& directory, SavedFor purpose,
                   bool overwrite) const {
  save_trained_set(state_->base, state_->at(set), directory, purpose, overwrite);
}

SetId Trainer::load(const std::filesystem::path& directory, bool with_optimizer) {
  return state_->add(load_trained_set(state_->base, directory, with_optimizer));
}

bool Trainer::is_finite(SetId set) const {
  const ops::NoGradient guard;
  at::Tensor all;
  state_->at(set).factors->visit_parameters([&](const nn::Parameter& factor) {
    const at::Tensor own = at::isfinite(factor.data()).all();
    all = all.defined() ? at::logical_and(all, own) : own;
  });
  return !all.defined() || all.item<bool>();
}

std::shared_ptr<const adapters::LoraSet> Trainer::snapshot(SetId set) const {
  return copy_of(state_->base, *state_->at(set).factors);
}

void Trainer::save_snapshot(const adapters::LoraSet& set,
                            const std::filesystem::path& directory) const {
  save_factors(state_->base, set, directory);
}

std::shared_ptr<const adapters::LoraSet> Trainer::load_snapshot(
    const std::filesystem::path& directory) const {
  return load_factors(state_->base, directory);
}

std::int64_t Trainer::bytes(SetId id) const {
  const TrainedSet& set = state_->at(id);
  std::int64_t bytes = set.optimizer->state_bytes();
  set.factors->visit_parameters([&](nn::Parameter& factor) {
    bytes += static_cast<std::int64_t>(factor.owned().nbytes());
    if (factor.gradient().defined()) bytes += static_cast<std::int64_t>(factor.gradient().nbytes());
  });
  return bytes;
}

}  // namespace heddle::tenants
