// Facts that trainers and rollouts, and the ranks of each, have alike.
#include "rl/run_facts.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "assembly/from_config.h"
#include "rl/rendezvous.h"
#include "rl/rl_fixture.h"
#include "testing/message_of.h"

namespace heddle {
namespace {

TEST_F(RlTest, JobsThatRenderTheirPromptsOtherwiseDiffer) {
  const auto chat = dir_ / "chat.jinja";
  const config::RunConfig settings = run("facts", {"data.chat_template=" + chat.string()});
  const auto tokenizer = data::Tokenizer::load(settings.model.tokenizer);
  const auto with = [&](const std::string& begin) {
    files::write_atomically(chat, begin + "{% for m in messages %}{{ m.content }}{% endfor %}");
    const rl::Prompts prompts(settings, train::DataPart::kTrain, *tokenizer);
    return std::pair(rl::facts_of_job(settings, prompts), prompts.identity());
  };
  // Prompts have as many tokens, under the same configuration, from the same rows.
  const auto one = with("Q"), same = with("Q"), other = with("Z");
  EXPECT_EQ(rl::difference(one.first, same.first), "");
  EXPECT_THAT(rl::difference(one.first, other.first),
              ::testing::StartsWith("the content of data.train is "));
  EXPECT_EQ(one.second, same.second);
  EXPECT_NE(one.second, other.second);
}

TEST(Rendezvous, AFileOfSomethingElseIsNamed) {
  for (const char* text : {"{\"secret\": \"x\"}", "{}", "[]", "{\"endpoint\": 1}"}) {
    EXPECT_EQ(testing::message_of([&] { rl::Place::from_text(text, "place.json"); }),
              "place.json: expected an object with the texts 'endpoint' and 'secret', as the "
              "trainer writes it; copy it anew from the trainer's train.output_dir")
        << text;
  }
}

TEST_F(RlTest, ALayoutThatLeavesNoRankToGenerateSaysHowManyToStart) {
  const config::RunConfig settings =
      run("layout", {"rl.rollout_ranks=1", "rl.mode=async", "parallel.fsdp=2"});
  EXPECT_EQ(testing::message_of([&] { assembly::require_layout(settings, 2); }),
            "parallel.* has 2 ranks that train, and of the job's 2 rl.rollout_ranks 1 leave 1: "
            "start it with heddle launch --nproc 3, or change parallel.*");
  EXPECT_EQ(testing::message_of([&] { assembly::require_layout(settings, 3); }), "(no error)");
}

}  // namespace
}  // namespace heddle
