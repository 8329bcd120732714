#include "ui/group_samples.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "testing/temporary_directory.h"
#include "ui/report.h"

namespace heddle::ui {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

nlohmann::json group(int step, int completions, const std::string& text = "fine") {
  nlohmann::json samples = nlohmann::json::array();
  for (int i = 0; i < completions; ++i)
    samples.push_back({{"reward", i % 2 == 0 ? 0.25 : 0.75},
                       {"tokens", 7},
                       {"finish_reason", i == 1 ? "length" : "stop"},
                       {"text", text}});
  return {{"step", step}, {"prompt", "2 + 2"}, {"answer", "4"}, {"samples", samples}};
}

class GroupSamplesTest : public ::testing::Test {
 protected:
  GroupSamples read(const std::string& text) const {
    files::write_atomically(folder_ / "groups.jsonl", text);
    return read_group_samples(folder_ / "groups.jsonl");
  }
  std::string page(const std::string& text) const { return render_groups(read(text)); }
  testing::TemporaryDirectory folder_;
};

TEST_F(GroupSamplesTest, TheFirstAndTheNewestAreShown) {
  std::string lines;
  for (int step = 1; step <= 900; ++step) lines += group(step, 2).dump() + "\n";
  const GroupSamples found = read(lines);
  EXPECT_EQ(found.groups, 900);
  std::vector<std::int64_t> steps;
  for (const SampledGroup& one : found.shown) steps.push_back(one.step);
  EXPECT_THAT(steps, ::testing::ElementsAre(1, 897, 898, 899, 900));
  EXPECT_THAT(render_groups(found), HasSubstr("5 of 900 groups in groups.jsonl"));
}

TEST_F(GroupSamplesTest, RewardsStandWithTheirCompletions) {
  const std::string shown = page(group(40, 6, "I say 5").dump() + "\n");
  EXPECT_THAT(shown, HasSubstr("Step 40"));
  EXPECT_THAT(shown, HasSubstr("mean reward 0.5 of 6 completions, 2 not shown"));
  EXPECT_THAT(shown, HasSubstr("Reward 0.25 · 7 tokens<"));
  EXPECT_THAT(shown, HasSubstr("Reward 0.75 · 7 tokens, cut off<"));
  EXPECT_THAT(shown, HasSubstr("<pre>2 + 2</pre>"));
  EXPECT_THAT(shown, HasSubstr("<pre>4</pre>"));
  std::size_t count = 0;
  for (std::size_t at = shown.find("I say 5"); at != std::string::npos;
       at = shown.find("I say 5", at + 1))
    ++count;
  EXPECT_EQ(count, kShownCompletions);
}

TEST_F(GroupSamplesTest, TurnsStandInTheirOrder) {
  nlohmann::json row = group(1, 1, "end");
  for (int i = 0; i < 10; ++i)
    row["samples"][0]["turns"].push_back(
        {{"completion", "say " + std::to_string(i)}, {"observation", "no " + std::to_string(i)}});
  const std::string shown = page(row.dump() + "\n");
  EXPECT_THAT(shown, HasSubstr("<pre>say 0</pre><pre class='soft'>no 0</pre><pre>say 1</pre>"));
  // Twenty texts and the last one's, of which sixteen are shown.
  EXPECT_THAT(shown, HasSubstr("5 more texts of its turns"));
}

TEST_F(GroupSamplesTest, WhatAModelWritesIsTextOnly) {
  const std::string hostile =
      "</pre><script>alert(1)</script><img src=x onerror='x'>\x1b[2J\x07\x7f & \"quoted\"";
  nlohmann::json row = group(1, 1, hostile);
  row["prompt"] = hostile;
  row["answer"] = {{"key", hostile}};
  row["samples"][0]["turns"] = {{{"completion", hostile}, {"observation", hostile}}};
  const std::string shown = page(row.dump() + "\n");
  EXPECT_THAT(shown, HasSubstr("&lt;/pre&gt;&lt;script&gt;alert(1)"));
  for (const char* raw : {"<script", "<img", "onerror='", "\x1b", "\x07", "\x7f"})
    EXPECT_THAT(shown, Not(HasSubstr(raw)));
}

TEST_F(GroupSamplesTest, LongTextsAreCutBetweenCharacters) {
  // The limit falls within a character of three bytes.
  const std::string shown = page(group(1, 1,
                                       [] {
                                         std::string text = "x";
                                         for (int i = 0; i < 1'000'000; ++i) text += "漢";
                                         return text;
                                       }())
                                     .dump() +
                                 "\n");
  EXPECT_LT(shown.size(), 4000u);
  EXPECT_THAT(shown, HasSubstr("漢<span class='soft'> … 2998002 more bytes</span>"));
}

TEST_F(GroupSamplesTest, LinesThatAreNoGroupAreCountedAndLeftOut) {
  const std::string fine = group(3, 1).dump() + "\n";
  for (const std::string& bad :
       {std::string("{\"step\": 1, \"pro"), std::string("7"), std::string("{}"),
        std::string("{\"step\": 1, \"samples\": 3}"),
        std::string("{\"step\": 1, \"samples\": [3]}"), std::string("\xff\xfe"),
        std::string(1000, '\0'), std::string(100'000, '['), std::string(65 << 20, 'x')}) {
    const GroupSamples found = read(fine + bad + "\n" + fine);
    EXPECT_EQ(found.groups, 3) << bad.substr(0, 40);
    EXPECT_EQ(found.shown.size(), 2u) << bad.substr(0, 40);
    EXPECT_EQ(found.unreadable, 1) << bad.substr(0, 40);
  }
  // A line that is being written has no end yet.
  EXPECT_EQ(read(fine + "{\"step\"").unreadable, 0);
  EXPECT_THAT(page(fine + "7\n"), HasSubstr("1 that cannot be read are left out"));
  // Odd values within a group.
  const GroupSamples odd = read(
      R"({"step":1,"prompt":[1,2],"answer":null,"samples":[{"reward":null,"tokens":"x","text":3}]})"
      "\n");
  ASSERT_EQ(odd.shown.size(), 1u);
  EXPECT_THAT(render_groups(odd), HasSubstr("Reward unknown · 0 tokens"));
}

TEST_F(GroupSamplesTest, AreInTheReportOfTheRun) {
  EXPECT_EQ(page(""), "");
  EXPECT_EQ(render_groups(read_group_samples(folder_ / "none.jsonl")), "");
  files::write_atomically(folder_ / "groups.jsonl", group(12, 1, "I climbed").dump() + "\n");
  files::write_atomically(folder_ / "metrics.jsonl", "");
  write_report(folder_.path(), {});
  EXPECT_THAT(files::read(folder_ / "report.html"), HasSubstr("I climbed"));
  std::filesystem::remove(folder_ / "report.html");
  EXPECT_THAT(files::read(rebuild_report(folder_.path())), HasSubstr("Step 12"));
}

}  // namespace
}  // namespace heddle::ui
