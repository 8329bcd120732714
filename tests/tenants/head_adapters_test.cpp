// Adapters on the language-model head: trained, sampled from, saved, with the same numbers.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "ckpt/adapter_directory.h"
#include "nn/low_rank.h"
#include "rollout/engine.h"
#include "tenants/trainer.h"
#include "train/trainer_fixture.h"

namespace heddle::tenants {
namespace {

constexpr int kVocabulary = 4096;

/// Whether the head is the embedding.
class HeadAdapters : public TrainerTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    make_model("model", {{"tie_word_embeddings", GetParam()}});
    assembly::ModelRecipe recipe = assembly::recipe_of_directory(
        dir_ / "model", {}, assembly::Head::kLanguageModel, assembly::Purpose::kTenants);
    recipe.generates = true;
    base_ = assembly::place(recipe, {});
    trainer_.emplace(base_, TrainerOptions{.pass_tokens = 200});
  }

  static Work work(SetId set, int seed) {
    Work work;
    work.set = set;
    work.loss_fn = "cross_entropy";
    for (const int length : {9, 1, 30}) {
      Datum& datum = work.data.emplace_back();
      for (int t = 0; t < length; ++t) {
        datum.tokens.push_back((seed * 31 + t * t * 7 + t * 3) % kVocabulary);
        datum.target_tokens.push_back((seed * 17 + t * 5) % kVocabulary);
        datum.inputs["weights"].push_back(0.25F * static_cast<float>(t % 4));
      }
    }
    return work;
  }
  void train(SetId set, int steps, std::vector<double>* losses = nullptr) {
    for (int s = 0; s < steps; ++s) {
      const Work one = work(set, s);
      const WorkResult result = trainer_->forward_backward({&one, 1})[0];
      ASSERT_EQ(result.error, "");
      if (losses != nullptr) losses->push_back(result.metrics.at("loss:sum"));
      trainer_->optim_step(set, {.lr = 2e-2});
    }
  }
  /// Log-probabilities that the trainer gives the tokens of an answer.
  std::vector<float> scored(SetId set, const rollout::Request& request,
                            const rollout::Completion& answer) {
    std::vector<std::int64_t> all(request.prompt.begin(), request.prompt.end());
    all.insert(all.end(), answer.output_ids.begin(), answer.output_ids.end());
    Work forward;
    forward.set = set;
    forward.loss_fn = "cross_entropy";
    forward.forward_only = true;
    forward.data.resize(1);
    forward.data[0].tokens.assign(all.begin(), all.end() - 1);
    forward.data[0].target_tokens.assign(all.begin() + 1, all.end());
    forward.data[0].inputs["weights"].assign(all.size() - 1, 1);
    const auto logprobs = trainer_->forward_backward({&forward, 1})[0].data.at(0).logprobs;
    return {logprobs.end() - static_cast<std::ptrdiff_t>(answer.output_ids.size()), logprobs.end()};
  }

  assembly::ModelOnRanks base_;
  std::optional<Trainer> trainer_;
};

INSTANTIATE_TEST_SUITE_P(Heads, HeadAdapters, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Tied" : "Untied"; });

TEST_P(HeadAdapters, GenerateWhatTheTrainerScoresBesideOtherSets) {
  const at::Tensor table = base_.model->head_weight().data().clone();
  std::vector<SetId> sets;
  for (const SetOptions& options :
       {SetOptions{.rank = 4, .seed = 1, .attn = false, .mlp = false, .unembed = true},
        SetOptions{.rank = 6, .seed = 2}, SetOptions{.rank = 3, .seed = 3, .unembed = true}}) {
    sets.push_back(trainer_->create(options));
    train(sets.back(), 3);
  }
  rollout::Engine engine(base_, nullptr, {.max_sequences = 6});
  std::map<rollout::RequestId, std::pair<SetId, rollout::Request>> asked;
  for (int i = 0; i < 6; ++i) {
    rollout::Request request;
    for (int t = 0; t < 5 + i; ++t) request.prompt.push_back((7 * i + t * t) % kVocabulary);
    request.max_new_tokens = 8;
    request.ignore_eos = true;
    const SetId set = sets[static_cast<std::size_t>(i % 3)];
    request.adapter = std::make_shared<const rollout::Adapter>(
        rollout::Adapter{std::to_string(set), 1, trainer_->snapshot(set)});
    asked.emplace(engine.submit(request), std::pair{set, request});
  }
  std::size_t answers = 0;
  while (!engine.is_idle()) {
    for (const rollout::Progress& progress : engine.step()) {
      if (!progress.completion) continue;
      ++answers;
      const auto& [set, request] = asked.at(progress.id);
      const std::vector<float> expected = scored(set, request, *progress.completion);
      ASSERT_EQ(progress.completion->logprobs.size(), expected.size());
      for (std::size_t t = 0; t < expected.size(); ++t)
        EXPECT_NEAR(progress.completion->logprobs[t], expected[t], 2e-5) << "set " << set;
    }
  }
  EXPECT_EQ(answers, 6U);
  EXPECT_TRUE(at::equal(table, base_.model->head_weight().data()));
}

TEST_P(HeadAdapters, TrainTheHeadAndComeBackFromAFileWithTheSameBits) {
  const SetId set =
      trainer_->create({.rank = 4, .seed = 5, .attn = false, .mlp = false, .unembed = true});
  std::vector<double> losses;
  train(set, 6, &losses);
  EXPECT_LT(losses.back(), losses.front());
  const Work waiting = work(set, 7);
  trainer_->forward_backward({&waiting, 1});
  const std::filesystem::path saved = dir_ / "saved";
  trainer_->save(set, saved, SavedFor::kTraining);
  const ckpt::AdapterDirectory files = ckpt::AdapterDirectory::open(saved);
  ASSERT_EQ(files.pairs().size(), 1U);
  EXPECT_EQ(files.pairs()[0].module, "lm_head");
  EXPECT_EQ(files.config().target_modules, std::vector<std::string>{"lm_head"});

  const SetId again = trainer_->load(saved, /*with_optimizer=*/true);
  EXPECT_TRUE(trainer_->options(again).unembed);
  for (const SetId id : {set, again}) trainer_->optim_step(id, {.lr = 1e-2});
  const auto factors = [&](SetId id) {
    std::vector<at::Tensor> values;
    trainer_->snapshot(id)->visit_parameters(
        [&](const nn::Parameter& factor) { values.push_back(factor.data()); });
    return values;
  };
  const std::vector<at::Tensor> one = factors(set), other = factors(again);
  ASSERT_EQ(one.size(), 2U);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], other.at(i))) << i;
  EXPECT_GT(one[1].abs().max().item<float>(), 0);
}

}  // namespace
}  // namespace heddle::tenants
