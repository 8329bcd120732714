#include "parallel/pipeline.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <mutex>

#include "comm/ranks.h"

namespace heddle::parallel {
namespace {

/// Runs the messages of a step, each rank a thread, and returns for each the most tensors that were
/// kept at the end of an action. `is_trained`: something before the first layer is, so that
/// gradients travel.
std::vector<std::size_t> most_kept(std::int64_t ranks, std::int64_t chunks,
                                   std::int64_t micro_batches, bool is_trained = true) {
  std::mutex mutex;
  std::vector<std::size_t> most(static_cast<std::size_t>(ranks), 0);
  const auto errors = testing::run_ranks(ranks, [&](const std::shared_ptr<comm::World>& world) {
    const StagePlan plan{
        ranks, chunks, {static_cast<std::size_t>(ranks * chunks), std::pair{0L, 0L}}};
    Pipeline pipeline(comm::Mesh({1, 1, 1, 1, ranks}, world), plan, {}, is_trained, {});
    const auto value_of = [](std::int64_t m) {
      return at::full({3}, static_cast<double>(m), at::kDouble);
    };
    std::size_t own_most = 0;
    for (const PipelineAction& action : pipeline.actions(micro_batches)) {
      const Pipeline::Stage& stage = pipeline.stages()[static_cast<std::size_t>(action.chunk)];
      const std::int64_t m = action.micro_batch;
      at::Tensor tensor = value_of(action.is_backward ? -m : m);
      const at::Tensor expected = tensor;
      if (!action.is_backward) {
        if (!stage.is_first) tensor = pipeline.receive_hidden(stage, m, {3}, tensor.options());
        if (!stage.is_last) pipeline.send_hidden(stage, m, tensor);
      } else if (stage.has_backward) {
        if (!stage.is_last) tensor = pipeline.receive_gradient(stage, m, {3}, tensor.options());
        if (stage.sends_gradient) pipeline.send_gradient(stage, m, tensor);
      }
      EXPECT_TRUE(tensor.equal(expected)) << "micro-batch " << m;
      pipeline.drop_arrived(action);
      own_most = std::max(own_most, pipeline.kept_sends());
    }
    pipeline.finish_sends();
    EXPECT_EQ(pipeline.kept_sends(), 0U);
    const std::scoped_lock lock(mutex);
    most[static_cast<std::size_t>(world->rank())] = own_most;
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return most;
}

TEST(Pipeline, KeepsNoMoreForManyMicroBatches) {
  for (const auto& [ranks, chunks] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 2}}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << chunks << " chunks");
    const auto few = most_kept(ranks, chunks, 4 * ranks);
    EXPECT_EQ(most_kept(ranks, chunks, 16 * ranks), few);
    // A number that the ranks do not divide.
    for (const std::size_t most : most_kept(ranks, chunks, 16 * ranks + 1))
      EXPECT_LT(most, 8U * ranks);
  }
}

TEST(Pipeline, KeepsNoMoreForManyMicroBatchesWhereNothingAnswers) {
  for (const auto& [ranks, chunks] : {std::pair{2, 1}, {3, 2}}) {
    SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << chunks << " chunks");
    EXPECT_EQ(most_kept(ranks, chunks, 16 * ranks, /*is_trained=*/false),
              most_kept(ranks, chunks, 4 * ranks, /*is_trained=*/false));
  }
}

}  // namespace
}  // namespace heddle::parallel
