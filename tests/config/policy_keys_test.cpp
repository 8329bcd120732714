// Keys of `heddle rl`: each acts, is refused, or is named as one without effect.
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/text.h"
#include "config/config.h"
#include "config/field.h"

namespace heddle::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr const char* kRun =
    "model: {path: m}\n"
    "data: {train: a}\n"
    "train: {objective: policy}\n"
    "rl: {reward: {verifiers: {exact: 1}}}\n";

std::vector<std::string> unused(const std::vector<std::string>& overrides) {
  return unused_keys(parse(kRun, "run.yaml", overrides));
}

/// A value of the key that is not its default, as an override writes it.
std::string other_value(const Field& field) {
  const Json value = field.get(RunConfig());
  if (value.is_boolean()) return value.get<bool>() ? "false" : "true";
  if (field.type.find('|') != std::string::npos) {
    for (const std::string& word : text::split(field.type, '|')) {
      if (value != Json(word) && word != "none" && word != "number") return word;
    }
    return "0.5";  // number|none
  }
  if (value.is_number_integer()) return std::to_string(value.get<std::int64_t>() + 1);
  if (value.is_number()) return value == Json(1.0) ? "0.5" : "1";
  if (value.is_array() && !value.empty()) return "[0.25, 0.5]";
  if (value.is_array()) return field.type.find("integer") != std::string::npos ? "[1, 2]" : "[x]";
  return "x";
}

// In the plainest run: mode sync, loss ppo, verifiers, one rank without an accelerator.
TEST(PolicyKeys, ActOrAreNamedOrRefused) {
  const std::set<std::string> acting = {"rl.mode",
                                        "rl.role",
                                        "rl.rollout_ranks",
                                        "rl.groups_per_step",
                                        "rl.sync_every",
                                        "rl.epochs",
                                        "rl.samples_per_group",
                                        "rl.old_logprobs",
                                        "rl.dynamic_sampling",
                                        "rl.groups_every",
                                        "rl.router_replay",
                                        "rl.deterministic",  // waits for programs
                                        "rl.algorithm.advantage",
                                        "rl.algorithm.loss",
                                        "rl.algorithm.mean",
                                        "rl.algorithm.clip_low",
                                        "rl.algorithm.clip_high",
                                        "rl.algorithm.dual_clip",
                                        "rl.algorithm.entropy_coef",
                                        "rl.algorithm.entropy_target",
                                        "rl.correction.rs",
                                        "rl.correction.off_policy_delta",
                                        "rl.reference.kl_coef",
                                        "rl.reward.combine",
                                        "rl.reward.shuffle",
                                        "rl.reward.failed",  // refused where the reward is made
                                        "rollout.max_new_tokens",
                                        "rollout.max_sequences",
                                        "rollout.prefill_tokens",
                                        "rollout.stop",
                                        "rollout.temperature",
                                        "rollout.top_k",
                                        "rollout.state_dtype",
                                        "rollout.memory_fraction",
                                        "rollout.release_memory"};
  std::set<std::string> found;
  for (const Section& section : schema()) {
    const bool is_of_rl = section.key == "rl" || section.key.starts_with("rl.") ||
                          section.key == "rollout" || section.key == "sync";
    if (!is_of_rl) continue;
    for (const Field& field : section.fields) {
      const std::string setting = field.key + "=" + other_value(field);
      try {
        const std::vector<std::string> named = unused({setting});
        if (named.empty()) found.insert(field.key);
        for (const std::string& line : named) EXPECT_THAT(line, HasSubstr(field.key));
        EXPECT_LE(named.size(), 1u) << setting;
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), HasSubstr(section.key)) << setting;
        EXPECT_THAT(error.what(), Not(HasSubstr("found '"))) << setting << ": no value of the key";
      }
    }
  }
  // One that is new is put among these, or named in unused_policy_keys.cpp.
  EXPECT_EQ(found, acting);
}

TEST(PolicyKeys, ActWhereTheirLossOrRewardDoes) {
  EXPECT_THAT(
      unused({"rl.algorithm.loss=cispo", "rl.algorithm.clip_high=4", "rl.algorithm.dual_clip=3"}),
      ElementsAre(StartsWith("command line: rl.algorithm.dual_clip has no effect: ")));
  EXPECT_THAT(unused({"rl.algorithm.loss=sapo", "rl.algorithm.sapo_tau_positive=2"}), IsEmpty());
  EXPECT_THAT(
      unused({"rl.algorithm.loss=dppo", "rl.algorithm.dppo_cap=2", "rl.algorithm.clip_low=0.1"}),
      SizeIs(1));
  EXPECT_THAT(unused({"rl.algorithm.loss=dro", "rl.algorithm.dro_beta=0.1"}), IsEmpty());
  EXPECT_THAT(unused({"rl.algorithm.advantage=reinforce++", "rl.algorithm.gamma=0.9"}), IsEmpty());
  EXPECT_THAT(unused({"rl.overlong=punish", "rl.overlong_buffer=8", "rl.overlong_penalty=2"}),
              IsEmpty());
  EXPECT_THAT(unused({"rl.reference.kl_coef=0.1", "rl.reference.kl_form=k1"}), IsEmpty());
  EXPECT_THAT(unused({"rl.reference.kl_coef=0.1", "rl.reference.kl_where=reward",
                      "rl.reference.kl_form=k1"}),
              SizeIs(1));
  EXPECT_THAT(unused({"rl.correction.is_cap=5"}), SizeIs(1));
  EXPECT_THAT(unused({"rl.correction.is_cap=5", "rl.old_logprobs=recompute"}), IsEmpty());
  EXPECT_THAT(unused({"rl.correction.is_cap=5", "rl.algorithm.loss=reinforce"}), IsEmpty());
  EXPECT_THAT(unused({"rl.reward.verifiers={}", "rl.reward.command=[judge]", "rl.reward.workers=4",
                      "rl.reward.timeout_s=5"}),
              IsEmpty());
  EXPECT_THAT(unused({"rl.reward.verifiers={}", "rl.reward.url=http://host", "rl.reward.batch=4"}),
              IsEmpty());
  EXPECT_THAT(unused({"rl.mode=async", "rl.stale_attempts=2"}), SizeIs(1));
  EXPECT_THAT(unused({"rl.mode=async", "rl.stale_policy=drop", "rl.stale_attempts=2"}), IsEmpty());
}

TEST(PolicyKeys, OfOtherRowsAreNamed) {
  EXPECT_THAT(unused({"data.packing=false", "data.fields.completion=answer"}), SizeIs(2));
  EXPECT_THAT(unused({"data.fields.prompt=question", "data.fields.answer=solution"}), IsEmpty());
}

TEST(PolicyKeys, TheCriticsScheduleTakesWhatSchedulesTake) {
  const std::vector<std::string> critic = {"rl.algorithm.advantage=gae", "rl.critic.schedule=wsd",
                                           "optim.schedule=constant",    "optim.decay_steps=5",
                                           "optim.min_lr_ratio=0.1",     "optim.decay_type=cosine"};
  EXPECT_THAT(unused(critic), IsEmpty());
  EXPECT_THAT(unused({"optim.schedule=constant", "optim.decay_steps=5", "optim.min_lr_ratio=0.1"}),
              SizeIs(2));
}

// Keys of any name are replaced where they are given as a whole, and added to one by one.
TEST(PolicyKeys, AnOverrideOfAllVerifiersLeavesNoneOfTheFile) {
  const auto verifiers = [](const std::vector<std::string>& overrides) {
    std::vector<std::string> names;
    for (const auto& [name, weight] : parse(kRun, "run.yaml", overrides).rl.reward.verifiers)
      names.push_back(name);
    return names;
  };
  EXPECT_THAT(verifiers({"rl.reward.verifiers={math: 1}"}), ElementsAre("math"));
  EXPECT_THAT(verifiers({"rl.reward={verifiers: {math: 1}}"}), ElementsAre("math"));
  EXPECT_THAT(verifiers({"rl.reward.verifiers.math=1"}), ElementsAre("exact", "math"));
  EXPECT_THAT(verifiers({"rl.reward.verifiers={}", "rl.reward.command=[judge]"}), IsEmpty());
  const RunConfig config =
      parse(kRun, "run.yaml",
            std::vector<std::string>{"rl.reward.verifiers={math: 1}", "kernels.rms_norm=cpu",
                                     "kernels={swiglu: cpu}"});
  EXPECT_THAT(dump_yaml(config), Not(HasSubstr("exact")));
  EXPECT_FALSE(config.is_set("rl.reward.verifiers.exact"));
  EXPECT_THAT(dump_yaml(config), HasSubstr("rms_norm")) << "kernels has a key of its own as well";
}

}  // namespace
}  // namespace heddle::config
