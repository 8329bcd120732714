#include "serve/model/engine_backend.h"

#include <algorithm>
#include <map>
#include <utility>

#include "adapters/lora.h"
#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "base/log.h"
#include "config/config.h"
#include "data/tokenizer/tokenizer.h"
#include "rollout/answers.h"
#include "rollout/engine.h"

namespace heddle::serve {
namespace {

config::RunConfig config_of(const EngineBackendOptions& options) {
  return config::parse("", "command line", options.settings, config::Completeness::kPartial,
                       assembly::usual_device());
}

assembly::ModelOnRanks placed_model(const EngineBackendOptions& options) {
  const config::RunConfig config = config_of(options);
  runtime::Context context = assembly::make_context(config);
  if (!config.is_set("model.dtype") && context.device.is_cpu()) context.dtype = at::kFloat;
  assembly::ModelRecipe recipe = assembly::recipe_of_directory(
      options.directory, "", assembly::Head::kLanguageModel, assembly::Purpose::kTenants);
  recipe.generates = true;
  recipe.kernels = assembly::kernel_policy(config);
  return assembly::place(recipe, context);
}

rollout::EngineOptions engine_options(const EngineBackendOptions& options) {
  rollout::EngineOptions engine;
  engine.tells_failures = true;
  engine.max_sequences = options.max_sequences;
  engine.capacity = options.max_context;
  engine.caches = config_of(options).rollout.caches;
  return engine;
}

std::vector<TokenLogprob> as_told(const std::vector<rollout::TokenLogprob>& from) {
  std::vector<TokenLogprob> out;
  for (const auto& [id, logprob] : from) out.push_back({id, logprob});
  return out;
}

std::vector<std::vector<TokenLogprob>> as_told(
    const std::vector<std::vector<rollout::TokenLogprob>>& rows) {
  std::vector<std::vector<TokenLogprob>> out;
  for (const auto& row : rows) out.push_back(as_told(row));
  return out;
}

/// Says for want of what memory the device stopped.
template <class Work>
auto within_memory(const char* what, const Work& work) {
  try {
    return work();
  } catch (const c10::OutOfMemoryError& error) {
    log::error("{}: {}", what, error.what_without_backtrace());
    throw_error<DeviceError>("the device has no memory left for {}", what);
  }
}

class EngineBackend final : public Backend {
 public:
  explicit EngineBackend(const EngineBackendOptions& options)
      : model_(placed_model(options)),
        tokenizer_(data::Tokenizer::load(options.directory)),
        trainer_(model_,
                 {.pass_tokens = options.pass_tokens,
                  .deterministic = options.deterministic,
                  .records = config_of(options).train.cuda_graph == config::CudaGraph::kAuto}),
        engine_(model_, tokenizer_, engine_options(options)) {
    facts_.name = options.name;
    facts_.directory = options.directory;
    facts_.architecture = model_.model->config().model_type;
    facts_.vocabulary = model_.model->config().vocab_size;
    facts_.max_context = options.max_context;
    facts_.max_sequences = options.max_sequences;
    facts_.end_tokens = rollout::end_tokens(*tokenizer_, model_.source.get());
  }

  const ModelFacts& facts() const override { return facts_; }

  tenants::SetId create(const tenants::SetOptions& options) override {
    return within_memory("new adapters", [&] { return trainer_.create(options); });
  }
  void remove(tenants::SetId set) override { trainer_.remove(set); }
  std::vector<tenants::WorkResult> forward_backward(std::span<const tenants::Work> works) override {
    std::vector<tenants::WorkResult> results = trainer_.forward_backward(works);
    for (const tenants::PassShape& pass : trainer_.last_passes())
      passes_.push_back(
          {ModelPass::Kind::kTrain, pass.recorded, pass.sequences, pass.tokens, pass.sets});
    return results;
  }
  std::vector<tenants::StepResult> optim_steps(
      std::span<const tenants::SetUpdate> updates) override {
    return within_memory("an optimizer step", [&] { return trainer_.optim_steps(updates); });
  }
  void drop_gradients(tenants::SetId set, bool refuses_step) override {
    trainer_.drop_gradients(set, refuses_step);
  }
  bool is_finite(tenants::SetId set) override { return trainer_.is_finite(set); }
  void save(tenants::SetId set, const std::filesystem::path& directory,
            tenants::SavedFor purpose) override {
    trainer_.save(set, directory, purpose);
  }
  tenants::SetId load(const std::filesystem::path& directory, bool with_optimizer) override {
    return within_memory("the weights of a run",
                         [&] { return trainer_.load(directory, with_optimizer); });
  }
  std::shared_ptr<const adapters::LoraSet> snapshot(tenants::SetId set) override {
    return trainer_.snapshot(set);
  }
  void save_snapshot(const std::shared_ptr<const adapters::LoraSet>& weights,
                     const std::filesystem::path& directory) override {
    trainer_.save_snapshot(*weights, directory);
  }
  std::shared_ptr<const adapters::LoraSet> load_snapshot(
      const std::filesystem::path& directory) override {
    return trainer_.load_snapshot(directory);
  }

  GenerationId submit(const Generation& generation) override {
    const rollout::RequestId first = engine_.submit(request_of(generation));
    Open open;
    open.first = first;
    open.result.samples.resize(static_cast<std::size_t>(generation.samples));
    open.left = generation.samples;
    open.has_adapter = generation.weights != nullptr;
    for (std::int64_t i = 0; i < generation.samples; ++i) owner_[first + i] = first;
    open_[first] = std::move(open);
    return first;
  }
  void abort(GenerationId id) override {
    const auto samples = static_cast<std::int64_t>(open_.at(id).result.samples.size());
    for (std::int64_t i = 0; i < samples; ++i) {
      if (owner_.erase(id + i) > 0) engine_.abort(id + i);
    }
    open_.erase(id);
  }
  bool is_generating() const override { return !engine_.is_idle(); }
  std::vector<Event> step() override {
    std::vector<Event> events;
    std::map<GenerationId, std::string> failed;
    std::vector<rollout::Progress> news =
        within_memory("a pass of generation", [&] { return engine_.step(); });
    if (const rollout::PassShape& pass = engine_.last_pass(); pass.sequences > 0) {
      passes_.push_back({pass.draws ? ModelPass::Kind::kDecode : ModelPass::Kind::kPrompt,
                         pass.recorded, pass.sequences, pass.tokens, pass.sets});
    }
    for (rollout::Progress& progress : news) {
      const auto owner = owner_.find(progress.id);
      if (owner == owner_.end()) continue;
      Open& open = open_.at(owner->second);
      if (!progress.failure.empty()) {
        failed.try_emplace(open.first, std::move(progress.failure));
        owner_.erase(owner);
        continue;
      }
      if (progress.token)
        events.push_back(
            {open.first,
             GeneratedToken{progress.id - open.first, progress.token->id, progress.token->logprob,
                            as_told(progress.token->top), progress.text},
             {}});
      if (!progress.completion) continue;
      take(open, progress.id - open.first, *progress.completion);
      owner_.erase(owner);
      if (open.left > 0) continue;
      events.push_back({open.first, {}, std::move(open.result)});
      open_.erase(events.back().id);
    }
    // Other samples of a generation may have ended in the same step: none of them is aborted.
    for (auto& [id, failure] : failed) {
      events.push_back({id, {}, {}, std::move(failure), open_.at(id).has_adapter});
      abort(id);
    }
    return events;
  }

  std::vector<ModelPass> take_passes() override { return std::exchange(passes_, {}); }
  ModelQueue queue() const override {
    const auto [waiting, running] = engine_.queued();
    const auto free = static_cast<double>(engine_.free_memory().second);
    ModelQueue queue{waiting, running, 0, 1 - free / static_cast<double>(pages_)};
    queue.interruptions = engine_.scheduler().interruptions();
    engine_.scheduler().visit([&queue](const rollout::Sequence& sequence, bool runs) {
      const std::string& name = sequence.request->adapter->name;
      if (!name.empty()) (runs ? queue.running_adapters : queue.waiting_adapters).insert(name);
    });
    return queue;
  }

 private:
  struct Open {
    rollout::RequestId first;
    std::int64_t left;         ///< Samples that have not ended.
    bool has_adapter = false;  ///< The client's own.
    GenerationResult result;
  };

  static rollout::Request request_of(const Generation& generation) {
    rollout::Request request;
    request.prompt = generation.prompt;
    request.max_new_tokens = generation.max_tokens;
    request.samples = generation.samples;
    request.sampling.temperature = generation.temperature;
    request.sampling.top_p = generation.top_p;
    request.sampling.min_p = generation.min_p;
    request.sampling.top_k = generation.top_k;
    request.sampling.seed = generation.seed;
    request.sampling.repetition_penalty = generation.repetition_penalty;
    request.sampling.presence_penalty = generation.presence_penalty;
    request.sampling.frequency_penalty = generation.frequency_penalty;
    request.sampling.logit_bias = generation.logit_bias;
    request.stop_ids = generation.stop_ids;
    request.stop_strings = generation.stop_strings;
    request.min_tokens = generation.min_tokens;
    request.ignore_eos = generation.ignore_eos;
    request.skip_special_tokens = generation.skip_special_tokens;
    request.priority = generation.priority;
    request.top_logprobs = generation.top_logprobs;
    request.prompt_logprobs = generation.prompt_logprobs;
    request.prompt_targets = generation.prompt_targets;
    request.prompt_draws = generation.prompt_draws;
    request.keep_state = generation.keep_state;
    auto adapter = std::make_shared<rollout::Adapter>();
    if (generation.weights != nullptr)
      *adapter = {generation.weights->name, generation.weights->version, generation.weights->set};
    request.adapter = std::move(adapter);
    return request;
  }

  static void take(Open& open, std::int64_t sample, const rollout::Completion& completion) {
    GeneratedSequence& sequence = open.result.samples[static_cast<std::size_t>(sample)];
    sequence.ids = completion.output_ids;
    sequence.logprobs = completion.logprobs;
    sequence.top = as_told(completion.top_logprobs);
    sequence.text = completion.text;
    sequence.end = completion.finish_reason == rollout::FinishReason::kStop
                       ? GenerationEnd::kStop
                       : GenerationEnd::kLength;
    if (sample == 0) {
      open.result.prompt_logprobs = completion.prompt_logprobs;
      open.result.prompt_top = as_told(completion.prompt_top_logprobs);
      open.result.prompt_target_logprobs = completion.prompt_target_logprobs;
      open.result.prompt_draws = as_told(completion.prompt_draws);
      open.result.cached_tokens = completion.cached_tokens;
      open.result.queue_s = completion.queue_s;
      open.result.prompt_s = completion.prompt_s;
    }
    --open.left;
  }

  ModelFacts facts_;
  assembly::ModelOnRanks model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  tenants::Trainer trainer_;
  rollout::Engine engine_;
  std::int64_t pages_ = engine_.free_memory().second;
  std::vector<ModelPass> passes_;
  std::map<rollout::RequestId, Open> open_;                 ///< By the id of the first sample.
  std::map<rollout::RequestId, rollout::RequestId> owner_;  ///< First sample's id, by each.
};

}  // namespace

std::unique_ptr<Backend> make_engine_backend(const EngineBackendOptions& options) {
  return std::make_unique<EngineBackend>(options);
}

}  // namespace heddle::serve
