#include "rollout/engine.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "assembly/model_units.h"
#include "assembly/not_finite.h"
#include "base/errors.h"
#include "base/log.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "rollout/experts.h"
#include "rollout/pool_size.h"

namespace heddle::rollout {

using comm::Dim;

Engine::Engine(assembly::ModelOnRanks& placed, std::shared_ptr<const data::Tokenizer> tokenizer,
               const EngineOptions& options)
    : placed_(placed),
      tokenizer_(std::move(tokenizer)),
      options_(options),
      pool_(*placed.model, pool_size(placed, options)),
      scheduler_(pool_, {.sequences = options.max_sequences,
                         .rank_sequences = rank_sequences(placed, options),
                         .prefill_tokens = options.prefill_tokens,
                         .one_set = placed.context.mesh.size(Dim::kEp) > 1,
                         .reads_last_alone = pool_.size().state_dtype.has_value()}) {
  if (options.merge_adapter) merged_ = std::make_unique<MergedAdapter>(placed_);
  // The model's own adapters live as long as the model.
  const std::shared_ptr<const nn::AdapterSet> own(merged_ ? nullptr : placed.adapters.get(),
                                                  [](const auto*) {});
  adapter_ = std::make_shared<const Adapter>(Adapter{"", 0, own});
  if (!options.record_steps) return;
  const std::vector<std::int64_t>& batches = options.caches.graph_batches;
  if (const std::string obstacle = RecordedDecoding::why_not(placed, options.gather_weights);
      obstacle.empty()) {
    recorded_ = std::make_unique<RecordedDecoding>(placed_, pool_, options.capacity, batches);
  } else if (!batches.empty()) {
    log::info("rollout.graph_batches has no effect: steps are launched one by one, {}", obstacle);
  }
}

void Engine::check(const Request& request) const {
  const std::int64_t vocabulary = placed_.model->config().vocab_size;
  const auto check_id = [&](std::int32_t id) {
    if (id < 0 || id >= vocabulary)
      throw_error<DataError>("token id {} is outside the model's vocabulary of {}", id, vocabulary);
  };
  if (request.prompt.empty()) throw DataError("the prompt has no token");
  for (const std::int32_t id : request.prompt) check_id(id);
  for (const auto& [id, bias] : request.sampling.logit_bias) check_id(id);
  for (const std::int32_t id :
       request.min_tokens > 0 ? request.stop_ids : std::vector<std::int32_t>())
    check_id(id);
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  if (prompt + request.max_new_tokens > options_.capacity) {
    throw_error<DataError>(
        "a prompt of {} tokens and max_new_tokens {} exceed the engine's capacity of {} tokens",
        prompt, request.max_new_tokens, options_.capacity);
  }
  const auto expect = [](bool holds, const char* option, auto value, const char* expected) {
    if (!holds) throw_error<DataError>("{} is {}: expected {}", option, value, expected);
  };
  const SamplingOptions& sampling = request.sampling;
  expect(request.samples >= 1, "samples", request.samples, "1 or more");
  expect(request.top_logprobs >= 0, "top_logprobs", request.top_logprobs, "a count, or 0");
  expect(request.prompt_logprobs.value_or(0) >= 0, "prompt_logprobs",
         request.prompt_logprobs.value_or(0), "a count, or 0");
  if (!request.prompt_targets.empty()) {
    const std::int64_t rows = std::ssize(request.prompt_targets),
                       wanted = std::ssize(request.prompt) - 1;
    expect(request.prompt_logprobs && rows == wanted, "prompt_targets", rows,
           "with prompt_logprobs, a row for each token of the prompt but the first");
    for (const auto& row : request.prompt_targets) {
      for (const std::int32_t id : row)
        expect(id >= 0 && id < placed_.model->config().vocab_size, "prompt_targets", id,
               "an id of the vocabulary");
    }
  }
  expect(request.prompt_draws >= 0 && (request.prompt_draws == 0 || request.prompt_logprobs),
         "prompt_draws", request.prompt_draws, "a count, with prompt_logprobs, or 0");
  expect(request.min_tokens >= 0, "min_tokens", request.min_tokens, "a count, or 0");
  expect(std::isfinite(sampling.temperature) && sampling.temperature >= 0, "temperature",
         sampling.temperature, "a number from 0 on");
  expect(sampling.top_p > 0 && sampling.top_p <= 1, "top_p", sampling.top_p,
         "a probability in (0, 1]");
  expect(sampling.min_p >= 0 && sampling.min_p <= 1, "min_p", sampling.min_p,
         "a probability from 0 to 1");
  expect(sampling.top_k >= 0, "top_k", sampling.top_k, "a count, or 0 for all tokens");
  expect(sampling.repetition_penalty > 0 && std::isfinite(sampling.repetition_penalty),
         "repetition_penalty", sampling.repetition_penalty, "a number above 0; 1 has no effect");
  expect(std::isfinite(sampling.presence_penalty), "presence_penalty", sampling.presence_penalty,
         "a number; 0 has no effect");
  expect(std::isfinite(sampling.frequency_penalty), "frequency_penalty", sampling.frequency_penalty,
         "a number; 0 has no effect");
  expect(!request.return_support || sampling.top_k > 0, "return_support without top_k: top_k",
         sampling.top_k, "1 or more, which bounds how many ids are told");
}

RequestId Engine::submit(Request request) {
  check(request);
  const RequestId first = next_id_;
  if (expert_width(placed_.model->config()) == 0) request.return_experts = false;
  // More are all of them, and tables have as many columns.
  request.sampling.top_k = std::min(request.sampling.top_k, placed_.model->config().vocab_size);
  const auto shared = std::make_shared<const Request>(std::move(request));
  for (std::int64_t i = 0; i < shared->samples; ++i) {
    auto sequence = std::make_unique<Sequence>(
        Sequence{next_id_++, first, shared,
                 TextStream(tokenizer_, shared->stop_strings, shared->skip_special_tokens),
                 LogitChanges(*shared), shared->prompt});
    sequence->seed = seed_of_sample(shared->sampling.seed, static_cast<std::uint64_t>(i));
    sequence->completion.sample = i;
    if (shared->max_new_tokens > 0 || sequence->wants_prompt_logprobs()) {
      scheduler_.add(std::move(sequence));
    } else {
      done_.push_back({sequence->id, {}, {}, std::move(sequence->completion)});
    }
  }
  return first;
}

Progress Engine::end(const Sequence& sequence, Progress progress, FinishReason reason) {
  const std::unique_ptr<Sequence> ended = scheduler_.finish(sequence);
  const std::string rest = ended->text.finish();
  progress.text += rest;
  ended->completion.text += rest;
  ended->completion.finish_reason = reason;
  ended->completion.experts = std::move(ended->experts);
  progress.completion = std::move(ended->completion);
  return progress;
}

Progress Engine::take(Sequence& sequence, SampledToken token, std::int64_t version) {
  const Request& request = *sequence.request;
  // Seen after the ranks have told each other, so that all of them stop.
  if (!std::isfinite(token.logprob)) {
    const std::string fault =
        assembly::find_not_finite(placed_, sequence.tokens, sequence.adapter->set.get());
    if (!options_.tells_failures) {
      throw_error<ModelError>("request {}: the logits are not finite, first in {}", sequence.id + 1,
                              fault);
    }
    const RequestId id = scheduler_.finish(sequence)->id;
    return {id, {}, {}, {}, "the logits are not finite, first in " + fault};
  }
  Completion& completion = sequence.completion;
  sequence.tokens.push_back(token.id);
  sequence.changes.saw(token.id);
  completion.output_ids.push_back(token.id);
  completion.logprobs.push_back(token.logprob);
  completion.sampled_logprobs.push_back(token.sampled_logprob);
  completion.weights_versions.push_back(version);
  if (request.top_logprobs > 0) completion.top_logprobs.push_back(token.top);
  if (request.return_support) completion.supports.push_back(token.support);
  const bool is_stop_id = !request.ignore_eos &&
                          std::find(request.stop_ids.begin(), request.stop_ids.end(), token.id) !=
                              request.stop_ids.end();
  // The first tokens are not searched for stop strings either, as in vLLM.
  const bool may_stop = sequence.output_size() > request.min_tokens;
  Progress progress{sequence.id, {}, {}, {}};
  if (request.skip_special_tokens || !is_stop_id)
    progress.text = sequence.text.push(token.id, may_stop);
  completion.text += progress.text;
  if (completion.output_ids.size() == 1)
    completion.prompt_s = sequence.seconds_since(sequence.started);
  progress.token = std::move(token);
  if (is_stop_id || sequence.text.stopped())
    return end(sequence, std::move(progress), FinishReason::kStop);
  if (sequence.output_size() >= request.max_new_tokens)
    return end(sequence, std::move(progress), FinishReason::kLength);
  return progress;
}

PassShape Engine::shape_of(const std::vector<Part>& parts) {
  PassShape shape;
  std::unordered_set<const nn::AdapterSet*> sets;
  for (const Part& part : parts) {
    shape.draws = !part.sequence->is_prompt();
    ++shape.sequences;
    shape.tokens += part.count;
    sets.insert(part.sequence->adapter->set.get());
  }
  shape.sets = static_cast<std::int64_t>(sets.size());
  return shape;
}

std::vector<Progress> Engine::step() {
  const ops::NoGradient guard;
  std::vector<Progress> progress = std::exchange(done_, {});
  std::vector<Part> parts = parts_ahead();
  if (parts.empty()) {
    ahead_.reset();
    scheduler_.admit(adapter_);
    parts = scheduler_.plan();
  }
  last_pass_ = shape_of(parts);
  if (parts.empty()) return progress;
  pool_.settle();
  hold_weights();
  std::int64_t version = weights_version_;
  std::vector<SampledToken> tokens;
  if (ahead_ || can_replay(parts)) {
    last_pass_.recorded = true;
    last_pass_.ahead = ahead_.has_value();
    tokens = replay(parts, version);
    scheduler_.passed(parts);
  } else {
    const at::Tensor hidden = run(parts);
    judge_prompts(hidden, parts);
    scheduler_.passed(parts);
    std::erase_if(parts, [](const Part& part) { return part.sequence->pending() > 0; });
    std::vector<Part> read;  // to whose prompts nothing is added
    std::copy_if(parts.begin(), parts.end(), std::back_inserter(read),
                 [](const Part& part) { return !part.sequence->draws(); });
    std::erase_if(parts, [](const Part& part) { return !part.sequence->draws(); });
    tokens = draw(hidden, parts);
    for (const Part& part : read) {
      Progress last{part.sequence->id, {}, {}, {}};
      progress.push_back(end(*part.sequence, std::move(last), FinishReason::kLength));
    }
  }
  if (last_pass_.draws) {
    ++counts_.draws;
    counts_.recorded_draws += last_pass_.recorded;
    counts_.drawn_sequences += last_pass_.sequences;
  }
  for (std::size_t i = 0; i < parts.size(); ++i)
    progress.push_back(take(*parts[i].sequence, std::move(tokens[i]), version));
  return progress;
}

EngineCounts Engine::take_counts() {
  EngineCounts counts = std::exchange(counts_, {});
  counts.preempted = scheduler_.take_preempted();
  return counts;
}

Completion Engine::abort(RequestId id) {
  const std::unique_ptr<Sequence> sequence = scheduler_.remove(id);
  if (!sequence)
    throw InternalError(fmt::format("request {} is not under way: it cannot be aborted", id));
  Completion completion = std::move(sequence->completion);
  completion.text += sequence->text.finish();
  completion.finish_reason = FinishReason::kAborted;
  completion.experts = std::move(sequence->experts);
  return completion;
}

void Engine::preempt(RequestId id) { scheduler_.preempt(id); }

void Engine::weights_changed(std::int64_t version, LiveSequences live) {
  settle();
  weights_version_ = version;
  if (live == LiveSequences::kRecompute) {
    scheduler_.preempt_all();
    scheduler_.kept().drop_all();
  } else {
    scheduler_.kept().drop_shared();
  }
  // Graphs know where the matrices lie between passes.
  release_weights();
  if (merged_) merged_->factors_changed();
}

void Engine::hold_weights() {
  if (held_) return;
  const auto gather = options_.gather_weights ? assembly::acquire_all : assembly::acquire_ends;
  // make_unique would move, which Acquired does not allow; here the result is built in place.
  held_.reset(new parallel::Acquired(gather(placed_.sharding.get(), *placed_.model)));
  if (merged_) merged_->put_in();
  // Graphs know where the matrices lie while they are held.
  if (recorded_) recorded_->forget_if_moved();
}

void Engine::release_weights() {
  settle();
  held_.reset();
  if (merged_) merged_->take_out();
}

void Engine::use_adapter(std::shared_ptr<const Adapter> adapter) { adapter_ = std::move(adapter); }

bool Engine::uses(const nn::AdapterSet& set) const {
  return adapter_->set.get() == &set || scheduler_.uses(set);
}

void Engine::forget_states(const nn::AdapterSet& set) { scheduler_.kept().drop_set(set); }

void Engine::end_conversation(std::int64_t conversation) {
  scheduler_.kept().drop_conversation(conversation);
}

std::pair<std::int64_t, std::int64_t> Engine::free_memory() const {
  const std::int64_t rank = pool_.size().own_rank;
  return {pool_.free_slots(rank), pool_.free_pages(rank)};
}

void Engine::release_memory() {
  settle();
  scheduler_.preempt_all();
  scheduler_.kept().drop_all();
  if (recorded_) recorded_->forget();
  pool_.release_memory();
}

std::vector<Completion> generate(assembly::ModelOnRanks& placed,
                                 const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                 const std::vector<Request>& requests, EngineOptions options,
                                 const TextCallback& on_text) {
  if (requests.empty()) return {};
  options.capacity = 0;
  std::int64_t sequences = 0;
  for (const Request& request : requests) {
    options.capacity =
        std::max(options.capacity, static_cast<std::int64_t>(request.prompt.size()) +
                                       std::max<std::int64_t>(0, request.max_new_tokens));
    sequences += std::max<std::int64_t>(1, request.samples);
  }
  options.max_sequences = std::min(options.max_sequences, sequences);
  const bool keeps_states =
      std::any_of(requests.begin(), requests.end(),
                  [](const Request& request) { return request.samples > 1 || request.keep_state; });
  if (!keeps_states) options.kept_states = 0;
  Engine engine(placed, tokenizer, options);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    try {
      engine.submit(requests[i]);
    } catch (const DataError& e) {
      throw_error<DataError>("request {}: {}", i + 1, e.what());
    }
  }
  std::vector<Completion> completions(static_cast<std::size_t>(sequences));
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
