// Several adapters in one run.
#include "tenants/adapter_trainer.h"

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>

#include "adapters/lora.h"
#include "ckpt/safetensors.h"
#include "config/adapters.h"
#include "tenants/trainer.h"
#include "train/adapter_start.h"
#include "train/trainer_fixture.h"

namespace heddle::tenants {
namespace {

/// A model, and rows for three adapters.
class AdapterTrainerTest : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    for (const char* name : {"a", "b", "c"}) {
      std::ofstream data(dir_ / (std::string(name) + ".jsonl"));
      for (int i = 0; i < 40; ++i)
        data << nlohmann::json{{"text", std::string(name) + " says " + std::to_string(i * i)}}
             << "\n";
    }
  }
  std::string rows(const std::string& name) const { return (dir_ / (name + ".jsonl")).string(); }

  /// A file with three adapters that differ in all they may.
  std::string file() const {
    const std::string path = (dir_ / "run.yaml").string();
    std::ofstream yaml(path);
    yaml << "adapters:\n"
         << "  - {name: a, data: " << rows("a") << ", rank: 4, lr: 1e-3, seed: 5}\n"
         << "  - {name: b, data: " << rows("b") << ", rank: 9, alpha: 7, dropout: 0.25,"
         << " targets: [q_proj, in_proj_qkv], max_steps: 3, weight_decay: 0.1}\n"
         << "  - {name: c, data: " << rows("c") << ", targets: ['*.mlp.*'], clip_norm: 0.01,"
         << " global_batch_size: 6, schedule: constant}\n";
    return path;
  }
  std::vector<std::string> settings(const std::string& run,
                                    std::vector<std::string> more = {}) const {
    std::vector<std::string> all = arguments(run, {"train.max_steps=5", "ckpt.every=2"});
    std::erase_if(all, [](const std::string& s) { return s.starts_with("data.train="); });
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  AdaptersSummary train(const std::string& run, std::int64_t stop_after = 1000,
                        std::vector<std::string> more = {"train.deterministic=true"}) {
    const std::vector<config::AdapterRun> runs = config::load_adapters(file(), settings(run, more));
    std::atomic<bool> stop = false;
    StopAfter watching(stop_after, stop);
    train::Observer quiet;
    return AdapterTrainer(runs, {&watching, &quiet, &quiet}, stop).run();
  }
  std::string result(const std::string& run, const std::string& name) const {
    return weights(run, ("final/" + name + "/adapter_model.safetensors").c_str());
  }
};

TEST_F(AdapterTrainerTest, EachHasTheBitsOfTheRunThatTrainsItAlone) {
  const AdaptersSummary summary = train("together");
  ASSERT_EQ(summary.adapters.size(), 3U);
  EXPECT_EQ(summary.adapters[0].summary.steps, 5);
  EXPECT_EQ(summary.adapters[1].summary.steps, 3);
  const std::vector<std::vector<std::string>> own = {
      {"data.train=" + rows("a"), "adapter.rank=4", "optim.lr=1e-3", "train.seed=5"},
      {"data.train=" + rows("b"), "adapter.rank=9", "adapter.alpha=7", "adapter.dropout=0.25",
       "adapter.targets=[q_proj, in_proj_qkv]", "train.max_steps=3", "optim.weight_decay=0.1"},
      {"data.train=" + rows("c"), "adapter.targets=['*.mlp.*']", "optim.clip_norm=0.01",
       "train.global_batch_size=6", "optim.schedule=constant"}};
  for (std::size_t i = 0; i < own.size(); ++i) {
    const std::string name = summary.adapters[i].name;
    std::vector<std::string> alone = settings("alone-" + name, own[i]);
    alone.push_back("train.method=lora");
    train_until(config::load("", alone), 1000);
    EXPECT_TRUE(result("together", name) ==
                weights("alone-" + name, "final/adapter_model.safetensors"))
        << name;
  }
}

TEST_F(AdapterTrainerTest, SharesProductsUnlessBitsAreAskedFor) {
  const AdaptersSummary exact = train("exact"), shared = train("shared", 1000, {});
  bool differs = false;
  for (std::size_t i = 0; i < 3; ++i) {
    const train::Summary &a = exact.adapters[i].summary, &b = shared.adapters[i].summary;
    EXPECT_EQ(a.steps, b.steps);
    EXPECT_NEAR(a.last_loss, b.last_loss, 1e-4 * a.last_loss) << exact.adapters[i].name;
    differs = differs ||
              result("exact", exact.adapters[i].name) != result("shared", exact.adapters[i].name);
  }
  EXPECT_TRUE(differs) << "nothing was shared";
}

TEST_F(AdapterTrainerTest, AnEntryGoesOnFromAnAdapter) {
  train("first");
  const std::string path = (dir_ / "on.yaml").string();
  std::ofstream(path) << "adapters:\n"
                      << "  - {name: a, data: " << rows("a") << ", rank: 2}\n"
                      << "  - {name: b, data: " << rows("b")
                      << ", lr: 0, path: " << (dir_ / "first/final/b").string() << "}\n";
  std::vector<config::AdapterRun> runs = config::load_adapters(path, settings("on"));
  for (config::AdapterRun& run : runs) train::take_adapter_settings(run.config);
  EXPECT_EQ(runs[1].config.adapter.rank, 9);
  std::atomic<bool> stop = false;
  train::Observer quiet;
  AdapterTrainer(runs, {&quiet, &quiet}, stop).run();
  EXPECT_EQ(result("on", "b"), result("first", "b"));
  // Another adapter in its place is another start.
  std::filesystem::copy_file(dir_ / "first/final/a/adapter_model.safetensors",
                             dir_ / "first/final/b/adapter_model.safetensors",
                             std::filesystem::copy_options::overwrite_existing);
  std::filesystem::copy_file(dir_ / "first/final/a/adapter_config.json",
                             dir_ / "first/final/b/adapter_config.json",
                             std::filesystem::copy_options::overwrite_existing);
  runs[1].config.adapter = config::load_adapters(path, settings("on"))[1].config.adapter;
  train::take_adapter_settings(runs[1].config);
  EXPECT_THAT(testing::message_of([&] {
                AdapterTrainer(runs, {&quiet, &quiet}, stop).run();
              }),
              ::testing::HasSubstr("b: the set of weights of the adapter"));
  runs[1].config.adapter.modules_to_save = {"norm"};
  EXPECT_THAT(testing::message_of([&] {
                AdapterTrainer(runs, {&quiet, &quiet}, stop).run();
              }),
              ::testing::HasSubstr("adapter.path"));
}

TEST_F(AdapterTrainerTest, ChangesSinceTheCheckpointAreNamed) {
  train("run", 2);
  EXPECT_THAT(testing::message_of([&] { train("run", 1000, {"model.dtype=float64"}); }),
              ::testing::HasSubstr("adapter a: the checkpoint of step 2 was written with "
                                   "model.dtype=float32"));
  ::testing::internal::CaptureStderr();
  train("run", 3, {"train.deterministic=true", "adapter.alpha=5"});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("adapter a: the configuration changed since the checkpoint: "
                                   "adapter.alpha"));
}

TEST_F(AdapterTrainerTest, AStoppedRunGoesOnWithTheSameBits) {
  train("whole");
  EXPECT_TRUE(train("halves", 2).stopped);
  const AdaptersSummary rest = train("halves");
  EXPECT_FALSE(rest.stopped);
  EXPECT_EQ(rest.rounds, 5);
  for (const char* name : {"a", "b", "c"})
    EXPECT_TRUE(result("whole", name) == result("halves", name)) << name;
}

/// Keeps what a run says of its steps.
class Watching : public train::Observer {
 public:
  void on_step(const train::StepInfo& step) override { steps.push_back(step); }
  void on_evaluation(std::int64_t step, const train::Evaluation& evaluation, bool best) override {
    evaluations.emplace_back(step, evaluation.loss);
  }
  std::vector<train::StepInfo> steps;
  std::vector<std::pair<std::int64_t, double>> evaluations;
};

class PacedAdaptersTest : public AdapterTrainerTest {
 protected:
  /// Adapters a and b with the settings of each entry and of the run.
  AdaptersSummary train_two(const std::string& run, const std::string& of_a,
                            const std::string& of_b, std::vector<std::string> more) {
    const std::string path = (dir_ / "two.yaml").string();
    std::ofstream(path) << "adapters:\n  - {name: a, data: " << rows("a") << ", " << of_a
                        << "}\n  - {name: b, data: " << rows("b") << ", " << of_b << "}\n";
    std::vector<std::string> all = unpaced(run);
    all.insert(all.end(), more.begin(), more.end());
    watching_ = {};
    const std::atomic<bool> stop = false;
    return AdapterTrainer(config::load_adapters(path, all), {&watching_[0], &watching_[1]}, stop)
        .run();
  }
  Watching alone(const std::string& run, const std::string& name, std::vector<std::string> more) {
    std::vector<std::string> all = unpaced(run);
    all.insert(all.end(), {"train.method=lora", "data.train=" + rows(name)});
    all.insert(all.end(), more.begin(), more.end());
    Watching watching;
    const std::atomic<bool> stop = false;
    train::Trainer(config::load("", all), watching, stop).run();
    return watching;
  }
  std::array<Watching, 2> watching_;

 private:
  std::vector<std::string> unpaced(const std::string& run) const {
    std::vector<std::string> all = settings(run, {"train.deterministic=true"});
    std::erase_if(all, [](const std::string& s) {
      return s.starts_with("train.max_steps=") || s.starts_with("optim.warmup_steps=");
    });
    return all;
  }
};

// Steps that are given as shares of the run or of an epoch are each adapter's own.
TEST_F(PacedAdaptersTest, SharesOfARunAreThoseOfEachAdapter) {
  train_two("shares", "warmup_ratio: 0.5, epochs: 2.5, global_batch_size: 2", "max_steps: 4",
            {"optim.warmup_ratio=0.25"});
  const Watching a = alone(
                     "a", "a",
                     {"optim.warmup_ratio=0.5", "train.epochs=2.5", "train.global_batch_size=2"}),
                 b = alone("b", "b", {"optim.warmup_ratio=0.25", "train.max_steps=4"});
  ASSERT_GT(a.steps.size(), 1U);
  ASSERT_EQ(watching_[0].steps.size(), a.steps.size());
  ASSERT_EQ(watching_[1].steps.size(), 4U);
  EXPECT_LT(a.steps[0].lr, a.steps[1].lr) << "no warm-up to compare";
  for (std::size_t i = 0; i < a.steps.size(); ++i)
    EXPECT_EQ(watching_[0].steps[i].lr, a.steps[i].lr) << i;
  for (std::size_t i = 0; i < b.steps.size(); ++i)
    EXPECT_EQ(watching_[1].steps[i].lr, b.steps[i].lr) << i;
}

// Rows held out are not trained on, and each adapter is evaluated on its own.
TEST_F(PacedAdaptersTest, EvaluatesEachOnItsOwnRows) {
  const std::vector<std::string> shared = {"train.eval_every=2", "train.eval_on_start=true",
                                           "optim.lr=1e-2"};
  const AdaptersSummary summary = train_two("evaluated", "eval: 0.2, max_steps: 5",
                                            "eval: " + rows("c") + ", max_steps: 3", shared);
  const auto own = [&](const char* name, std::vector<std::string> more) {
    more.insert(more.end(), shared.begin(), shared.end());
    return alone(name, name, more);
  };
  const Watching found[] = {own("a", {"data.eval=0.2", "train.max_steps=5"}),
                            own("b", {"data.eval=" + rows("c"), "train.max_steps=3"})};
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(watching_[i].evaluations.size(), i == 0 ? 4U : 3U);  // 0, 2, 4, 5 and 0, 2, 3
    ASSERT_EQ(watching_[i].evaluations.size(), found[i].evaluations.size());
    for (std::size_t k = 0; k < found[i].evaluations.size(); ++k) {
      EXPECT_EQ(watching_[i].evaluations[k].first, found[i].evaluations[k].first);
      EXPECT_NEAR(watching_[i].evaluations[k].second, found[i].evaluations[k].second, 1e-6);
    }
    EXPECT_TRUE(summary.adapters[i].summary.has_eval);
    const Metrics& last = watching_[i].steps.back().metrics;
    EXPECT_TRUE(std::any_of(last.begin(), last.end(), [](const Metrics::Entry& entry) {
      return std::string_view(entry.name) == "eval_loss";
    }));
  }
  EXPECT_NEAR(watching_[0].steps[0].loss, found[0].steps[0].loss, 1e-6)
      << "held-out rows were trained on";
}

TEST_F(PacedAdaptersTest, AnAdapterThatGainsNothingEndsEarly) {
  // Rows of another adapter are answered worse with every step.
  const AdaptersSummary summary =
      train_two("early", "eval: " + rows("a") + ", lr: 1e-3", "eval: " + rows("c") + ", lr: 10",
                {"train.eval_every=1", "train.early_stop_patience=2", "train.max_steps=8"});
  EXPECT_EQ(summary.adapters[0].summary.steps, 8);
  EXPECT_LT(summary.adapters[1].summary.steps, 8);
  EXPECT_TRUE(std::filesystem::exists(dir_ / "early" / "final" / "b" / "README.md"));
}

TEST_F(AdapterTrainerTest, SettingsThatItDoesNotTakeAreRefusedByName) {
  for (const char* setting :
       {"train.spike=skip", "train.neftune_alpha=5", "train.grad_cosine=true",
        "ckpt.keep_best=true", "ckpt.every_epochs=0.5", "log.command=cat", "log.sample_prompts=[a]",
        "train.freeze=['*.layers.0.*']", "eval.metric=perplexity", "adapter.modules_to_save=[norm]",
        "train.recompute=auto", "train.router_replay=x"}) {
    const std::string key = std::string(setting).substr(0, std::string(setting).find('='));
    EXPECT_THAT(testing::message_of([&] { train("refused", 1000, {setting}); }),
                ::testing::HasSubstr(key))
        << setting;
    EXPECT_FALSE(std::filesystem::exists(dir_ / "refused")) << setting;
  }
}

TEST_F(AdapterTrainerTest, ASecondRunInTheSameFolderIsKeptOut) {
  const train::RunLock first(dir_ / "shared");
  EXPECT_THAT(testing::message_of([&] { train("shared"); }), ::testing::HasSubstr("shared"));
}

TEST_F(AdapterTrainerTest, WrongEntriesAreNamedWithTheirLine) {
  const auto refusal = [&](const std::string& list) {
    files::write_atomically(dir_ / "wrong.yaml", list);
    const std::string path = (dir_ / "wrong.yaml").string();
    return testing::message_of([&] { config::load_adapters(path, settings("wrong")); });
  };
  const std::string file = (dir_ / "wrong.yaml").string();
  EXPECT_EQ(refusal("adapters: a"),
            file +
                ":1: adapters: expected a list as [{name: a, data: a.jsonl, rank: 8}, ...], "
                "found 'a'");
  EXPECT_EQ(
      refusal("adapters:\n  - {name: a/b, data: x}"),
      file + ":2: adapters: expected a name of letters, digits, '_', '-' and '.', found 'a/b'");
  EXPECT_EQ(refusal("adapters:\n  - {name: a, data: x}\n  - {name: a, data: y}"),
            file + ":3: adapters: the name 'a' is given twice");
  EXPECT_TRUE(
      refusal("adapters:\n  - {name: a, data: x, rnk: 8}")
          .starts_with(file + ":2: adapters: an entry has no 'rnk' (did you mean 'rank'?)"));
  EXPECT_TRUE(refusal("adapters:\n  - {name: a, data: x, rank: many}")
                  .starts_with(file + ":2: adapter.rank: expected"));
  EXPECT_EQ(refusal("adapters:\n  - {name: a}").substr(0, file.size() + 41),
            "adapter a: " + file + ": required key 'data.train' is");
  EXPECT_EQ(testing::message_of([&] { config::load(this->file(), settings("x")); }),
            this->file() + ":1: adapters: only heddle sft trains several adapters in one run");
}

}  // namespace
}  // namespace heddle::tenants
