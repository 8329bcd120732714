#include "ui/token_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle::ui {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(TokenReport, MarksLossAndShowsTextAsText) {
  const TokenSample sample{"a.jsonl:3",
                           "longest",
                           "3 tokens, 1 with loss",
                           {{"<|im_start|>", false, true}, {"<b>hi\n", true, false}, {"x", false}}};
  const TokenSource source{"a.jsonl", "1 rows", {sample}};
  const std::string page = render_token_report("Rows", std::span(&source, 1));
  EXPECT_THAT(page, HasSubstr("<span class='loss'>&lt;b&gt;hi\\n\n</span>"));
  EXPECT_THAT(page, HasSubstr("<span class=' special'>&lt;|im_start|&gt;</span>"));
  EXPECT_THAT(page, HasSubstr("<span class=''>x</span>"));
  EXPECT_THAT(page, HasSubstr("a.jsonl:3"));
  EXPECT_THAT(page, Not(HasSubstr("http")));
}

}  // namespace
}  // namespace heddle::ui
