#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/errors.h"
#include "data/tokenizer/tokenizer.h"
#include "serve/model/backend.h"

namespace heddle::serve::testing {

/// A model whose answers are written down: generation without weights, one token a step.
class ScriptedBackend : public Backend {
 public:
  /// The answer to a prompt's text, for each sample.
  using Script = std::function<std::string(const std::string& prompt, std::int64_t sample)>;

  ScriptedBackend(std::shared_ptr<const data::Tokenizer> tokenizer, Script script)
      : tokenizer_(std::move(tokenizer)), script_(std::move(script)) {
    facts_.name = "base";
    facts_.vocabulary = tokenizer_->vocab_size();
    facts_.max_context = 2048;
    facts_.max_sequences = 8;
    facts_.end_tokens = {*tokenizer_->id_of("<|im_end|>")};
  }

  const ModelFacts& facts() const override { return facts_; }

  GenerationId submit(const Generation& generation) override {
    Running running{generation, {}};
    for (std::int64_t s = 0; s < generation.samples; ++s) {
      Sample sample{{}, data::StreamDecoder(tokenizer_, true), {}};
      sample.script =
          tokenizer_->encode(script_(tokenizer_->decode(generation.prompt), s) + "<|im_end|>");
      running.samples.push_back(std::move(sample));
    }
    running_.emplace(next_, std::move(running));
    return next_++;
  }
  void abort(GenerationId id) override { running_.erase(id); }
  bool is_generating() const override { return !running_.empty(); }

  std::vector<Event> step() override {
    std::vector<Event> events;
    std::vector<GenerationId> ended;
    for (auto& [id, running] : running_) {
      bool has_open = false;
      for (std::size_t s = 0; s < running.samples.size(); ++s) {
        if (!running.samples[s].is_open) continue;
        events.push_back({id, draw(running, s), std::nullopt});
        has_open |= running.samples[s].is_open;
      }
      if (has_open) continue;
      events.push_back({id, std::nullopt, result_of(running)});
      ended.push_back(id);
    }
    for (const GenerationId id : ended) running_.erase(id);
    return events;
  }

  std::shared_ptr<const adapters::LoraSet> snapshot(tenants::SetId) override { refuse(); }
  void save_snapshot(const std::shared_ptr<const adapters::LoraSet>&,
                     const std::filesystem::path&) override {
    refuse();
  }
  std::shared_ptr<const adapters::LoraSet> load_snapshot(
      const std::filesystem::path& directory) override {
    throw_error<ModelError>("{}: holds no adapter", directory.string());
  }
  tenants::SetId create(const tenants::SetOptions&) override { refuse(); }
  void remove(tenants::SetId) override { refuse(); }
  std::vector<tenants::WorkResult> forward_backward(std::span<const tenants::Work>) override {
    refuse();
  }
  std::vector<tenants::StepResult> optim_steps(std::span<const tenants::SetUpdate>) override {
    refuse();
  }
  void drop_gradients(tenants::SetId, bool) override { refuse(); }
  bool is_finite(tenants::SetId) override { refuse(); }
  void save(tenants::SetId, const std::filesystem::path&, tenants::SavedFor) override { refuse(); }
  tenants::SetId load(const std::filesystem::path&, bool) override { refuse(); }

 private:
  struct Sample {
    std::vector<std::int32_t> script;
    data::StreamDecoder decoder;
    GeneratedSequence made;
    bool is_open = true;
  };
  struct Running {
    Generation generation;
    std::vector<Sample> samples;
  };

  [[noreturn]] static void refuse() { throw InternalError("a scripted model does not train"); }

  GeneratedToken draw(Running& running, std::size_t s) {
    Sample& sample = running.samples[s];
    const std::size_t place = sample.made.ids.size();
    GeneratedToken token;
    token.sample = static_cast<std::int64_t>(s);
    token.id = sample.script[place];
    token.logprob = -0.125 * static_cast<double>(place + 1);
    for (std::int64_t i = 0; i < running.generation.top_logprobs; ++i)
      token.top.push_back({static_cast<std::int32_t>(i + 70), -1.0 - static_cast<double>(i)});
    token.text = sample.decoder.push(token.id);
    sample.made.ids.push_back(token.id);
    sample.made.logprobs.push_back(token.logprob);
    sample.made.top.push_back(token.top);
    const bool has_stopped = token.id == facts_.end_tokens[0];
    const bool is_full = std::ssize(sample.made.ids) == running.generation.max_tokens;
    sample.is_open = !has_stopped && !is_full;
    if (!sample.is_open) token.text += sample.decoder.finish();
    sample.made.text += token.text;
    sample.made.end = has_stopped ? GenerationEnd::kStop : GenerationEnd::kLength;
    return token;
  }

  static GenerationResult result_of(Running& running) {
    GenerationResult result;
    for (Sample& sample : running.samples) result.samples.push_back(std::move(sample.made));
    return result;
  }

  std::shared_ptr<const data::Tokenizer> tokenizer_;
  Script script_;
  ModelFacts facts_;
  std::map<GenerationId, Running> running_;
  GenerationId next_ = 0;
};

}  // namespace heddle::serve::testing
