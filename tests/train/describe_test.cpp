#include "train/describe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "assembly/from_config.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using Rows = std::map<std::string, std::int64_t>;
using Settings = std::vector<std::string>;

class DescribeTest : public TrainerTest {
 protected:
  struct Described {
    Rows memory;
    std::int64_t embedding = 0, widest_block = 0;  ///< Bytes of the whole.
  };

  /// One rank's description of a layout whose other ranks are not there.
  Described describe(const Settings& layout, std::int64_t rank, std::int64_t ranks,
                     double micro_batches = 1) const {
    train::Observer observer;
    train::Setup setup = train::make_setup(config("run"), observer);
    const models::Config model = setup.placed.model->config();
    const config::RunConfig divided = config("run", layout);
    runtime::Context context = setup.placed.context;
    context.mesh = comm::Mesh(assembly::mesh_sizes(divided.parallel, ranks), rank, ranks);
    setup.placed = assembly::place(assembly::recipe_of_run(divided, model), context);
    const train::Optimizer optimizer(setup.placed.trainable, divided.optim, /*seed=*/1);
    const train::RunInfo info = train::describe_setup(setup, divided, optimizer, micro_batches);
    EXPECT_EQ(info.ranks, ranks);

    const auto bytes = [](const nn::Parameter& parameter) {
      return parameter.numel() * parameter.value().element_size();
    };
    Described result{{info.memory.begin(), info.memory.end()},
                     bytes(setup.placed.model->embedding_weight())};
    for (const auto& layer : setup.placed.model->layers()) {
      std::int64_t block = 0;
      layer->visit_parameters([&](nn::Parameter& parameter) { block += bytes(parameter); });
      result.widest_block = std::max(result.widest_block, block);
    }
    return result;
  }
};

const char* const kActivations = "activations (estimate)";

TEST_F(DescribeTest, ShardsAreOfThisRankWithTheUnitsThatAreGathered) {
  const Rows one = describe({}, 0, 1).memory;
  const Described first = describe({"parallel.fsdp=2"}, 0, 2),
                  second = describe({"parallel.fsdp=2"}, 1, 2);
  const std::int64_t gathered = first.widest_block + std::max(first.widest_block, first.embedding);
  EXPECT_EQ(first.memory.at("weights") + second.memory.at("weights"),
            one.at("weights") + 2 * gathered);
  EXPECT_EQ(first.memory.at("optimizer") + second.memory.at("optimizer"), one.at("optimizer"));
  // They are whole until they are summed.
  EXPECT_EQ(first.memory.at("gradients"), one.at("gradients"));
}

TEST_F(DescribeTest, AStageHasItsLayersAndTheEndsThatItNeeds) {
  const Rows one = describe({}, 0, 1).memory;
  const Described first = describe({"parallel.pp=2"}, 0, 2, /*micro_batches=*/8),
                  last = describe({"parallel.pp=2"}, 1, 2, /*micro_batches=*/8);
  // Both have the tied table.
  for (const char* row : {"weights", "gradients"}) {
    EXPECT_EQ(first.memory.at(row) + last.memory.at(row), one.at(row) + first.embedding) << row;
    EXPECT_LT(first.memory.at(row), one.at(row)) << row;
  }
  // The first stage has two micro-batches in flight, the last one.
  EXPECT_NEAR(static_cast<double>(first.memory.at(kActivations)) / 2 +
                  static_cast<double>(last.memory.at(kActivations)),
              static_cast<double>(one.at(kActivations)), 2);
}

TEST_F(DescribeTest, TensorRanksDivideMatricesAndContextRanksTokens) {
  const Rows one = describe({}, 0, 1).memory, tensor = describe({"parallel.tp=2"}, 0, 2).memory;
  const Described context = describe({"parallel.cp=2"}, 0, 2);
  EXPECT_LT(tensor.at("gradients"), one.at("gradients"));
  EXPECT_GT(tensor.at("gradients"), one.at("gradients") / 2);
  EXPECT_LT(tensor.at("optimizer"), one.at("optimizer"));
  EXPECT_NEAR(static_cast<double>(context.memory.at(kActivations)) * 2,
              static_cast<double>(one.at(kActivations)), 2);
}

TEST_F(DescribeTest, AnAdapterIsCalledOneAlsoByASecondRun) {
  std::vector<std::string> command = {"pt"};
  for (const std::string& argument :
       arguments("run", {"train.max_steps=4", "train.method=lora", "adapter.rank=2"}))
    command.push_back(argument);
  for (const char* words : {"4 steps in ", "already finished after step 4"}) {
    std::string out;
    ASSERT_EQ(run_cli(command, &out), 0);
    EXPECT_THAT(out, ::testing::StartsWith(words));
    EXPECT_THAT(out, ::testing::HasSubstr("\nadapter: " + (dir_ / "run/final").string() +
                                          " (in Python on AutoModelForCausalLM)\n"));
  }
}

}  // namespace
}  // namespace heddle
