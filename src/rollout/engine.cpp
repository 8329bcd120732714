#include "rollout/engine.h"

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <optional>
#include <set>

#include "base/errors.h"
#include "ops/autograd.h"
#include "rollout/text_stream.h"

namespace heddle::rollout {
namespace {

using models::Model;

/// A request that holds a slot of the caches.
struct Active {
  std::size_t index;
  std::int64_t slot;
  std::int64_t prompt_done = 0;  ///< Prompt tokens in the cache.
  std::int64_t length = 0;       ///< Tokens in the cache.
  std::int32_t last = 0;         ///< Sampled, not yet in the cache.
  TextStream text;
};

class Engine {
 public:
  Engine(Model& model, const std::shared_ptr<const data::Tokenizer>& tokenizer,
         const std::vector<Request>& requests, const EngineOptions& options,
         const TextCallback& on_text)
      : model_(model),
        tokenizer_(tokenizer),
        requests_(requests),
        options_(options),
        on_text_(on_text),
        completions_(requests.size()) {
    std::int64_t capacity = 0;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      check(i);
      const auto prompt = static_cast<std::int64_t>(requests[i].prompt.size());
      capacity = std::max(capacity, prompt + requests[i].max_new_tokens);
    }
    const std::int64_t slots =
        std::min<std::int64_t>(options.max_sequences, static_cast<std::int64_t>(requests.size()));
    cache_ = model.make_cache(slots, capacity);
    for (std::int64_t slot = slots; slot-- > 0;) free_.push_back(slot);
  }

  std::vector<Completion> run() {
    while (next_ < requests_.size() || !active_.empty()) {
      admit();
      prefill();
      decode();
    }
    return std::move(completions_);
  }

 private:
  void check(std::size_t index) const {
    if (requests_[index].prompt.empty())
      throw_error<DataError>("request {}: the prompt has no token", index + 1);
    for (const std::int32_t id : requests_[index].prompt) {
      if (id < 0 || id >= model_.config().vocab_size) {
        throw_error<DataError>("request {}: token id {} is outside the model's vocabulary of {}",
                               index + 1, id, model_.config().vocab_size);
      }
    }
  }

  void admit() {
    while (!free_.empty() && next_ < requests_.size()) {
      const std::size_t index = next_++;
      if (requests_[index].max_new_tokens <= 0) continue;
      const std::int64_t slot = free_.back();
      free_.pop_back();
      for (nn::LayerCache& layer : cache_) {
        if (layer.conv.defined()) layer.conv.select(0, slot).zero_();
        if (layer.state.defined()) layer.state.select(0, slot).zero_();
      }
      active_.push_back(
          {index, slot, 0, 0, 0, TextStream(tokenizer_, requests_[index].stop_strings)});
    }
  }

  /// Prompt tokens of waiting sequences, packed into one pass of bounded length.
  void prefill() {
    while (true) {
      std::vector<Active*> chosen;
      std::vector<std::int64_t> tokens, slots, lengths;
      std::vector<std::int32_t> boundaries = {0};
      for (Active& active : active_) {
        const auto& prompt = requests_[active.index].prompt;
        const std::int64_t waiting = static_cast<std::int64_t>(prompt.size()) - active.prompt_done;
        const std::int64_t count =
            std::min(waiting, options_.prefill_tokens - static_cast<std::int64_t>(tokens.size()));
        if (count <= 0) continue;
        tokens.insert(tokens.end(), prompt.begin() + active.prompt_done,
                      prompt.begin() + active.prompt_done + count);
        boundaries.push_back(static_cast<std::int32_t>(tokens.size()));
        slots.push_back(active.slot);
        lengths.push_back(active.length);
        active.prompt_done += count;
        active.length += count;
        chosen.push_back(&active);
      }
      if (chosen.empty()) return;
      const at::Tensor hidden = forward(tokens, boundaries, slots, lengths);
      std::vector<std::int64_t> rows;
      std::vector<Active*> ready;
      for (std::size_t i = 0; i < chosen.size(); ++i) {
        if (chosen[i]->prompt_done <
            static_cast<std::int64_t>(requests_[chosen[i]->index].prompt.size()))
          continue;
        rows.push_back(boundaries[i + 1] - 1);
        ready.push_back(chosen[i]);
      }
      if (!ready.empty()) {
        take(hidden.index_select(0, at::tensor(rows, at::kLong).to(hidden.device())), ready);
      }
      retire();
    }
  }

  void decode() {
    if (active_.empty()) return;
    std::vector<std::int64_t> tokens, slots, lengths;
    std::vector<std::int32_t> boundaries = {0};
    std::vector<Active*> all;
    for (Active& active : active_) {
      tokens.push_back(active.last);
      slots.push_back(active.slot);
      lengths.push_back(active.length++);
      boundaries.push_back(static_cast<std::int32_t>(tokens.size()));
      all.push_back(&active);
    }
    take(forward(tokens, boundaries, slots, lengths), all);
    retire();
  }

  at::Tensor forward(const std::vector<std::int64_t>& tokens,
                     const std::vector<std::int32_t>& boundaries,
                     const std::vector<std::int64_t>& slots,
                     const std::vector<std::int64_t>& lengths) {
    const c10::Device device = model_.context().device;
    return model_.generate(at::tensor(tokens, at::kLong).to(device),
                           ops::Sequences::from_host(boundaries, device), cache_, slots, lengths);
  }

  /// Samples the next token of each sequence from its last hidden state [n,H].
  void take(const at::Tensor& hidden, const std::vector<Active*>& sequences) {
    const at::Tensor logits =
        model_.logits(model_.final_norm(hidden)).to(at::kFloat).cpu().contiguous();
    const auto vocabulary = static_cast<std::size_t>(logits.size(1));
    const float* const rows = logits.const_data_ptr<float>();
    std::vector<SampledToken> tokens(sequences.size());
    at::parallel_for(
        0, static_cast<std::int64_t>(tokens.size()), 1, [&](std::int64_t begin, std::int64_t end) {
          for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
            const std::size_t index = sequences[i]->index;
            tokens[i] = sample({rows + i * vocabulary, vocabulary}, requests_[index].sampling,
                               index, completions_[index].output_ids.size());
          }
        });
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      Active* const active = sequences[i];
      const Request& request = requests_[active->index];
      Completion& completion = completions_[active->index];
      const SampledToken& token = tokens[i];
      active->last = token.id;
      completion.output_ids.push_back(token.id);
      completion.logprobs.push_back(token.logprob);
      emit(*active, active->text.push(token.id));
      const bool ended = active->text.stopped() ||
                         std::find(request.stop_ids.begin(), request.stop_ids.end(), token.id) !=
                             request.stop_ids.end();
      if (ended) completion.finish_reason = FinishReason::kStop;
      if (ended ||
          static_cast<std::int64_t>(completion.output_ids.size()) >= request.max_new_tokens) {
        finished_.insert(active->index);
      }
    }
  }

  void emit(const Active& active, const std::string& piece) {
    completions_[active.index].text += piece;
    if (on_text_ && !piece.empty()) on_text_(active.index, piece);
  }

  void retire() {
    if (finished_.empty()) return;
    for (Active& active : active_) {
      if (finished_.count(active.index) == 0) continue;
      emit(active, active.text.finish());
      free_.push_back(active.slot);
    }
    std::erase_if(active_, [&](const Active& active) { return finished_.count(active.index) > 0; });
    finished_.clear();
  }

  Model& model_;
  const std::shared_ptr<const data::Tokenizer>& tokenizer_;
  const std::vector<Request>& requests_;
  const EngineOptions& options_;
  const TextCallback& on_text_;
  std::vector<nn::LayerCache> cache_;
  std::vector<std::int64_t> free_;
  std::vector<Active> active_;
  std::set<std::size_t> finished_;
  std::size_t next_ = 0;
  std::vector<Completion> completions_;
};

}  // namespace

std::vector<Completion> generate(Model& model,
                                 const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                 const std::vector<Request>& requests, const EngineOptions& options,
                                 const TextCallback& on_text) {
  if (requests.empty()) return {};
  const ops::NoGradient guard;
  return Engine(model, tokenizer, requests, options, on_text).run();
}

std::vector<std::int32_t> end_tokens(const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                     const std::vector<std::int64_t>& generation_eos) {
  std::set<std::int32_t> ids;
  for (const std::int64_t id : generation_eos) ids.insert(static_cast<std::int32_t>(id));
  if (tokenizer->eos_id()) ids.insert(*tokenizer->eos_id());
  if (const auto turn_end = tokenizer->id_of("<|im_end|>")) ids.insert(*turn_end);
  return {ids.begin(), ids.end()};
}

std::vector<std::string> answer_prompts(Model& model,
                                        const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                        const std::vector<std::string>& prompts,
                                        std::int64_t max_new_tokens,
                                        const data::RenderOptions& rendering) {
  const data::Renderer renderer(*tokenizer, rendering);
  const bool chat = !rendering.chat_template.empty() || tokenizer->chat_template().has_value();
  std::vector<Request> requests;
  for (const std::string& prompt : prompts) {
    data::Row row;
    row.text = prompt;
    if (chat) {
      row.form = data::Row::Form::kConversation;
      row.messages = nlohmann::ordered_json::array({{{"role", "user"}, {"content", prompt}}});
    }
    Request request;
    request.prompt = renderer.tokenize_prompt(row);
    request.max_new_tokens = max_new_tokens;
    request.sampling.temperature = 0;
    request.stop_ids = end_tokens(tokenizer, {});
    requests.push_back(std::move(request));
  }
  std::vector<std::string> answers;
  for (Completion& completion : generate(model, tokenizer, requests, {}))
    answers.push_back(std::move(completion.text));
  return answers;
}

}  // namespace heddle::rollout
