// States of sequences between the turns of an episode.
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "rl/generation.h"
#include "rl/rl_fixture.h"
#include "train/vocabulary.h"

namespace heddle {
namespace {

using Memory = std::pair<std::int64_t, std::int64_t>;

/// Generation as a trainer would call it, and what its passes read.
class TurnsTest : public RlTest {
 protected:
  void make(const std::string& name, Words more) {
    generation_.reset();
    read_ = 0;
    more.push_back("rollout.stop=[e, a]");
    more.push_back("rl.deterministic=true");  // each pass is one of the engine
    config_ = episodes(name, more);
    const auto source = std::make_shared<const ckpt::ModelDirectory>(
        ckpt::ModelDirectory::open(config_.model.path));
    tokenizer_ = train::load_tokenizer(config_).tokenizer;
    assembly::ModelRecipe recipe =
        assembly::recipe_of_run(config_, assembly::read_config(*source), source);
    recipe.purpose = assembly::Purpose::kGenerate;
    model_ = assembly::place(recipe, assembly::make_context(config_, nullptr));
    prompts_.emplace(config_, train::DataPart::kTrain, *tokenizer_);
    generation_.emplace(config_, model_, tokenizer_, *prompts_);
  }
  bool advance() {
    const bool has_passed = generation_->advance();
    if (!has_passed) return false;
    const rollout::PassShape& pass = generation_->made_engine()->last_pass();
    if (!pass.draws) read_ += pass.tokens;
    return true;
  }
  rl::Batch next() {
    while (true) {
      if (std::optional<rl::Batch> batch = generation_->try_next()) return *std::move(batch);
      advance();
    }
  }
  Memory free() const { return generation_->made_engine()->free_memory(); }
  const std::vector<std::int32_t>& prompt(const rl::Group& group) const {
    return prompts_->row(group.row).tokens;
  }

  config::RunConfig config_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  assembly::ModelOnRanks model_;
  std::optional<rl::Prompts> prompts_;
  std::optional<rl::Generation> generation_;
  std::int64_t read_ = 0;  ///< Prompt tokens in passes.
  static constexpr std::int64_t kSlots = 16 + 16, kPages = 16 * 2;
};

TEST_F(TurnsTest, ReadNothingTwice) {
  make("once", {});
  const rl::Batch batch = next();
  std::int64_t expected = 0, observed = 0;
  ASSERT_EQ(batch.groups.size(), 4U);
  for (const rl::Group& group : batch.groups) {
    // All samples begin from one reading, and read the prompt's last token by themselves.
    expected += std::ssize(prompt(group)) - 1;
    for (const rl::Trajectory& trajectory : group.trajectories) {
      // The observation, and the last token of the turn, which was drawn and not read.
      const std::int64_t turns = std::ssize(trajectory.turns);
      expected += std::ssize(trajectory.tokens) - trajectory.sampled_tokens() + turns;
      observed += turns;
    }
  }
  EXPECT_GT(observed, 8);
  EXPECT_EQ(read_, expected);
  EXPECT_EQ(free(), Memory(kSlots, kPages));
}

TEST_F(TurnsTest, DrawWhatTheyWouldAfterReadingAllAnew) {
  make("drawn", {});
  const rl::Batch batch = next();
  std::int64_t compared = 0;
  for (const rl::Group& group : batch.groups) {
    const std::uint64_t stream = rollout::seed_of_row(
        rollout::seed_of_row(config_.train.seed, static_cast<std::uint64_t>(group.cursor)), 0);
    for (std::size_t place = 0; place < group.trajectories.size(); ++place) {
      const rl::Trajectory& trajectory = group.trajectories[place];
      std::uint64_t turn = 0;
      for (std::size_t t = 1; t < trajectory.tokens.size(); ++t) {
        if (!trajectory.is_sampled(t) || trajectory.is_sampled(t - 1)) continue;
        // A turn begins.
        rollout::Request request;
        request.prompt = prompt(group);
        request.prompt.insert(request.prompt.end(), trajectory.tokens.begin(),
                              trajectory.tokens.begin() + static_cast<std::ptrdiff_t>(t));
        std::size_t end = t;
        while (end < trajectory.tokens.size() && trajectory.is_sampled(end)) ++end;
        request.max_new_tokens = static_cast<std::int64_t>(end - t);
        request.sampling.seed =
            rollout::seed_of_row(rollout::seed_of_sample(stream, place), ++turn);
        const auto cold = rollout::generate(model_, nullptr, {request}, {});
        for (std::size_t i = t; i < end; ++i) {
          EXPECT_EQ(cold[0].output_ids[i - t], trajectory.tokens[i]);
          EXPECT_NEAR(cold[0].logprobs[i - t], trajectory.logprobs[i], 1e-9);
          ++compared;
        }
      }
    }
  }
  EXPECT_GT(compared, 50);
}

TEST_F(TurnsTest, ThatAreCancelledLeaveNothing) {
  make("cancelled", {"rl.mode=async", "rl.max_staleness=1", "rl.update_mode=abort"});
  next();
  // Others are under way, some of them between turns.
  for (int pass = 0; pass < 12; ++pass) advance();
  EXPECT_NE(free(), Memory(kSlots, kPages));
  generation_->prepare_update();
  // States that are left are those of prompts that samples waited for, which any of them might have
  // gone on from.
  generation_->updated();
  EXPECT_EQ(free(), Memory(kSlots, kPages));
}

TEST_F(TurnsTest, AreReadAnewUnderOtherWeights) {
  // A token of old weights is read by the new ones, unless the context may be mixed.
  std::map<std::string, std::int64_t> read;
  for (const std::string mode : {"recompute", "keep"}) {
    make(mode, {"rl.mode=async", "rl.max_staleness=1", "rl.update_mode=" + mode});
    for (int batch = 0; batch < 6; ++batch) {
      next();
      advance();  // others are under way
      generation_->updated();
    }
    read[mode] = read_;
  }
  EXPECT_GT(read["recompute"], read["keep"]);
}

TEST_F(TurnsTest, GiveTheirMemoryToTheTrainer) {
  for (const bool releases : {false, true}) {
    make(releases ? "released" : "kept",
         {"rl.mode=async", "rl.max_staleness=1",
          std::string("rollout.release_memory=") + (releases ? "true" : "false")});
    for (int batch = 0; batch < 3; ++batch) {
      const rl::Batch given = generation_->next();
      EXPECT_EQ(given.groups.size(), 4u);
      EXPECT_EQ(generation_->made_engine()->has_memory(), !releases) << batch;
      generation_->updated();
      EXPECT_TRUE(advance());
      EXPECT_TRUE(generation_->made_engine()->has_memory()) << batch;
    }
  }
}

}  // namespace
}  // namespace heddle
