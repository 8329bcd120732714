#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "base/text.h"
#include "ui/progress.h"
#include "ui/table.h"
#include "ui/terminal.h"
#include "ui/token_colors.h"

namespace heddle::ui {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Terminal, WidthCountsColumnsNotBytes) {
  EXPECT_EQ(display_width("abc"), 3);
  EXPECT_EQ(display_width("größe"), 5);
  EXPECT_EQ(display_width("\x1b[1;32mabc\x1b[0m"), 3);
  EXPECT_EQ(display_width("漢字"), 4);
  EXPECT_EQ(display_width("e\u0301"), 1);
  EXPECT_EQ(display_width("😀"), 2);
  EXPECT_EQ(display_width("a\xff\xc3"), 3);
}

TEST(Terminal, FitNeverExceedsTheWidth) {
  EXPECT_EQ(fit("abcdef", 6), "abcdef");
  EXPECT_EQ(fit("abcdef", 4), "abc…");
  EXPECT_EQ(fit("漢字漢", 4), "漢…");
  EXPECT_EQ(fit("abc", 0), "");
  const std::string mixed = "\x1b[31mgröße 漢字 e\u0301 😀\x1b[0m end";
  for (int width = 0; width < 25; ++width) EXPECT_LE(display_width(fit(mixed, width)), width);
  EXPECT_THAT(fit(mixed, 4), ::testing::EndsWith("\x1b[0m"));
}

TEST(Terminal, WrapsAtSpacesAndLosesNothingElse) {
  EXPECT_THAT(wrap("rebuild with: cmake --preset cuda", 14),
              ::testing::ElementsAre("rebuild with:", "cmake --preset", "cuda"));
  EXPECT_THAT(wrap("/a/long/path", 5), ::testing::ElementsAre("/a/lo", "ng/pa", "th"));
  EXPECT_THAT(wrap("漢字漢字 x", 5), ::testing::ElementsAre("漢字", "漢字", "x"));
  EXPECT_THAT(wrap("", 5), ::testing::ElementsAre(""));
  for (int width = 2; width < 30; ++width) {
    for (const std::string& line : wrap("größe 漢字 and a_long_word_without_spaces end", width)) {
      EXPECT_LE(display_width(line), width);
    }
  }
}

TEST(Terminal, DecodesAndRefusesUtf8) {
  EXPECT_EQ(decode_utf8("é").value, U'é');
  EXPECT_EQ(decode_utf8("😀x").bytes, 4u);
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\xff"}) {
    EXPECT_EQ(decode_utf8(bad).value, 0xFFFDu);
    EXPECT_EQ(decode_utf8(bad).bytes, 1u);
  }
}

TEST(Table, PlainColumnsAreAligned) {
  Table table({"name", "bytes"}, {Align::kLeft, Align::kRight});
  table.row({"weights", "12"}).row({"größe", "3456"}).row({"only"});
  EXPECT_EQ(table.render(TableStyle::kPlain),
            "name     bytes\n"
            "--------------\n"
            "weights     12\n"
            "größe     3456\n"
            "only\n");
}

TEST(Table, BoxHasOneWidthOnEveryLine) {
  Table table({"", "parameters"}, {Align::kLeft, Align::kRight});
  table.section("Model 漢字");
  table.row({"attention", "1.2 B"}).row({"two\nlines", "3"});
  table.section("a title that is wider than all the columns together are");
  table.section("Kernels").row({"gated_delta_rule", "cpu.avx512"});
  const std::string box = table.render(TableStyle::kBox, true);
  const auto lines = text::split(box, '\n');
  for (std::size_t i = 0; i + 1 < lines.size(); ++i) {
    EXPECT_EQ(display_width(lines[i]), display_width(lines[0])) << box;
  }
  EXPECT_THAT(table.render(TableStyle::kBox), Not(HasSubstr("\x1b")));
}

TEST(Table, IsWrappedToTheTerminal) {
  Table table;
  table.row({"key", std::string(200, 'x')}).row({"key", "some words " + std::string(99, 'y')});
  const std::string box = table.render(TableStyle::kBox, false, 60);
  EXPECT_EQ(std::ranges::count(box, 'x'), 200);
  for (const auto& line : text::split(box, '\n')) {
    EXPECT_LE(display_width(line), 60);
  }
  EXPECT_EQ(Table().render(TableStyle::kPlain), "");
}

ProgressLine training_line() {
  StepMetrics m;
  m.loss = 2.31451;
  m.lr = 1.95e-4;
  m.grad_norm = 0.8312;
  m.tokens_per_s = 12400;
  m.mfu = 0.41;
  m.memory_bytes = 5583457485;
  return {"sft", 120, 1000, "", facts_of(m), 200.};
}

TEST(Progress, TheLiveLineShowsEverythingThatFits) {
  const std::string wide = render_live(training_line(), 180, false);
  EXPECT_EQ(wide,
            "sft ━━━───────────────────────── 120/1000  loss 2.3145  lr 1.95e-04  grad norm 0.831  "
            "12.4 k tokens/s  41 % of speed of light  5.2 GiB  3 min 20 s left");
  EXPECT_THAT(render_live(training_line(), 180, true), HasSubstr("\x1b["));
  EXPECT_EQ(display_width(render_live(training_line(), 180, true)), display_width(wide));
}

TEST(Progress, TheLineOfReinforcementLearningBeginsWithTheReward) {
  StepMetrics m;
  m.loss = 0.01;
  m.extras = {{"reward_mean", 0.5},
              {"length_mean", 12.25},
              {"entropy", 1.234},
              {"kl", 0.00123},
              {"staleness_max", 2},
              {"idle_trainer", 0.256},
              {"sync_s", 0.2417},
              {"mismatch_k3", 0.5},
              {"mismatch_k3_age_0", 1.2e-9},
              {"mismatch_k3_age_2", 3.2e-4},
              {"rollout_ranks", 2}};
  EXPECT_EQ(
      render_plain({"rl", 1, 10, "", facts_of(m), {}})
          .find("rl 1/10 (10 %)  reward 0.500  loss 0.0100  length 12.2  entropy 1.23  kl 0.0012  "
                "staleness 2  idle 26 %  sync 0.242 s  mismatch age 0 1.2e-09, age 2+ 0.00032  "
                "2 rollouts"),
      0u);
  // Tokens of one age have no other mismatch than all.
  m.extras = {{"reward_mean", 0.5}, {"mismatch_k3", 2e-6}};
  EXPECT_THAT(facts_of(m), Contains("mismatch 2e-06"));
  m.extras = {{"reward_mean", 0.5}, {"staleness_max", 0}};
  EXPECT_THAT(facts_of(m), Not(Contains(HasSubstr("staleness"))));
}

TEST(Progress, TheLiveLineNeverExceedsTheTerminal) {
  for (int width = 1; width < 200; ++width) {
    EXPECT_LE(display_width(render_live(training_line(), width, true)), width) << width;
  }
  EXPECT_EQ(render_live(training_line(), 30, false), "sft 120/1000  loss 2.3145");
  EXPECT_EQ(render_live(training_line(), 50, false), "sft 120/1000  loss 2.3145  3 min 20 s left");
}

TEST(Progress, PlainLineSaysTheSame) {
  EXPECT_EQ(render_plain(training_line()),
            "sft 120/1000 (12 %)  loss 2.3145  lr 1.95e-04  grad norm 0.831  12.4 k tokens/s  "
            "41 % of speed of light  5.2 GiB  3 min 20 s left");
  EXPECT_EQ(render_plain({"Tokenizing", 1234567, 0, "rows", {}, {}}), "Tokenizing 1.2 M rows");
  EXPECT_EQ(render_plain({"tokenize a.jsonl", 345, 1000, "%", {"12 rows"}, {}}),
            "tokenize a.jsonl 34 %  12 rows");
  EXPECT_EQ(render_plain({"sft", 1000, 1000, "", {"loss 1"}, 0.}), "sft 1000/1000 (100 %)  loss 1");
}

TEST(Progress, PlainLinesAreRateLimitedButTheFirstAndLastAppear) {
  ProgressStyle style;
  style.interval_s = 3600;
  ::testing::internal::CaptureStderr();
  {
    Progress progress("sft", 50, style);
    for (int i = 1; i <= 50; ++i) progress.update(i, {});
    progress.finish();
  }
  const auto lines = text::split(::testing::internal::GetCapturedStderr(), '\n');
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines[0], HasSubstr("sft 1/50"));
  EXPECT_THAT(lines[1], HasSubstr("sft 50/50"));
}

TEST(Progress, EveryLeavesOutTheStepsBetween) {
  ProgressStyle style;
  style.interval_s = 0;
  style.every = 4;
  ::testing::internal::CaptureStderr();
  Progress progress("sft", 10, style);
  for (int i = 1; i <= 9; ++i) progress.update(i, {});
  progress.finish();  // the stopped run's last state is not lost
  const std::string out = ::testing::internal::GetCapturedStderr();
  std::vector<std::string> shown;
  for (const auto& line : text::split(out, '\n')) {
    if (!line.empty()) shown.push_back(text::split(text::split(line, ' ')[1], '/')[0]);
  }
  EXPECT_THAT(shown, ::testing::ElementsAre("1", "4", "8", "9"));
}

TEST(TokenColors, PlainTextMarksBordersAndLoss) {
  const std::vector<TokenText> tokens = {{"<|im_start|>", false, true}, {"user\n", false, false},
                                         {"hi", false, false},          {"an", true, false},
                                         {"swer", true, false},         {"<|im_end|>", true, true},
                                         {"\n", false, false}};
  EXPECT_EQ(render_tokens(tokens, false), "<|im_start|>|user\\n\nhi[[an|swer|<|im_end|>]]\\n\n");
  const std::string colored = render_tokens(tokens, true);
  EXPECT_THAT(colored, HasSubstr("\x1b[32;4man\x1b[0m\x1b[32mswer\x1b[0m"));
  EXPECT_THAT(colored, HasSubstr("\x1b[35m<|im_start|>\x1b[0m"));
  EXPECT_EQ(render_tokens({}, false), "\n");
}

}  // namespace
}  // namespace heddle::ui
