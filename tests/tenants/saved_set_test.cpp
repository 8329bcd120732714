// Sets of adapters on disk.
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>

#include "adapters/lora.h"
#include "ckpt/safetensors.h"
#include "config/adapters.h"
#include "tenants/trainer.h"
#include "train/trainer_fixture.h"

namespace heddle::tenants {
namespace {

/// A base for the trainer of a server.
class SavedSetTest : public TrainerTest {
 protected:
  assembly::ModelOnRanks place(const std::string& model = "model") const {
    return assembly::place(
        assembly::recipe_of_directory(dir_ / model, {}, assembly::Head::kLanguageModel,
                                      assembly::Purpose::kTenants),
        {});
  }
  static Work work(SetId set, int seed) {
    Work work;
    work.set = set;
    work.loss_fn = "ppo";
    for (const int length : {7 + seed % 3, 40}) {
      Datum datum;
      for (int t = 0; t < length; ++t) {
        datum.tokens.push_back((seed * 131 + t * t) % 4096);
        datum.target_tokens.push_back((seed * 17 + t * 29) % 4096);
        datum.inputs["logprobs"].push_back(-8.3F - 0.1F * static_cast<float>(t % 5));
        datum.inputs["advantages"].push_back(static_cast<float>(t % 3) - 1);
      }
      work.data.push_back(datum);
    }
    return work;
  }
  static std::vector<double> train(Trainer& trainer, SetId set, int first, int last) {
    std::vector<double> numbers;
    for (int s = first; s < last; ++s) {
      const std::vector<Work> works = {work(set, s)};
      const WorkResult result = trainer.forward_backward(works)[0];
      EXPECT_EQ(result.error, "");
      numbers.push_back(result.metrics.at("loss:sum"));
      numbers.push_back(trainer.optim_step(set, {.lr = 1e-2, .weight_decay = 0.1}).grad_norm);
    }
    return numbers;
  }
  void expect_same_bits(const std::string& model, const SetOptions& options) const;
  void make_mixture() const {
    make_model("moe", {{"model_type", "qwen3_5_moe_text"},
                       {"num_experts", kExperts},
                       {"num_experts_per_tok", 2},
                       {"moe_intermediate_size", 24},
                       {"shared_expert_intermediate_size", 16}});
  }
  /// Bytes of the tensors in a file.
  std::uint64_t stored(const std::string& file) const {
    const ckpt::SafetensorsFile opened(dir_ / file);
    std::uint64_t bytes = 0;
    for (const ckpt::StoredTensor& tensor : opened.tensors()) bytes += tensor.bytes();
    return bytes;
  }
  /// The form in which generation and scoring hold the experts' factors of a directory.
  nn::ExpertFactors held(const std::string& adapter) const {
    return assembly::place(assembly::recipe_of_directory(dir_ / "moe", dir_ / adapter,
                                                         assembly::Head::kLanguageModel,
                                                         assembly::Purpose::kScore),
                           {})
        .adapters->options()
        .expert_factors;
  }
  static constexpr int kExperts = 6;
};

std::vector<at::Tensor> values_of(const adapters::LoraSet& set) {
  std::vector<at::Tensor> values;
  set.visit_parameters([&](const nn::Parameter& factor) { values.push_back(factor.data()); });
  return values;
}

void expect_equal(const adapters::LoraSet& a, const adapters::LoraSet& b) {
  const std::vector<at::Tensor> of_a = values_of(a), of_b = values_of(b);
  ASSERT_EQ(of_a.size(), of_b.size());
  for (std::size_t i = 0; i < of_a.size(); ++i) EXPECT_TRUE(at::equal(of_a[i], of_b[i])) << i;
}

void SavedSetTest::expect_same_bits(const std::string& model, const SetOptions& options) const {
  assembly::ModelOnRanks base = place(model), again = place(model);
  Trainer trainer(base, {.deterministic = true}), other(again, {.deterministic = true});
  const SetId set = trainer.create(options);
  train(trainer, set, 0, 3);
  const std::vector<Work> pending = {work(set, 50)};
  trainer.forward_backward(pending);
  trainer.save(set, dir_ / "set", SavedFor::kTraining);
  const std::vector<double> expected = train(trainer, set, 3, 13);

  const SetId loaded = other.load(dir_ / "set", /*with_optimizer=*/true);
  EXPECT_EQ(other.steps(loaded), 3);
  EXPECT_EQ(other.options(loaded).rank, 5);
  EXPECT_EQ(other.options(loaded).shared_expert_factors, options.shared_expert_factors);
  EXPECT_EQ(train(other, loaded, 3, 13), expected);
  EXPECT_NE(expected.front(), expected.back());

  // Without the optimizer it starts anew from the same weights.
  const SetId weights = other.load(dir_ / "set", /*with_optimizer=*/false);
  EXPECT_EQ(other.steps(weights), 0);
  trainer.save(set, dir_ / "bare", SavedFor::kSampling);
  EXPECT_NE(testing::message_of([&] {
              other.load(dir_ / "bare", true);
            }).find("saved without its optimizer"),
            std::string::npos);

  // Weights for a sampler, from a snapshot and from a checkpoint.
  trainer.save_snapshot(*trainer.snapshot(set), dir_ / "snapshot");
  for (const char* saved : {"snapshot", "bare"})
    expect_equal(*trainer.snapshot(set), *other.load_snapshot(dir_ / saved));
  EXPECT_EQ(other.options(other.load(dir_ / "snapshot", false)).shared_expert_factors,
            options.shared_expert_factors);
}

TEST_F(SavedSetTest, GoesOnWithTheSameBitsPendingGradientsIncluded) {
  expect_same_bits("model", {.rank = 5, .seed = 9, .unembed = true});
}

TEST_F(SavedSetTest, OfAMixtureGoesOnWithItsFormOfFactors) {
  make_mixture();
  for (const bool shared : {false, true}) {
    expect_same_bits("moe", {.rank = 5, .seed = 9, .shared_expert_factors = shared});
    for (const char* made : {"set", "bare", "snapshot"}) std::filesystem::remove_all(dir_ / made);
  }
}

TEST_F(SavedSetTest, OfAMixtureHoldsASharedFactorOnceButForPeft) {
  make_mixture();
  assembly::ModelOnRanks base = place("moe");
  Trainer trainer(base, {.deterministic = true});
  const SetId set = trainer.create({.rank = 5, .seed = 9, .shared_expert_factors = true});
  train(trainer, set, 0, 2);
  const auto snapshot = trainer.snapshot(set);
  std::uint64_t once = 0, repeated = 0;
  snapshot->visit_parameters([&](const nn::Parameter& factor) {
    const bool is_shared = factor.global_shape().size() == 3 && factor.global_shape()[0] == 1;
    const std::uint64_t bytes = factor.data().nbytes();
    once += bytes;
    repeated += is_shared ? bytes * kExperts : bytes;
  });
  trainer.save(set, dir_ / "training", SavedFor::kTraining);
  trainer.save(set, dir_ / "sampling", SavedFor::kSampling);
  trainer.save_snapshot(*snapshot, dir_ / "snapshot");
  trainer.save(set, dir_ / "peft", SavedFor::kPeft);
  EXPECT_LT(once, repeated);
  for (const std::string own : {"training", "sampling", "snapshot"}) {
    EXPECT_EQ(stored(own + "/heddle_adapter.safetensors"), once) << own;
    EXPECT_FALSE(std::filesystem::exists(dir_ / own / "adapter_model.safetensors")) << own;
    EXPECT_EQ(held(own), nn::ExpertFactors::kSharedOuter) << own;
    expect_equal(*snapshot, *trainer.load_snapshot(dir_ / own));
  }
  EXPECT_EQ(stored("peft/adapter_model.safetensors"), repeated);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "peft/heddle_adapter.safetensors"));

  // The compact form is written in PEFT's afterwards as it would have been at once.
  for (const std::string own : {"training", "peft"}) {
    const std::filesystem::path from = dir_ / own, to = dir_ / (own + " written");
    const std::uint64_t bytes =
        ckpt::write_in_peft_form(ckpt::AdapterDirectory::open(from), to, /*overwrite=*/false);
    EXPECT_EQ(bytes, std::filesystem::file_size(to / "adapter_model.safetensors")) << own;
    for (const char* file : {"adapter_model.safetensors", "adapter_config.json"})
      EXPECT_EQ(files::read(to / file), files::read(dir_ / "peft" / file)) << own << " " << file;
    EXPECT_FALSE(std::filesystem::exists(to / "heddle_training.safetensors")) << own;
  }

  // Directories without a state show what is shared.
  std::filesystem::remove(dir_ / "peft/heddle_training.json");
  EXPECT_EQ(held("peft"), nn::ExpertFactors::kSharedOuter);
  expect_equal(*snapshot, *trainer.load_snapshot(dir_ / "peft"));
}

TEST_F(SavedSetTest, OfAMixtureFromBeforeTheCompactFormGoesOnWithTheSameBits) {
  make_mixture();
  assembly::ModelOnRanks base = place("moe");
  Trainer trainer(base, {.deterministic = true});
  const SetId set = trainer.create({.rank = 5, .seed = 9, .shared_expert_factors = true});
  train(trainer, set, 0, 3);
  trainer.save(set, dir_ / "old", SavedFor::kTraining);
  trainer.save(set, dir_ / "peft", SavedFor::kPeft);
  std::filesystem::remove(dir_ / "old/heddle_adapter.safetensors");
  std::filesystem::copy(dir_ / "peft/adapter_model.safetensors", dir_ / "old");
  const SetId loaded = trainer.load(dir_ / "old", /*with_optimizer=*/true);
  EXPECT_TRUE(trainer.options(loaded).shared_expert_factors);
  expect_equal(*trainer.snapshot(set), *trainer.snapshot(loaded));
  EXPECT_EQ(train(trainer, loaded, 3, 6), train(trainer, set, 3, 6));
}

TEST_F(SavedSetTest, ExpertsWithAPairEachDoNotShareThem) {
  make_mixture();
  assembly::ModelOnRanks base = place("moe");
  Trainer trainer(base, {.deterministic = true});
  const SetId set = trainer.create({.rank = 5, .seed = 9});
  train(trainer, set, 0, 2);
  trainer.save(set, dir_ / "pairs", SavedFor::kSampling);
  EXPECT_EQ(held("pairs"), nn::ExpertFactors::kPairs);
  // A state that says otherwise.
  nlohmann::json state = nlohmann::json::parse(files::read(dir_ / "pairs/heddle_training.json"));
  EXPECT_EQ(state.at("shared_expert_factors"), false);
  state["shared_expert_factors"] = true;
  files::write_atomically(dir_ / "pairs/heddle_training.json", state.dump());
  EXPECT_THAT(testing::message_of([&] { trainer.load_snapshot(dir_ / "pairs"); }),
              ::testing::AllOf(::testing::HasSubstr("for expert 1 than for expert 0"),
                               ::testing::HasSubstr("adapter.shared_expert_factors")));
}

}  // namespace
}  // namespace heddle::tenants
