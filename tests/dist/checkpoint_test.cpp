// P14 of the parallel engine: a checkpoint of one layout continues under any other.
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ckpt/model_directory.h"
#include "ckpt/tensor_io.h"
#include "dist/launched_run.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;
using Words = std::vector<std::string>;
namespace fs = std::filesystem;

class LayoutCheckpointTest : public ::testing::Test {
 protected:
  /// A copy of a run's folder under another name, to continue it there.
  void copy_run(const std::string& from, const std::string& to) const {
    fs::copy(runs_.directory() / from, runs_.directory() / to, fs::copy_options::recursive);
  }
  std::string exported(const std::string& run) const {
    return files::read(runs_.directory() / run / "final/model.safetensors");
  }
  void expect_run(const std::string& run, std::int64_t ranks, const Words& words,
                  const std::string& model = "moe") const {
    ASSERT_EQ(runs_.run(run, ranks, model, words), 0) << runs_.printed(run);
  }

  LaunchedRuns runs_;
};

Words with_steps(int steps, Words words) {
  words.push_back("train.max_steps=" + std::to_string(steps));
  words.push_back("model.dtype=float64");
  words.push_back("optim.schedule=constant");
  return words;
}

/// Two steps in each of five layouts are ten steps of one rank.
class LayoutsInTurnTest : public LayoutCheckpointTest {
 protected:
  void expect_one_curve(const Words& what) const {
    const auto words = [&](int steps, Words layout) {
      layout.insert(layout.end(), what.begin(), what.end());
      return with_steps(steps, std::move(layout));
    };
    expect_run("whole", 0, words(10, {}));
    expect_run("run", 8, words(2, {"parallel.dp=2", "parallel.tp=2", "parallel.pp=2"}));
    EXPECT_TRUE(fs::exists(runs_.directory() /
                           "run/checkpoints/step-00000002/weights-00008-of-00008.safetensors"));
    expect_run("run", 2, words(4, {"parallel.cp=2", "parallel.ep=2"}));
    expect_run("run", 0, words(6, {}));
    expect_run("run", 2, words(8, {"parallel.fsdp=2"}));
    expect_run("run", 4, words(10, {"parallel.tp=4"}));
    const auto whole = runs_.metrics("whole"), steps = runs_.metrics("run");
    ASSERT_EQ(steps.size(), whole.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_NEAR(steps[i].loss, whole[i].loss, 1e-9 * whole[i].loss) << "step " << i + 1;
      EXPECT_NEAR(steps[i].grad_norm, whole[i].grad_norm, 1e-9 * whole[i].grad_norm);
    }
  }
};

TEST_F(LayoutsInTurnTest, OfAllWeights) { expect_one_curve({}); }

TEST_F(LayoutsInTurnTest, OfAdaptersOnExpertsToo) {
  expect_one_curve(
      {"train.method=lora", "adapter.rank=4", "adapter.target_parameters=[mlp.experts.down_proj]"});
}

TEST_F(LayoutsInTurnTest, OfAdaptersOnExpertsThatShareFactors) {
  expect_one_curve({"train.method=lora", "adapter.rank=4", "adapter.shared_expert_factors=true",
                    "adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]"});
}

TEST_F(LayoutCheckpointTest, OneCheckpointExportsTheSameBytesUnderEveryLayout) {
  expect_run("run", 2, with_steps(3, {"parallel.dp=2", "parallel.ep=2"}));
  // Continued by no step: what is exported is what was read.
  for (const auto& [name, ranks, words] :
       {std::tuple{"one", 0, Words{}}, std::tuple{"fsdp", 3, Words{"parallel.fsdp=3"}},
        std::tuple{"tp", 4, Words{"parallel.tp=4"}},
        std::tuple{"mixed", 4, Words{"parallel.pp=2", "parallel.fsdp=2", "parallel.ep=2"}}}) {
    copy_run("run", name);
    fs::remove_all(runs_.directory() / name / "final");
    expect_run(name, ranks, with_steps(3, words));
    EXPECT_EQ(exported(name), exported("run")) << name;
  }
}

TEST_F(LayoutCheckpointTest, ADamagedOneIsPassedOverOrNamedOnEveryRank) {
  const Words layout = {"parallel.fsdp=2", "ckpt.every=2"};
  expect_run("run", 2, with_steps(4, layout), "dense");
  const std::string file = "checkpoints/step-00000004/weights-00002-of-00002.safetensors";
  {
    std::fstream stream(runs_.directory() / "run" / file,
                        std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);
    stream.put('\x55');
  }
  copy_run("run", "named");
  const std::string message = "weights-00002-of-00002.safetensors is damaged";
  expect_run("run", 2, with_steps(5, layout), "dense");
  EXPECT_THAT(runs_.printed("run"), ::testing::HasSubstr(message));
  EXPECT_EQ(runs_.metrics("run").size(), 5U);

  Words named = with_steps(5, layout);
  named.push_back("train.resume=" + (runs_.directory() / "named" / file).parent_path().string());
  EXPECT_EQ(runs_.run("named", 2, "dense", named), 2);
  EXPECT_THAT(runs_.printed("named"), ::testing::HasSubstr(message));
  EXPECT_THAT(files::read(runs_.directory() / "named.logs/rank-1.log"),
              ::testing::HasSubstr(message));
}

TEST_F(LayoutCheckpointTest, OneOfAnotherRunIsExportedWithoutAStep) {
  expect_run("run", 2, with_steps(2, {"parallel.fsdp=2"}), "dense");
  expect_run("other", 2,
             with_steps(2, {"parallel.fsdp=2",
                            "train.resume=" +
                                (runs_.directory() / "run/checkpoints/step-00000002").string()}),
             "dense");
  EXPECT_EQ(exported("other"), exported("run"));
}

TEST_F(LayoutCheckpointTest, AdaptersAreExportedFromTheRanksThatShareThem) {
  const Words lora = {"train.method=lora", "adapter.rank=4",
                      "adapter.target_parameters=[mlp.experts.gate_up_proj]"};
  Words sharded = lora, experts = lora, tensor = lora;
  sharded.push_back("parallel.fsdp=3");
  experts.insert(experts.end(), {"parallel.dp=2", "parallel.ep=2"});
  expect_run("one", 0, with_steps(3, lora));
  expect_run("sharded", 3, with_steps(3, sharded));
  tensor.push_back("parallel.tp=4");
  expect_run("experts", 2, with_steps(3, experts));
  expect_run("tensor", 4, with_steps(3, tensor));
  const auto adapter = [&](const std::string& run) {
    return files::read(runs_.directory() / run / "final/adapter_model.safetensors");
  };
  for (const std::string run : {"sharded", "experts", "tensor"}) {
    EXPECT_NEAR(runs_.metrics(run)[2].loss, runs_.metrics("one")[2].loss, 1e-9);
    const std::string again = run + "-again";
    copy_run(run, again);
    fs::remove_all(runs_.directory() / again / "final");
    expect_run(again, 0, with_steps(3, lora));
    EXPECT_EQ(adapter(again), adapter(run)) << run;
  }
}

// Its values are in no file of the model: the ranks that hold them save them.
TEST_F(LayoutCheckpointTest, AFrozenNewHeadIsExportedFromEveryLayout) {
  const auto words = [&](int steps, Words more) {
    more.insert(more.begin(),
                {"model.head=classify", "model.num_labels=3", "train.freeze=[score.weight]",
                 "data.train=" + (runs_.directory() / "labelled.jsonl").string()});
    return with_steps(steps, std::move(more));
  };
  const auto head = [&](const std::string& run) {
    return ckpt::read_tensor(
        ckpt::ModelDirectory::open(runs_.directory() / run / "final").at("score.weight"));
  };
  expect_run("one", 0, words(1, {}), "dense");
  for (const auto& [name, ranks, layout] :
       {std::tuple{"dp", 2, Words{"parallel.dp=2"}},
        std::tuple{"shards", 4, Words{"parallel.fsdp=2", "parallel.dp=2"}},
        std::tuple{"stages", 4, Words{"parallel.tp=2", "parallel.pp=2"}}}) {
    expect_run(name, ranks, words(1, layout), "dense");
    EXPECT_TRUE(at::equal(head(name), head("one"))) << name;
  }
  // Without a trained neighbour the head stays whole on both ranks, and one saves it.
  expect_run(
      "stages", 2,
      words(2, {"parallel.dp=2", "train.freeze=[score.weight, '*.norm.weight', '*embed_tokens*']"}),
      "dense");
  EXPECT_TRUE(at::equal(head("stages"), head("one")));
}

TEST_F(LayoutCheckpointTest, AnotherRunsLastCheckpointIsExported) {
  expect_run("run", 2, with_steps(2, {"parallel.dp=2"}));
  const std::string resume =
      "train.resume=" + (runs_.directory() / "run/checkpoints/step-00000002").string();
  expect_run("one", 0, with_steps(2, {resume}));
  expect_run("sharded", 2, with_steps(2, {resume, "parallel.fsdp=2"}));
  for (const char* run : {"one", "sharded"}) EXPECT_EQ(exported(run), exported("run")) << run;
}

TEST_F(LayoutCheckpointTest, EightBitMomentsContinueUnderAnyOtherLayout) {
  runs_.make_model("blocks", false, {{"hidden_size", 256}, {"intermediate_size", 512}});
  const auto words = [](int steps, Words more) {
    more.insert(more.end(), {"optim.state_dtype=int8", "optim.schedule=constant",
                             "train.max_steps=" + std::to_string(steps)});
    return more;
  };
  expect_run("whole", 0, words(8, {}), "blocks");
  expect_run("run", 4, words(2, {"parallel.fsdp=2", "parallel.dp=2"}), "blocks");
  expect_run("run", 2, words(4, {"parallel.tp=2"}), "blocks");
  expect_run("run", 2, words(6, {"parallel.pp=2"}), "blocks");
  expect_run("run", 0, words(8, {}), "blocks");
  const auto whole = runs_.metrics("whole"), steps = runs_.metrics("run");
  ASSERT_EQ(steps.size(), whole.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    // Each element is rounded by the same random bits, but for what tp divides by columns.
    const double bound = i < 3 ? 1e-6 : 1e-3;
    EXPECT_NEAR(steps[i].loss, whole[i].loss, bound * whole[i].loss) << "step " << i + 1;
  }
  EXPECT_NE(runs_.run("cut", 4, "blocks", words(1, {"parallel.tp=4"})), 0);
  EXPECT_THAT(runs_.printed("cut"), ::testing::HasSubstr("blocks of 256 columns"));
}

}  // namespace
}  // namespace heddle
