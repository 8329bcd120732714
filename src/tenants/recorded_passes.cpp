#include "tenants/recorded_passes.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "device/device.h"
#include "device/download.h"
#include "device/upload.h"
#include "objective/language_model.h"
#include "ops/autograd.h"
#include "ops/kernel_choice.h"
#include "ops/moe/moe.h"

namespace heddle::tenants {
namespace {

constexpr std::size_t kMostGraphs = 32;
constexpr int kMostReleases = 8;
constexpr std::size_t kMostRefused = 8;

std::vector<const adapters::LoraSet*> sets_of(std::span<const Piece> pieces) {
  std::vector<const adapters::LoraSet*> sets;
  for (const Piece& piece : pieces) sets.push_back(piece.set);
  return sets;
}

/// The adapters of the head by rows of a recorded pass, on one rank. Its rows are those with a
/// label, and a short piece has others besides.
std::vector<objective::ChangedHeadRows> changed_heads(assembly::Model& model,
                                                      const objective::LocalBatch& batch,
                                                      std::span<const Piece> pieces) {
  std::vector<objective::ChangedHeadRows> changed;
  for (std::size_t p = 0; p < pieces.size(); ++p)
    changed.push_back({batch.adapters[p].set->of(*model.lm_head()), pieces[p].batch.size()});
  return changed;
}

}  // namespace

std::string RecordedPasses::why_not(const assembly::ModelOnRanks& base) {
  if (!base.context.device.is_cuda()) return "the device is no GPU";
  if (base.context.mesh.world_size() > 1) return "several ranks train together";
  if (base.model->config().is_moe() &&
      ops::runs_reference(base.model->kernels(), ops::MoeExperts::kName))
    return "the reference kernel of the experts counts rows on the host";
  return {};
}

RecordedPasses::RecordedPasses(assembly::ModelOnRanks& base) : base_(base), places_(kMostGraphs) {}

bool RecordedPasses::run(std::span<const Piece> pieces, const Loss& loss) {
  Recorded* const pass = recorded_for(pieces, loss.constant.has_value());
  if (pass == nullptr) {
    make_room();
    return false;
  }
  const std::vector<const adapters::LoraSet*> sets = sets_of(pieces);
  stand_ins_.bring(pass->places, sets);
  const auto give = [&](const std::vector<double>& derivatives) {
    const at::Tensor wide = at::tensor(derivatives, at::kDouble).to(pass->d_values.scalar_type());
    pass->d_values.copy_(device::upload(wide, pass->d_values.device()));
  };
  if (loss.constant) give(*loss.constant);
  pass->forward->replay();
  device::Download values({pass->values});
  if (loss.constant) pass->backward->replay();
  const at::Tensor logprobs = values.wait()[0].to(at::kDouble);
  const std::vector<double> derivatives = loss.derivatives(
      {logprobs.const_data_ptr<double>(), static_cast<std::size_t>(logprobs.numel())});
  if (!loss.constant) {
    give(derivatives);
    pass->backward->replay();
  }
  stand_ins_.lend(pass->places, sets);
  return true;
}

void RecordedPasses::forget(const adapters::LoraSet& set) {
  stand_ins_.forget(set);
  for (Recorded& pass : recorded_) {
    for (StandIns::Place& place : pass.places)
      if (place.borrower == &set) place.borrower = nullptr;
  }
}

RecordedPasses::Shape RecordedPasses::shape_of(std::span<const Piece> pieces,
                                               bool has_derivatives) {
  // They change the launches of heads with adapters alone.
  const bool is_changed = std::ranges::any_of(pieces, [&](const Piece& piece) {
    return piece.set->of(*base_.model->lm_head()) != nullptr;
  });
  Shape shape = {at::globalContext().deterministicAlgorithms(), is_changed && has_derivatives};
  for (const Piece& piece : pieces) {
    const data::Batch& batch = piece.batch;
    shape.insert(shape.end(), {stand_ins_.structure_of(*piece.set), batch.size(), batch.real_tokens,
                               batch.position_ids.dim(), std::ssize(batch.cu_seqlens_host)});
    shape.insert(shape.end(), batch.cu_seqlens_host.begin(), batch.cu_seqlens_host.end());
  }
  return shape;
}

RecordedPasses::Recorded* RecordedPasses::recorded_for(std::span<const Piece> pieces,
                                                       bool has_derivatives) {
  if (!records_) return nullptr;
  const Shape shape = shape_of(pieces, has_derivatives);
  places_.meet(shape);
  const auto known =
      std::ranges::find_if(recorded_, [&](const Recorded& pass) { return pass.shape == shape; });
  if (known != recorded_.end()) {
    refill(*known, pieces);
    return &*known;
  }
  if (std::ranges::find(refused_, shape) != refused_.end()) return nullptr;
  std::vector<Shape> shapes;
  for (const Recorded& pass : recorded_) shapes.push_back(pass.shape);
  const auto [is_recorded, instead] = places_.judge(shape, shapes);
  if (!is_recorded) return nullptr;
  if (instead) drop_graph(*instead);
  return record(shape, pieces, has_derivatives);
}

void RecordedPasses::refill(Recorded& pass, std::span<const Piece> pieces) {
  const at::Tensor &tokens = pass.batch.device.tokens, &labels = pass.rows.labels;
  const at::Tensor own_tokens = at::zeros(tokens.sizes(), at::kLong),
                   own_labels = at::empty(labels.sizes(), at::kLong);
  std::int64_t first = 0, first_label = 0;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const data::Batch& batch = pieces[p].batch;
    own_tokens.narrow(0, first, batch.size()).copy_(batch.tokens);
    own_labels.narrow(0, first_label, batch.size()).copy_(batch.labels);
    first += pass.batch.adapters[p].rows;
    first_label += batch.size();
  }
  tokens.copy_(device::upload(own_tokens, tokens.device()));
  labels.copy_(device::upload(own_labels, labels.device()));
}

RecordedPasses::Recorded* RecordedPasses::record(const Shape& shape, std::span<const Piece> pieces,
                                                 bool has_derivatives) {
  const std::size_t others = recorded_.size();
  try {
    objective::LocalBatch batch = joint_batch(*base_.model, pieces);
    objective::LossRows rows(*base_.model, batch.host, 1);
    recorded_.push_back({shape,
                         std::move(batch),
                         std::move(rows),
                         stand_ins_.places_for(sets_of(pieces)),
                         {},
                         {},
                         nullptr,
                         nullptr});
    Recorded& pass = recorded_.back();
    for (std::size_t p = 0; p < pass.places.size(); ++p)
      pass.batch.adapters[p].set = pass.places[p].set.get();
    queue(pass, pieces, has_derivatives);
    return &pass;
  } catch (const std::exception& error) {
    while (recorded_.size() > others) recorded_.pop_back();
    stand_ins_.drop_unused();
    refuse(shape, error.what());
    return nullptr;
  }
}

void RecordedPasses::queue(Recorded& pass, std::span<const Piece> pieces, bool has_derivatives) {
  assembly::Model& model = *base_.model;
  parallel::BlockRunner& blocks = base_.pipeline->stages().front().runner;
  const c10::Device device = base_.context.device;
  parallel::BlockRunner::Tape tape;
  std::optional<objective::TokenLogprobs> logprobs;
  const device::Graph* const neighbour =
      recorded_.size() > 1 ? recorded_.front().backward.get() : nullptr;
  pass.d_values = at::zeros({pass.rows.total}, pass.rows.loss_weights.options());
  pass.forward = device::record(
      device,
      [&] {
        const at::Tensor hidden =
            blocks.forward(pass.batch.embed(model), pass.batch.pass(model, /*training=*/true),
                           /*wants_input_gradient=*/false, tape);
        logprobs.emplace(model, hidden, pass.rows,
                         objective::TokenLogprobs::Options{
                             .want_gradients = true,
                             .changed = changed_heads(model, pass.batch, pieces),
                             .known_derivatives = has_derivatives ? pass.d_values : at::Tensor()});
        pass.values = logprobs->values();
      },
      neighbour);
  pass.backward = device::record(
      device,
      [&] {
        blocks.backward(logprobs->gradient(pass.d_values), /*auxiliary_scale=*/0, tape);
        for (StandIns::Place& place : pass.places) {
          place.set->visit_parameters([&](nn::Parameter& factor) {
            factor.collect_gradient();
            place.gradients.push_back(factor.gradient());
            factor.clear_gradient();
          });
        }
      },
      pass.forward.get());
}

void RecordedPasses::drop_graph(std::size_t index) {
  device::synchronize(base_.context.device);  // which may be at it
  recorded_.erase(recorded_.begin() + static_cast<std::ptrdiff_t>(index));
  stand_ins_.drop_unused();
}

void RecordedPasses::drop_graphs() {
  device::synchronize(base_.context.device);  // which may be at one of them
  recorded_.clear();
  stand_ins_.drop_unused();
}

void RecordedPasses::refuse(const Shape& shape, const std::string& reason) {
  log::warning("training passes of one shape are queued launch by launch: {}", reason);
  refused_.push_back(shape);
  if (refused_.size() > kMostRefused) give_up("too many shapes cannot be");
}

void RecordedPasses::give_up(const std::string& reason) {
  log::warning("training passes are not recorded as graphs from here on: {}", reason);
  records_ = false;
  drop_graphs();
}

void RecordedPasses::make_room() {
  if (recorded_.empty()) return;
  const device::Memory memory = device::memory(base_.context.device);
  // A pass needs this beyond what lasts, once in the graphs and once more when it is launched.
  const std::int64_t of_pass = memory.peak_bytes - memory.used_bytes;
  if (memory.used_bytes + 2 * of_pass <= memory.total_bytes / 20 * 19) return;
  if (++releases_ > kMostReleases)
    return give_up("graphs and passes of other shapes do not fit the memory together");
  log::info(
      "{} recorded training passes are given up for the memory of one of another shape; they are "
      "recorded anew when they come again",
      recorded_.size());
  drop_graphs();
}

}  // namespace heddle::tenants
