#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "cli/chat_partner.h"
#include "cli/template_arguments.h"
#include "data/rendering/renderer.h"
#include "rollout/answers.h"
#include "rollout/engine.h"

namespace heddle::cli {
namespace {

/// A cache that small machines have room for; --context asks for more.
constexpr std::int64_t kUsualContext = 8192;

class LocalPartner : public ChatPartner {
 public:
  explicit LocalPartner(const ChatPartnerOptions& options)
      : options_(options),
        model_(load(options.model, assembly::Head::kLanguageModel, assembly::Purpose::kGenerate)),
        tokenizer_(data::Tokenizer::load(tokenizer_directory(options.model))),
        renderer_(*tokenizer_, rendering(options)),
        sampling_(sampling_of(options.sampling, model_.source->generation_config())),
        stop_ids_(rollout::end_tokens(*tokenizer_, model_.source.get())) {
    const auto source = tokenizer_->chat_template();
    if (!source) {
      throw_error<DataError>(
          "{}: the tokenizer has no chat template; use heddle generate --raw, or put "
          "chat_template.jinja beside tokenizer.json",
          options.model.directory);
    }
    format_ = data::answer_format_of(*source);
    format_.calls = data::CallSyntax::kNone;  // Nobody here could answer a call.
    rollout::EngineOptions engine;
    engine.max_sequences = 1;
    engine.capacity = context();
    engine_ = std::make_unique<rollout::Engine>(model_, tokenizer_, engine);
  }

  Answer answer(const nlohmann::ordered_json& messages, const OnDelta& on_delta,
                const std::atomic<bool>& stop) override {
    rollout::Request request = request_of(messages);
    data::AnswerParser parser(format_, data::opens_reasoning(tokenizer_->decode(request.prompt)),
                              {});
    const rollout::RequestId id = engine_->submit(std::move(request));
    Answer answer;
    const auto take = [&](data::AnswerDelta delta) {
      if (!delta.is_empty()) on_delta(delta);
      answer.message += delta;
    };
    while (!engine_->is_idle()) {
      if (stop) {
        engine_->abort(id);
        break;
      }
      for (const rollout::Progress& progress : engine_->step()) {
        take(parser.push(progress.text));
        if (progress.completion)
          answer.is_cut = progress.completion->finish_reason == rollout::FinishReason::kLength;
      }
    }
    take(parser.finish());
    return answer;
  }

 private:
  static data::RenderOptions rendering(const ChatPartnerOptions& options) {
    data::RenderOptions rendering;
    rendering.template_variables = template_variables(options.template_arguments);
    return rendering;
  }

  std::int64_t context() const {
    const std::int64_t longest = rollout::longest_context(*model_.source);
    if (options_.context == 0)
      return longest > 0 ? std::min(longest, kUsualContext) : kUsualContext;
    if (longest > 0 && options_.context > longest) {
      throw_error<ConfigError>(
          "--context is {}: expected at most {}, the model's "
          "max_position_embeddings",
          options_.context, longest);
    }
    return options_.context;
  }

  rollout::Request request_of(const nlohmann::ordered_json& messages) {
    data::Row row;
    row.form = data::Row::Form::kConversation;
    row.messages = messages;
    rollout::Request request;
    request.prompt = renderer_.tokenize_prompt(row);
    const std::int64_t room = context() - std::ssize(request.prompt);
    if (room < 1) {
      throw_error<DataError>(
          "the conversation has {} tokens and the context {}: /undo or /reset shortens it, "
          "--context N makes room",
          request.prompt.size(), context());
    }
    request.max_new_tokens = std::min(options_.max_new_tokens.value_or(kUsualAnswer), room);
    request.sampling = sampling_;
    request.sampling.seed = rollout::seed_of_row(options_.sampling.seed, answers_++);
    request.stop_ids = stop_ids_;
    request.stop_strings = options_.stop;
    return request;
  }

  ChatPartnerOptions options_;
  assembly::ModelOnRanks model_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  data::Renderer renderer_;
  rollout::SamplingOptions sampling_;
  std::vector<std::int32_t> stop_ids_;
  data::AnswerFormat format_;
  std::unique_ptr<rollout::Engine> engine_;
  std::uint64_t answers_ = 0;
};

}  // namespace

std::unique_ptr<ChatPartner> local_partner(const ChatPartnerOptions& options) {
  return std::make_unique<LocalPartner>(options);
}

}  // namespace heddle::cli
