#pragma once

#include <atomic>
#include <fstream>
#include <map>
#include <semaphore>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/hash.h"
#include "serve/model/backend.h"

namespace heddle::serve::testing {

/// A model whose weights are a number that every operation changes in a way that depends on the
/// order: tests of the protocol see from it what ran, and when.
class RecordingBackend final : public Backend {
 public:
  RecordingBackend() { facts_ = {"base", "", "qwen3_5", 100, 64, 4, {7}}; }
  const ModelFacts& facts() const override { return facts_; }

  tenants::SetId create(const tenants::SetOptions& options) override {
    if (options.rank == 13) throw ConfigError("rank 13 does not fit this model");
    sets_[++last_] = {options.seed, 0};
    created.push_back(options);
    return last_;
  }
  void remove(tenants::SetId set) override { sets_.erase(set); }
  /// A first token of 98 stands for long work, one of 99 for a pass that finds no memory.
  std::vector<tenants::WorkResult> forward_backward(std::span<const tenants::Work> works) override {
    if (works.size() > most_joined) most_joined = works.size();
    calls += " pass of " + std::to_string(works.size());
    if (works[0].data[0].tokens[0] == 98) {
      long_work_began.release();
      long_work_may_end.acquire();
    }
    if (works[0].data[0].tokens[0] == 99) {
      for (const tenants::Work& work : works) drop_gradients(work.set, true);
      throw DeviceError("the device has no memory left");
    }
    std::vector<tenants::WorkResult> results;
    for (const tenants::Work& work : works) {
      Set& set = sets_.at(work.set);
      tenants::WorkResult result;
      double sum = 0;
      for (const tenants::Datum& datum : work.data) {
        std::vector<float> logprobs;
        for (const std::int64_t token : datum.target_tokens) {
          logprobs.push_back(-static_cast<float>(token) - static_cast<float>(set.weights % 7));
          sum -= logprobs.back();
          if (!work.forward_only)
            set.gradient = set.gradient * 31 + static_cast<std::uint64_t>(token);
        }
        result.data.push_back({logprobs, logprobs});
      }
      result.metrics["loss:sum"] = sum;
      results.push_back(result);
    }
    return results;
  }
  /// A learning rate of 13 stands for gradients that are not finite, 17 for factors without any.
  std::vector<tenants::StepResult> optim_steps(
      std::span<const tenants::SetUpdate> updates) override {
    calls += " step of " + std::to_string(updates.size());
    std::vector<tenants::StepResult> results;
    for (const auto& [id, params] : updates) {
      Set& set = sets_.at(id);
      if (set.refuses_step) {
        drop_gradients(id, false);
        results.push_back({0, false, "the gradients were dropped"});
        continue;
      }
      const bool is_finite = params.lr != 13;
      if (is_finite)
        set.weights = hash::of(std::to_string(set.weights) + " " + std::to_string(set.gradient) +
                               " " + std::to_string(params.lr));
      set.gradient = 0;
      results.push_back({static_cast<double>(set.weights % 1000), is_finite});
      if (params.lr == 17) results.back().warning = "no gradient reaches q_proj";
    }
    return results;
  }
  void drop_gradients(tenants::SetId id, bool refuses_step) override {
    sets_.at(id) = {sets_.at(id).weights, 0, refuses_step};
  }
  bool is_finite(tenants::SetId) override { return weights_are_finite; }
  void save(tenants::SetId id, const std::filesystem::path& directory,
            tenants::SavedFor purpose) override {
    calls += " save";
    saved_for.push_back(purpose);
    if (disk_is_full) throw FileError("the disk is full");
    std::filesystem::create_directories(directory);
    std::ofstream(directory / "weights") << sets_.at(id).weights << " " << sets_.at(id).gradient;
    saved.release();
  }
  tenants::SetId load(const std::filesystem::path& directory, bool) override {
    Set set;
    std::ifstream(directory / "weights") >> set.weights >> set.gradient;
    sets_[++last_] = set;
    return last_;
  }
  std::shared_ptr<const adapters::LoraSet> snapshot(tenants::SetId id) override {
    calls += " snapshot " + std::to_string(id);
    return nullptr;
  }
  void save_snapshot(const std::shared_ptr<const adapters::LoraSet>&,
                     const std::filesystem::path& directory) override {
    calls += " save snapshot";
    std::filesystem::create_directories(directory);
    std::ofstream(directory / "weights") << 0;
  }
  std::shared_ptr<const adapters::LoraSet> load_snapshot(
      const std::filesystem::path& directory) override {
    calls += " load";
    if (!std::filesystem::exists(directory / "weights")) throw ModelError("no weights");
    return nullptr;
  }

  GenerationId submit(const Generation& generation) override {
    if (generation.weights) calls += " sample of " + generation.weights->name;
    waiting_[++last_generation_] = generation;
    return last_generation_;
  }
  void abort(GenerationId id) override { waiting_.erase(id); }
  bool is_generating() const override { return !waiting_.empty(); }
  /// Answers with the prompt's last token, max_tokens times; a prompt that begins with 99 never
  /// ends.
  std::vector<Event> step() override {
    std::vector<Event> events;
    for (auto entry = waiting_.begin(); entry != waiting_.end();) {
      const Generation& asked = entry->second;
      if (asked.prompt.front() == 99) {
        ++entry;
        continue;
      }
      GenerationResult result;
      for (std::int64_t i = 0; i < asked.samples; ++i) {
        GeneratedSequence sample;
        sample.ids.assign(static_cast<std::size_t>(asked.max_tokens), asked.prompt.back());
        sample.logprobs.assign(sample.ids.size(), -0.5);
        result.samples.push_back(sample);
      }
      events.push_back({entry->first, {}, result});
      entry = waiting_.erase(entry);
    }
    return events;
  }

  std::atomic<std::size_t> most_joined = 0;
  std::atomic<bool> disk_is_full = false, weights_are_finite = true;
  std::string
      calls;  ///< Passes, steps and saves in the order they ran in; to be read when nothing runs.
  std::vector<tenants::SetOptions>
      created;  ///< Options of create(), in order; to be read as `calls` are.
  std::vector<tenants::SavedFor> saved_for;  ///< Purposes of save(), likewise.
  std::counting_semaphore<> saved{0};        ///< Released by each save().
  /// A work whose first token is 98 says that it has begun, and waits until it may end.
  std::binary_semaphore long_work_began{0}, long_work_may_end{0};

 private:
  struct Set {
    std::uint64_t weights = 0;
    std::uint64_t gradient = 0;
    bool refuses_step = false;
  };
  ModelFacts facts_;
  std::map<tenants::SetId, Set> sets_;
  tenants::SetId last_ = 0;
  GenerationId last_generation_ = 0;
  std::map<GenerationId, Generation> waiting_;
};

}  // namespace heddle::serve::testing
