#include "objective/local_batch.h"

#include <gtest/gtest.h>

#include "assembly/model_units.h"
#include "comm/ranks.h"
#include "models/tiny_model.h"

namespace heddle::objective {
namespace {

using assembly::block_entries;

TEST(EvaluateHidden, KeepsNothingThatWasSent) {
  const at::Device cpu(at::kCPU);
  const auto whole = testing::tiny_model(at::kDouble, /*moe=*/false, cpu);
  parallel::Pipeline one(block_entries(*whole), /*embedding_trained=*/false);
  const at::Tensor expected =
      evaluate_hidden(*whole, one, LocalBatch(*whole, testing::batch_of({{1, 9}, {2, 5}})));
  for (const std::int64_t chunks : {1, 2}) {
    const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      const auto model = testing::tiny_model(at::kDouble, /*moe=*/false, cpu);
      parallel::Pipeline pipeline(comm::Mesh({1, 1, 1, 1, 2}, world),
                                  parallel::StagePlan::balanced(model->config(), 2, chunks),
                                  block_entries(*model), /*embedding_trained=*/false, {});
      const LocalBatch batch(*model, testing::batch_of({{1, 9}, {2, 5}}));
      for (int i = 0; i < 3; ++i) {
        const at::Tensor hidden = evaluate_hidden(*model, pipeline, batch);
        EXPECT_EQ(hidden.defined(), pipeline.has_last_stage());
        if (hidden.defined()) {
          EXPECT_TRUE(hidden.allclose(expected, 1e-12, 1e-12));
        }
        EXPECT_EQ(pipeline.kept_sends(), 0U) << chunks << " chunks";
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

}  // namespace
}  // namespace heddle::objective
