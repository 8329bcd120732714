// Pools by CacheOptions: pages, and the memory that they may take.
#include "rollout/pool_size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "assembly/tiny_model_on_ranks.h"
#include "device/device.h"
#include "testing/message_of.h"

namespace heddle::rollout {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PoolSizeTest : public ::testing::Test {
 protected:
  /// Bytes of one slot, or one page of so many tokens.
  std::int64_t bytes(std::int64_t slots, std::int64_t pages, std::int64_t page_tokens) const {
    std::int64_t sum = 0;
    for (const nn::LayerCache& layer :
         loaded_.model->make_cache({.slots = slots, .pages = pages, .page_tokens = page_tokens})) {
      for (const at::Tensor& memory : {layer.conv, layer.state, layer.keys, layer.values})
        sum += memory.defined() ? static_cast<std::int64_t>(memory.nbytes()) : 0;
    }
    return sum;
  }

  assembly::ModelOnRanks loaded_ =
      testing::tiny_model_on_ranks(at::kFloat, false, assembly::Purpose::kGenerate);
};

TEST_F(PoolSizeTest, HoldsAllSequencesAtFullLength) {
  EngineOptions options{.max_sequences = 5, .capacity = 100};
  EXPECT_EQ(pool_size(loaded_, options).pages, 5 * 4);
  options.caches.kv_page = 16;
  EXPECT_EQ(pool_size(loaded_, options).pages, 5 * 7);
  EXPECT_EQ(pool_size(loaded_, options).slots, 5 + 4);
  options.caches.kv_page = 24;
  EXPECT_EQ(testing::message_of([&] { pool_size(loaded_, options); }),
            "rollout.kv_page: expected a power of two, found 24");
}

TEST_F(PoolSizeTest, TakesAShareOfWhatIsFree) {
  // More than any machine has: states of kilobytes, then tokens of some hundred bytes.
  EngineOptions options{.max_sequences = std::int64_t{1} << 30, .capacity = 1024};
  options.kept_states = 0;
  EXPECT_THAT(
      testing::message_of([&] { pool_size(loaded_, options); }),
      AllOf(HasSubstr("the states of 1073741824 sequences ("),
            HasSubstr(") do not fit into 0.9 of the "), HasSubstr("rollout.memory_fraction")));
  options.max_sequences = 4;
  options.capacity = std::int64_t{1} << 40;
  EXPECT_THAT(testing::message_of([&] { pool_size(loaded_, options); }),
              HasSubstr("the states of 4 sequences ("));

  // Half of what 1000 sequences want.
  options.capacity = 4096;
  options.max_sequences = 1000;
  const std::int64_t wanted = options.max_sequences * options.capacity / 32,
                     slots = bytes(options.max_sequences + 1, 0, 32), page = bytes(0, 1, 32),
                     free = device::free_bytes(loaded_.context.device);
  const std::int64_t budget = slots + wanted / 2 * page;
  ASSERT_LT(budget, free) << "the machine has too little memory for the test";
  options.caches.memory_fraction = static_cast<double>(budget) / static_cast<double>(free);
  const CachePool::Size size = pool_size(loaded_, options);
  // Other processes' memory changes in between.
  EXPECT_LT(size.pages, wanted * 3 / 4);
  EXPECT_GT(size.pages, wanted / 4);
}

}  // namespace
}  // namespace heddle::rollout
