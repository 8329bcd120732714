#include "serve/model/engine_backend.h"

#include <deque>
#include <limits>
#include <map>
#include <utility>

#include "adapters/lora.h"
#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "config/config.h"
#include "data/batch.h"
#include "data/tokenizer/tokenizer.h"
#include "objective/language_model.h"
#include "objective/local_batch.h"
#include "ops/autograd.h"
#include "rollout/answers.h"
#include "rollout/engine.h"

namespace heddle::serve {
namespace {

assembly::ModelOnRanks placed_model(const EngineBackendOptions& options) {
  const config::RunConfig config =
      config::parse("", "command line", options.settings, config::Completeness::kPartial,
                    assembly::usual_device());
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
  engine.max_sequences = options.max_sequences;
  engine.capacity = options.max_context;
  return engine;
}

class EngineBackend final : public Backend {
 public:
  explicit EngineBackend(const EngineBackendOptions& options)
      : model_(placed_model(options)),
        tokenizer_(data::Tokenizer::load(options.directory)),
        trainer_(model_, {options.pass_tokens, options.deterministic}),
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
    return trainer_.create(options);
  }
  void remove(tenants::SetId set) override { trainer_.remove(set); }
  std::vector<tenants::WorkResult> forward_backward(std::span<const tenants::Work> works) override {
    return trainer_.forward_backward(works);
  }
  tenants::StepResult optim_step(tenants::SetId set, const tenants::AdamParams& params) override {
    return trainer_.optim_step(set, params);
  }
  void save(tenants::SetId set, const std::filesystem::path& directory,
            bool with_optimizer) override {
    trainer_.save(set, directory, with_optimizer);
  }
  tenants::SetId load(const std::filesystem::path& directory, bool with_optimizer) override {
    return trainer_.load(directory, with_optimizer);
  }
  std::shared_ptr<const adapters::LoraSet> load_snapshot(
      const std::filesystem::path& directory) override {
    return trainer_.load_snapshot(directory);
  }

  GenerationId submit(const Generation& generation) override {
    check(generation);
    waiting_.push_back({++last_id_, generation});
    return last_id_;
  }
  void abort(GenerationId id) override {
    std::erase_if(waiting_, [&](const Waiting& each) { return each.id == id; });
    open_.erase(id);
    std::erase_if(owner_, [&](const auto& entry) {
      if (entry.second.id == id) engine_.abort(entry.first);
      return entry.second.id == id;
    });
  }
  bool is_generating() const override { return !waiting_.empty() || !engine_.is_idle(); }
  std::vector<Event> step() override {
    std::vector<Event> events;
    const WithAdapters adapters(model_, admit());
    for (const rollout::Progress& progress : engine_.step()) {
      const auto owner = owner_.find(progress.id);
      if (owner == owner_.end()) continue;
      const Sample sample = owner->second;
      if (progress.token) {
        events.push_back(
            {sample.id,
             GeneratedToken{
                 sample.number, progress.token->id, progress.token->logprob, {}, progress.text},
             {}});
      }
      if (!progress.completion) continue;
      owner_.erase(owner);
      Open& open = open_.at(sample.id);
      take(open, sample.number, *progress.completion);
      if (open.left > 0) continue;
      events.push_back({sample.id, {}, std::move(open.result)});
      open_.erase(sample.id);
    }
    return events;
  }

 private:
  struct Waiting {
    GenerationId id;
    Generation generation;
  };
  struct Open {
    std::int64_t left;  ///< Samples that have not ended.
    GenerationResult result;
  };
  struct Sample {
    GenerationId id;
    std::int64_t number;
  };

  /// The engine reads the adapters of its model, which here belong to a snapshot.
  class WithAdapters {
   public:
    WithAdapters(assembly::ModelOnRanks& model, const adapters::LoraSet* set) : model_(model) {
      model_.adapters.reset(const_cast<adapters::LoraSet*>(set));
    }
    ~WithAdapters() { static_cast<void>(model_.adapters.release()); }
    WithAdapters(const WithAdapters&) = delete;
    WithAdapters& operator=(const WithAdapters&) = delete;

   private:
    assembly::ModelOnRanks& model_;
  };

  void check(const Generation& generation) const {
    const auto length = static_cast<std::int64_t>(generation.prompt.size());
    if (length == 0) throw DataError("the prompt has no token");
    if (length + generation.max_tokens > facts_.max_context)
      throw_error<DataError>("a prompt of {} tokens and {} more exceed the {} of this server",
                             length, generation.max_tokens, facts_.max_context);
    for (const std::int32_t id : generation.prompt)
      if (id < 0 || id >= facts_.vocabulary)
        throw_error<DataError>("token id {} is outside the vocabulary of {}", id,
                               facts_.vocabulary);
    const bool has_penalty = generation.repetition_penalty != 1 ||
                             generation.presence_penalty != 0 ||
                             generation.frequency_penalty != 0 || !generation.logit_bias.empty();
    if (has_penalty) throw DataError("penalties and logit_bias are not built: leave them out");
    if (generation.min_tokens > 0 || generation.ignore_eos)
      throw DataError("min_tokens and ignore_eos are not built: leave them out");
    if (generation.top_logprobs > 0 || generation.prompt_logprobs.value_or(0) > 0)
      throw DataError("log-probabilities of other tokens than the drawn ones are not built");
  }

  /// Gives the engine what waits and has the same weights as what it is at; other weights have
  /// their turn when it is idle. Returns the adapters of the next pass.
  const adapters::LoraSet* admit() {
    if (engine_.is_idle() && !waiting_.empty()) weights_ = waiting_.front().generation.weights;
    const adapters::LoraSet* set = weights_ == nullptr ? nullptr : weights_->set.get();
    while (!waiting_.empty() && waiting_.front().generation.weights == weights_) {
      const Waiting next = std::move(waiting_.front());
      waiting_.pop_front();
      Open& open = open_[next.id];
      open.left = next.generation.samples;
      open.result.samples.resize(static_cast<std::size_t>(next.generation.samples));
      if (next.generation.prompt_logprobs)
        open.result.prompt_logprobs = logprobs_of(next.generation.prompt, set);
      rollout::Request request = request_of(next.generation);
      for (std::int64_t i = 0; i < next.generation.samples; ++i) {
        if (i > 0)
          request.sampling.seed =
              rollout::seed_of_row(next.generation.seed, static_cast<std::uint64_t>(i));
        owner_[engine_.submit(request)] = {next.id, i};
      }
    }
    return set;
  }

  /// Of every token after those before it; the first is NaN.
  std::vector<double> logprobs_of(const std::vector<std::int32_t>& prompt,
                                  const adapters::LoraSet* set) {
    std::vector<double> out = {std::numeric_limits<double>::quiet_NaN()};
    if (prompt.size() < 2) return out;
    std::vector<std::int32_t> labels(prompt.begin() + 1, prompt.end());
    labels.push_back(data::kIgnoredLabel);
    std::vector<float> weights(prompt.size(), 1.0F);
    weights.back() = 0;
    const std::vector<data::SequenceView> views = {{prompt, labels, weights}};
    const objective::LocalBatch batch(*model_.model, data::Batch::from_sequences(views), set);
    const ops::NoGradient no_gradient;
    const at::Tensor hidden = objective::evaluate_hidden(*model_.model, *model_.pipeline, batch);
    const objective::LossRows rows(*model_.model, batch.host, 1);
    const objective::TokenLogprobs logprobs(*model_.model, hidden, rows, false);
    const at::Tensor values = logprobs.values().to(at::kCPU, at::kDouble).contiguous();
    const double* first = values.const_data_ptr<double>();
    out.insert(out.end(), first, first + values.numel());
    return out;
  }

  static rollout::Request request_of(const Generation& generation) {
    rollout::Request request;
    request.prompt = generation.prompt;
    request.max_new_tokens = generation.max_tokens;
    request.sampling.temperature = generation.temperature;
    request.sampling.top_p = generation.top_p;
    request.sampling.min_p = generation.min_p;
    request.sampling.top_k = generation.top_k;
    request.sampling.seed = generation.seed;
    request.stop_ids = generation.stop_ids;
    request.stop_strings = generation.stop_strings;
    return request;
  }

  static void take(Open& open, std::int64_t sample, const rollout::Completion& completion) {
    GeneratedSequence& sequence = open.result.samples[static_cast<std::size_t>(sample)];
    sequence.ids = completion.output_ids;
    sequence.logprobs = completion.logprobs;
    sequence.text = completion.text;
    sequence.end = completion.finish_reason == rollout::FinishReason::kStop
                       ? GenerationEnd::kStop
                       : GenerationEnd::kLength;
    --open.left;
  }

  ModelFacts facts_;
  assembly::ModelOnRanks model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  tenants::Trainer trainer_;
  rollout::Engine engine_;
  GenerationId last_id_ = 0;
  std::deque<Waiting> waiting_;
  std::map<GenerationId, Open> open_;
  std::map<rollout::RequestId, Sample> owner_;
  std::shared_ptr<const SamplerWeights> weights_;  ///< Of what the engine is at.
};

}  // namespace

std::unique_ptr<Backend> make_engine_backend(const EngineBackendOptions& options) {
  return std::make_unique<EngineBackend>(options);
}

}  // namespace heddle::serve
