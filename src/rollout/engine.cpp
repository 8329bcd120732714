#include "rollout/engine.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "assembly/model_units.h"
#include "assembly/not_finite.h"
#include "base/errors.h"
#include "ops/autograd.h"
#include "ops/collectives.h"

namespace heddle::rollout {

using comm::Dim;

Engine::Engine(assembly::ModelOnRanks& placed, std::shared_ptr<const data::Tokenizer> tokenizer,
               const EngineOptions& options)
    : placed_(placed), tokenizer_(std::move(tokenizer)), options_(options) {
  const comm::Mesh& mesh = placed.context.mesh;
  if (mesh.size(Dim::kCp) > 1) {
    throw_error<ConfigError>(
        "parallel.cp is {}: expected 1 for generation, a cache holds whole sequences; divide the "
        "model with parallel.tp, pp, ep or fsdp",
        mesh.size(Dim::kCp));
  }
  // make_unique would move, which Acquired does not allow; here the result is built in place.
  ends_.reset(new parallel::Acquired(assembly::acquire_ends(placed.sharding.get(), *placed.model)));
  const std::int64_t ranks = mesh.data_size(), tp = mesh.size(Dim::kTp);
  own_slots_ = (options.max_sequences + ranks - 1) / ranks;
  const bool can_record = options.record_steps && RecordedDecoding::why_not(placed).empty();
  const std::int64_t dummies = ranks * tp > 1 ? tp : can_record ? 1 : 0;
  cache_ = placed.model->make_cache(own_slots_ + dummies, options.capacity);
  if (can_record)
    recorded_ = std::make_unique<RecordedDecoding>(placed_, cache_, options.capacity, own_slots_);
  taken_.resize(static_cast<std::size_t>(own_slots_ * ranks));
}

void Engine::check(const Request& request) const {
  if (request.prompt.empty()) throw DataError("the prompt has no token");
  const std::int64_t vocabulary = placed_.model->config().vocab_size;
  for (const std::int32_t id : request.prompt) {
    if (id < 0 || id >= vocabulary)
      throw_error<DataError>("token id {} is outside the model's vocabulary of {}", id, vocabulary);
  }
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  if (prompt + request.max_new_tokens > options_.capacity) {
    throw_error<DataError>(
        "a prompt of {} tokens and max_new_tokens {} exceed the engine's capacity of {} tokens",
        prompt, request.max_new_tokens, options_.capacity);
  }
}

RequestId Engine::submit(Request request) {
  check(request);
  TextStream text(tokenizer_, request.stop_strings);
  std::vector<std::int32_t> tokens = request.prompt;
  waiting_.push_back(std::make_unique<Sequence>(
      Sequence{next_id_, std::move(request), std::move(text), std::move(tokens)}));
  return next_id_++;
}

std::int64_t Engine::data_rank_of(std::int64_t slot) const { return slot / own_slots_; }

/// A free slot of the data rank that has the fewest sequences; -1 if there is none.
std::int64_t Engine::free_slot() const {
  const std::int64_t ranks = placed_.context.mesh.data_size();
  std::vector<std::int64_t> load(static_cast<std::size_t>(ranks)), first(load.size(), -1);
  for (std::int64_t slot = own_slots_ * ranks; slot-- > 0;) {
    const auto rank = static_cast<std::size_t>(data_rank_of(slot));
    if (taken_[static_cast<std::size_t>(slot)]) {
      ++load[rank];
    } else {
      first[rank] = slot;
    }
  }
  return first[static_cast<std::size_t>(std::min_element(load.begin(), load.end()) - load.begin())];
}

void Engine::admit(std::vector<Progress>& progress) {
  while (!waiting_.empty()) {
    if (waiting_.front()->request.max_new_tokens <= 0) {
      progress.push_back({waiting_.front()->id, {}, {}, Completion{}});
      waiting_.pop_front();
      continue;
    }
    const std::int64_t slot =
        static_cast<std::int64_t>(running_.size()) < options_.max_sequences ? free_slot() : -1;
    if (slot < 0) return;
    taken_[static_cast<std::size_t>(slot)] = true;
    if (data_rank_of(slot) == placed_.context.mesh.data_rank())
      nn::clear_slot(cache_, slot % own_slots_);
    waiting_.front()->slot = slot;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

/// Prompts, as many tokens as a pass of each data rank takes; without any, one token of every
/// sequence.
std::vector<Engine::Part> Engine::plan() const {
  const bool has_prompts = std::any_of(running_.begin(), running_.end(),
                                       [](const auto& sequence) { return sequence->is_prompt(); });
  std::vector<std::int64_t> rows(static_cast<std::size_t>(placed_.context.mesh.data_size()));
  std::vector<Part> parts;
  for (const auto& sequence : running_) {
    if (has_prompts && !sequence->is_prompt()) continue;
    const std::int64_t rank = data_rank_of(sequence->slot);
    std::int64_t& used = rows[static_cast<std::size_t>(rank)];
    std::int64_t count = sequence->pending();
    if (has_prompts) count = std::min(count, options_.prefill_tokens - used);
    if (count <= 0) continue;
    used += count;
    parts.push_back({sequence.get(), count, rank, used - 1});
  }
  return parts;
}

at::Tensor Engine::run(std::vector<Part>& parts) {
  models::Model& model = *placed_.model;
  const std::int64_t own_rank = placed_.context.mesh.data_rank();
  std::vector<std::int64_t> tokens;
  std::vector<std::int32_t> boundaries = {0};
  std::vector<std::int64_t> slots, lengths;
  for (const Part& part : parts) {
    Sequence& sequence = *part.sequence;
    const auto first = sequence.tokens.begin() + sequence.cached;
    const std::int64_t before = std::exchange(sequence.cached, sequence.cached + part.count);
    if (part.data_rank != own_rank) continue;
    tokens.insert(tokens.end(), first, first + part.count);
    boundaries.push_back(static_cast<std::int32_t>(tokens.size()));
    slots.push_back(sequence.slot % own_slots_);
    lengths.push_back(before);
  }
  // The ranks along tp divide the rows, and one without a sequence takes part all the same.
  const std::int64_t tp = model.tensor_group().size(),
                     shares = (static_cast<std::int64_t>(tokens.size()) + tp - 1) / tp,
                     rows = std::max<std::int64_t>(1, shares) * tp;
  for (std::int64_t slot = own_slots_; static_cast<std::int64_t>(tokens.size()) < rows; ++slot) {
    tokens.push_back(0);
    boundaries.push_back(static_cast<std::int32_t>(tokens.size()));
    slots.push_back(slot);
    lengths.push_back(0);
  }
  const c10::Device device = placed_.context.device;
  nn::Pass pass = model.cached_pass(
      ops::Sequences::from_host(boundaries, device),
      {&cache_, ops::CacheRows::from_host(std::move(slots), std::move(lengths), device)});
  if (placed_.adapters) pass.adapters = {{placed_.adapters.get(), rows, {}}};
  return placed_.pipeline->evaluate(model, at::tensor(tokens, at::kLong).to(device), pass);
}

/// The next token of each sequence. One rank has the row that it follows from; all learn it.
std::vector<SampledToken> Engine::draw(const at::Tensor& hidden,
                                       const std::vector<Part>& parts) const {
  models::Model& model = *placed_.model;
  std::vector<std::int64_t> rows;
  std::vector<std::size_t> places;
  if (hidden.defined()) {
    const std::int64_t first = hidden.size(0) * model.tensor_group().rank();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::int64_t row = parts[i].last_row - first;
      if (parts[i].data_rank != placed_.context.mesh.data_rank()) continue;
      if (row < 0 || row >= hidden.size(0)) continue;
      rows.push_back(row);
      places.push_back(i);
    }
  }
  const auto count = static_cast<std::int64_t>(parts.size());
  at::Tensor table = at::zeros({count, 2}, at::kDouble);
  double* const entries = table.mutable_data_ptr<double>();
  if (!rows.empty()) {
    const at::Tensor last = hidden.index_select(0, at::tensor(rows, at::kLong).to(hidden.device()));
    std::vector<Draw> draws;
    for (const std::size_t place : places) {
      const Sequence& sequence = *parts[place].sequence;
      draws.push_back({sequence.request.sampling, sequence.completion.output_ids.size()});
    }
    const std::vector<SampledToken> drawn =
        sample(model.kernels(), model.logits(model.final_norm(last)), draws);
    for (std::size_t i = 0; i < places.size(); ++i) {
      entries[2 * places[i]] = drawn[i].id;
      entries[2 * places[i] + 1] = drawn[i].logprob;
    }
  }
  placed_.context.mesh.world_group().all_reduce_sum(table);
  return from_table(table, parts.size());
}

/// One token more of each sequence, which all of them have in the caches but their last.
std::vector<SampledToken> Engine::replay(const std::vector<Part>& parts) {
  std::vector<RecordedDecoding::Row> rows;
  for (const Part& part : parts) {
    Sequence& sequence = *part.sequence;
    rows.push_back({sequence.tokens.back(),
                    sequence.slot,
                    sequence.cached++,
                    {sequence.request.sampling, sequence.completion.output_ids.size()}});
  }
  return recorded_->step(rows);
}

Progress Engine::take(Sequence& sequence, const SampledToken& token) {
  const Request& request = sequence.request;
  // Seen after the ranks have told each other, so that all of them stop.
  if (!std::isfinite(token.logprob)) {
    throw_error<ModelError>("request {}: the logits are not finite, first in {}", sequence.id + 1,
                            assembly::find_not_finite(placed_, sequence.tokens));
  }
  Completion& completion = sequence.completion;
  sequence.tokens.push_back(token.id);
  completion.output_ids.push_back(token.id);
  completion.logprobs.push_back(token.logprob);
  completion.weights_versions.push_back(weights_version_);
  Progress progress{sequence.id, sequence.text.push(token.id), token, {}};
  const bool has_stopped = sequence.text.stopped() ||
                           std::find(request.stop_ids.begin(), request.stop_ids.end(), token.id) !=
                               request.stop_ids.end();
  const bool has_ended = has_stopped || static_cast<std::int64_t>(completion.output_ids.size()) >=
                                            request.max_new_tokens;
  if (has_ended) progress.text += sequence.text.finish();
  completion.text += progress.text;
  if (has_ended) {
    completion.finish_reason = has_stopped ? FinishReason::kStop : FinishReason::kLength;
    progress.completion = std::move(completion);
    taken_[static_cast<std::size_t>(sequence.slot)] = false;
  }
  return progress;
}

std::vector<Progress> Engine::step() {
  const ops::NoGradient guard;
  std::vector<Progress> progress;
  admit(progress);
  std::vector<Part> parts = plan();
  if (parts.empty()) return progress;
  std::vector<SampledToken> tokens;
  if (recorded_ && !parts[0].sequence->is_prompt()) {
    tokens = replay(parts);
  } else {
    const at::Tensor hidden = run(parts);
    std::erase_if(parts, [](const Part& part) { return part.sequence->pending() > 0; });
    if (parts.empty()) return progress;
    tokens = draw(hidden, parts);
  }
  std::vector<const Sequence*> ended;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    progress.push_back(take(*parts[i].sequence, tokens[i]));
    if (progress.back().completion) ended.push_back(parts[i].sequence);
  }
  std::erase_if(running_, [&](const auto& sequence) {
    return std::find(ended.begin(), ended.end(), sequence.get()) != ended.end();
  });
  return progress;
}

Completion Engine::abort(RequestId id) {
  const auto is_it = [id](const auto& sequence) { return sequence->id == id; };
  preempt(id);
  const auto it = std::find_if(waiting_.begin(), waiting_.end(), is_it);
  if (it == waiting_.end())
    throw InternalError(fmt::format("request {} is not under way: it cannot be aborted", id));
  Completion completion = std::move((*it)->completion);
  completion.text += (*it)->text.finish();
  completion.finish_reason = FinishReason::kAborted;
  waiting_.erase(it);
  return completion;
}

void Engine::preempt(RequestId id) {
  const auto it = std::find_if(running_.begin(), running_.end(),
                               [id](const auto& sequence) { return sequence->id == id; });
  if (it == running_.end()) return;
  taken_[static_cast<std::size_t>((*it)->slot)] = false;
  (*it)->slot = -1;
  (*it)->cached = 0;
  waiting_.push_front(std::move(*it));
  running_.erase(it);
}

void Engine::weights_changed(std::int64_t version) {
  weights_version_ = version;
  while (!running_.empty()) preempt(running_.back()->id);
  if (recorded_) recorded_->forget();
  ends_.reset();
  // make_unique would move, which Acquired does not allow; here the result is built in place.
  ends_.reset(
      new parallel::Acquired(assembly::acquire_ends(placed_.sharding.get(), *placed_.model)));
}

std::vector<Completion> generate(assembly::ModelOnRanks& placed,
                                 const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                 const std::vector<Request>& requests, EngineOptions options,
                                 const TextCallback& on_text) {
  if (requests.empty()) return {};
  options.capacity = 0;
  for (const Request& request : requests) {
    options.capacity =
        std::max(options.capacity, static_cast<std::int64_t>(request.prompt.size()) +
                                       std::max<std::int64_t>(0, request.max_new_tokens));
  }
  options.max_sequences =
      std::min(options.max_sequences, static_cast<std::int64_t>(requests.size()));
  Engine engine(placed, tokenizer, options);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    try {
      engine.submit(requests[i]);
    } catch (const DataError& e) {
      throw_error<DataError>("request {}: {}", i + 1, e.what());
    }
  }
  std::vector<Completion> completions(requests.size());
  while (!engine.is_idle()) {
    for (Progress& progress : engine.step()) {
      const auto index = static_cast<std::size_t>(progress.id);
      if (on_text && !progress.text.empty()) on_text(index, progress.text);
      if (progress.completion) completions[index] = std::move(*progress.completion);
    }
  }
  return completions;
}

}  // namespace heddle::rollout
