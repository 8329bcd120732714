#include "parallel/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "models/registry.h"

namespace heddle::parallel {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

models::Config model(bool moe = false,
                     const nlohmann::ordered_json& change = nlohmann::ordered_json::object()) {
  nlohmann::ordered_json json = {{"model_type", moe ? "qwen3_5_moe_text" : "qwen3_5_text"},
                                 {"vocab_size", 97},
                                 {"hidden_size", 32},
                                 {"intermediate_size", 48},
                                 {"num_hidden_layers", 4},
                                 {"num_attention_heads", 8},
                                 {"num_key_value_heads", 4},
                                 {"head_dim", 16},
                                 {"linear_num_key_heads", 12},
                                 {"linear_num_value_heads", 24},
                                 {"linear_key_head_dim", 16},
                                 {"linear_value_head_dim", 16},
                                 {"num_experts", 12},
                                 {"num_experts_per_tok", 2},
                                 {"moe_intermediate_size", 16},
                                 {"shared_expert_intermediate_size", 24}};
  json.update(change);
  return models::parse_config(json, "test");
}

TEST(Layout, TakesWhatDividesHeadsAndWidths) {
  for (const std::int64_t tp : {1, 2, 4})
    check_layout(comm::Mesh({tp, 1, 1, 1, 1}, 0, tp), model());
}

TEST(Layout, RefusesWithTheNumbersAndTheNearestDegree) {
  EXPECT_THAT(
      [] {
        check_layout(comm::Mesh({8, 1, 1, 1, 1}, 0, 8), model());
      },
      ThrowsMessage<ConfigError>(AllOf(
          HasSubstr("parallel.tp is 8"), HasSubstr("linear_num_key_heads 12"),
          Not(HasSubstr("num_key_value_heads")), HasSubstr("the nearest degree that does is 4"))));
  EXPECT_THAT(
      [] {
        check_layout(comm::Mesh({3, 1, 1, 1, 1}, 0, 3), model());
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("num_attention_heads 8"),
                                       HasSubstr("num_key_value_heads 4"),
                                       HasSubstr("the nearest degree that does is 2"))));
}

TEST(Layout, RepeatsKeyValueHeadsThatTensorRanksOutnumber) {
  check_layout(comm::Mesh({4, 1, 1, 1, 1}, 0, 4), model(false, {{"num_key_value_heads", 2}}));
  // 6 ranks would share 2 heads evenly, but not the 8 query heads; the nearest that fits both is 4.
  const models::Config config = model(
      false,
      {{"num_key_value_heads", 2}, {"linear_num_key_heads", 24}, {"linear_num_value_heads", 24}});
  EXPECT_THAT(
      [&] {
        check_layout(comm::Mesh({6, 1, 1, 1, 1}, 0, 6), config);
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("num_attention_heads 8"),
                                       Not(HasSubstr("num_key_value_heads")),
                                       HasSubstr("the nearest degree that does is 4"))));
}

TEST(Layout, UlyssesDividesHeadsTogetherWithTensorParallelism) {
  const auto check = [](std::int64_t tp, std::int64_t cp, ops::ContextMethod method) {
    check_layout(comm::Mesh({tp, cp, 1, 1, 1}, 0, tp * cp), model(), method);
  };
  check(2, 2, ops::ContextMethod::kUlysses);
  check(2, 7, ops::ContextMethod::kState);
  EXPECT_THAT(
      [&] { check(2, 4, ops::ContextMethod::kUlysses); },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("parallel.cp is 4"), HasSubstr("tp x cp, 8"),
                                       HasSubstr("linear_num_key_heads 12"),
                                       HasSubstr("nearest degree that does is 2"))));
}

TEST(Layout, EpDividesTheExperts) {
  for (const std::int64_t ep : {1, 2, 4})
    check_layout(comm::Mesh({1, 1, 2, 4, 1}, 0, 8, ep), model(/*moe=*/true));
  EXPECT_THAT(
      [] {
        check_layout(comm::Mesh({1, 1, 2, 4, 1}, 0, 8, 8), model(/*moe=*/true));
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("parallel.ep is 8"), HasSubstr("num_experts 12"),
                                       HasSubstr("the nearest degree that does is 4"))));
  EXPECT_THAT(
      [] {
        check_layout(comm::Mesh({1, 1, 1, 5, 1}, 0, 5, 5), model(/*moe=*/true));
      },
      ThrowsMessage<ConfigError>(HasSubstr(
          "the nearest degree that does is 1; 2, 3, 4, 6, 12 divide the experts but need another "
          "number of ranks")));
  EXPECT_THAT(
      [] {
        check_layout(comm::Mesh({1, 1, 1, 2, 1}, 0, 2, 2), model());
      },
      ThrowsMessage<ConfigError>(HasSubstr("this model has no experts")));
}

TEST(Layout, EveryStageOfAPipelineHasALayer) {
  const auto check = [](std::int64_t pp, std::int64_t chunks) {
    check_layout(comm::Mesh({1, 1, 1, 1, pp}, 0, pp), model(), ops::ContextMethod::kState, chunks);
  };
  check(4, 1);
  check(2, 2);
  EXPECT_THAT([&] { check(4, 2); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("parallel.pp is 4 with 2 chunks"),
                                               HasSubstr("8 stages"), HasSubstr("the model has 4"),
                                               HasSubstr("degree that works is 2"))));
}

}  // namespace
}  // namespace heddle::parallel
